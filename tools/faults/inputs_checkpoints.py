"""Checkpoints that are none: shown to the doctor, and left where a training looks for its own."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from faults.inputs_bench import RUN, Attempt
from faults.inputs_commands import argument
from faults.inputs_records import tensors
from faults.inputs_values import damaged, not_a_file
from faults.subject import expect
from samebits.host import host_facts
from samebits.params import load_params
from samebits.records.card import read_card
from samebits.training.checkpoints import FOLDER, identity
from samebits.training.placement import place, this_machine

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from faults.inputs_bench import Bench
    from faults.subject import Child

_STEP = 2


def checkpoints(rng: random.Random, bench: Bench) -> Attempt:
    """One of the two."""
    return rng.choice((shown, left))(rng, bench)


def shown(rng: random.Random, bench: Bench) -> Attempt:
    """Show the doctor a checkpoint that is something else."""
    path = bench.folder / "checkpoint.safetensors"
    good = (bench.folder / RUN / "model.safetensors").read_bytes()
    how = rng.choice(("pickle", "torch.save", "tensors", "tensors", "bytes", "no file"))
    path.write_bytes(good)
    match how:
        case "pickle":
            path.write_bytes(bench.pickle())
        case "torch.save":
            import torch

            torch.save({"weight": bench.pickle_of()}, path, _use_new_zipfile_serialization=rng.random() < 0.5)
        case "tensors":
            path.write_bytes(tensors(rng, good, bench))
        case "bytes":
            path.write_bytes(damaged(rng, good))
        case _:
            how = not_a_file(rng, path, bench.outside)
    name = path.name if rng.random() < 0.8 else argument(rng, bench)
    command = partial(bench, "samebits", "doctor", "--checkpoint", name)
    return Attempt(f"doctor --checkpoint {name[:60]!r}: {how}", command, {0, 2, 3})


def left(rng: random.Random, bench: Bench) -> Attempt:
    """Leave something under the name of a whole checkpoint: the training sets it aside, and its bits are the same."""
    params = load_params(bench.folder / "params.yaml")
    placement, _ = place("single", params, "fast", this_machine())
    card = read_card(bench.folder / "data/card.json")
    host = host_facts().fingerprint
    name = identity(params, "fast", placement, card=card, host=host, source=None, folder=Path(RUN))
    folder = bench.folder / FOLDER / name
    folder.mkdir(parents=True)
    good = (bench.folder / RUN / "model.safetensors").read_bytes()
    how = rng.choice(("pickle", "weights", "tensors", "bytes"))
    contents: dict[str, Callable[[], bytes]] = {
        "pickle": bench.pickle,
        "weights": lambda: good,
        "tensors": lambda: tensors(rng, good, bench),
        "bytes": lambda: damaged(rng, good),
    }
    data = contents[how]()
    digest = hashlib.sha256(data).hexdigest()
    (folder / f"{_STEP:012d}-{digest}.safetensors").write_bytes(data)
    return Attempt(f"a checkpoint of the training: {how}, {data[:60]!r}", partial(_trained, bench, good), {0})


def _trained(bench: Bench, good: bytes) -> Child:
    child = bench("train", "--strategy", "single", "--no-tracking")
    if child.code == 0:
        expect("it is set aside" in child.err(), "a checkpoint that is none was not looked at", child.err())
        expect((bench.folder / RUN / "model.safetensors").read_bytes() == good, "wrong bits")
    return child
