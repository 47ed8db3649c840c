"""Damaged or crafted files of the kit: cards, records, weights, checkpoints, logs, states, dvc.lock."""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from ruamel.yaml import YAML

from faults.inputs_bench import DP, OTHER, RUN, VERDICT, Attempt, forget_delivery, own_store
from faults.inputs_commands import argument
from faults.inputs_values import changed, damaged, json_of, not_a_file, places, spoil_json, value
from faults.subject import expect
from samebits.hashes import sha256
from samebits.host import host_facts
from samebits.params import load_params
from samebits.records.card import card_for, read_card
from samebits.records.log import SCHEMA
from samebits.records.provenance import provenance_of
from samebits.training.checkpoints import FOLDER, identity
from samebits.training.placement import place, this_machine

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from faults.inputs_bench import Bench
    from faults.subject import Child

AGAIN_SECONDS = 60.0  # for a command that may train again
_TRAIN = ("train", "--strategy", "single", "--no-tracking", "--steps", "2")
_CSV = (
    b"", b"step,loss\n", b"step,loss\n1,\n", b"step,loss\n1,nan\n2,inf\n3,-inf\n4,1\n",
    b"loss\n" + b"9" * 200_000 + b"\n",
    b'step,loss\n1,"' + b"x" * 200_000 + b'"\n', b"step,loss\n1,1\0\n", b"a,b\n1,2\n", b"step,loss\n1\n", b"\xff\xfe\n",
    b"step,loss\n1,1,1,1\n", b'step,loss\n1,"1\n', b"step,loss,loss\n1,2,3\n", b"step,loss\r1,2\r",
    b"step,loss\n" + b"1,1e400\n" * 4,
    b"step,loss\n" + b"1,0\n" * 100_000, b"step,loss\n1,1_0\n", b"step,loss\n1,0x1\n",
)  # fmt: skip


def stages(rng: random.Random, bench: Bench) -> Attempt:
    """Damage one file of the pipeline and run a stage that reads it."""
    file, stage = rng.choice(
        (
            ("data/card.json", _TRAIN), ("data/card.json", ("evaluate",)), (f"{RUN}/run.json", ("evaluate",)),
            (f"{RUN}/run.json", ("compare", "--no-tracking")), (f"{DP}/run.json", ("compare", "--no-tracking")),
            (f"{DP}/run.json", ("compare", "--no-tracking")), (f"{RUN}/timing.json", ("compare", "--no-tracking")),
            ("reports/evaluation/single-fast.json", ("compare", "--no-tracking")), ("host.json", ("compare",
            "--no-tracking")),
            (".samebits/hashes.json", ("host",)), (f"{RUN}/losses.csv", ("compare", "--no-tracking")),
            (f"{RUN}/model.safetensors", ("evaluate",)), ("data/train.safetensors", _TRAIN), ("data/test.safetensors",
            ("evaluate",)),
        )
    )  # fmt: skip
    path = bench.folder / file
    if file == ".samebits/hashes.json":
        _remembered(bench)
    before = _bytes(path)
    what = spoil(rng, path, bench)
    if path.suffix == ".safetensors" and _bytes(path) != before and not _is_recorded(path, bench):
        codes = {2, 3}  # neither card nor record has their hash, so nothing may be computed from them
    else:
        codes = {0, 2, 3}
    return Attempt(what, partial(bench, *stage), codes, _names_of(path))


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _is_recorded(path: Path, bench: Bench) -> bool:
    """Whether the card or the record has the hash of a file."""
    digest = hashlib.sha256(_bytes(path) or b"").hexdigest()
    return any(digest in (bench.folder / name).read_text("utf-8") for name in ("data/card.json", f"{RUN}/run.json"))


def _names_of(path: Path) -> tuple[str, ...]:
    """Names by which an error may refer to a file: its own, or its run's if it contradicts the run's other files."""
    return (path.name, path.parent.name) if path.parent.parent.name == "runs" else (path.name,)


def _remembered(bench: Bench) -> None:
    """Give the stage host a file with remembered hashes."""
    np.save(bench.folder / "x.npy", np.zeros((320, 8), np.float32))
    tree = YAML(typ="safe").load((bench.folder / "params.yaml").read_text(encoding="utf-8"))
    tree["data"] |= {"task": "file", "kwargs": {"inputs": "x.npy", "targets": "x.npy"}}
    bench.write_params(tree)
    known = {str((bench.folder / "x.npy").resolve()): [1, 2, "abc"]}
    (bench.folder / ".samebits").mkdir(exist_ok=True)
    (bench.folder / ".samebits/hashes.json").write_text(json.dumps(known), encoding="utf-8")


def spoil(rng: random.Random, path: Path, bench: Bench) -> str:
    """Damage a file in a way that suits its format, and describe it."""
    if path.suffix == ".json":
        return spoil_json(rng, path, bench.outside)
    if rng.random() < 0.2:
        return f"{path.name}: {not_a_file(rng, path, bench.outside)}"
    if path.suffix == ".csv" and rng.random() < 0.7:
        data = rng.choice(_CSV)
    elif path.suffix == ".safetensors" and rng.random() < 0.7:
        data = tensors(rng, path.read_bytes(), bench)
        if rng.random() < 0.7:
            path.write_bytes(data)
            rehash(path, bench)
    else:
        data = damaged(rng, path.read_bytes())
    path.write_bytes(data)
    return f"{path.name}: {len(data)} bytes, {data[:60]!r}"


def tensors(rng: random.Random, data: bytes, bench: Bench) -> bytes:
    """A safetensors file with a wrong header, or other bytes."""
    if rng.random() < 0.3:
        return rng.choice((bench.pickle(), b"PK\x03\x04" + bench.pickle(), b"", damaged(rng, data)))
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    for _ in range(rng.choice((1, 2))):
        place = rng.choice([place for place in places(header) if place])
        new: object = rng.choice((
            "F16", "BF16", "F8_E4M3", "I64", "U64", "BOOL", "C64", "F64", "F4", "x", [], [0], [2**40], [-1], [16, 16],
            None, 3,
            [0, 0], [0, 10**18], [8, 0], "\x1b[31m", {},
        ))  # fmt: skip
        header = changed(rng, header, place, new)
    text = json.dumps(header).encode()
    return struct.pack("<Q", rng.choice((len(text), len(text), len(text), 2**62))) + text + data[8 + length :]


def rehash(path: Path, bench: Bench) -> None:
    """Write the hash of a damaged file into card and record, so that the reader gets as far as its contents."""
    if path.parent.name == "data":
        card = path.with_name("card.json")
        changes: dict[str, Any] = {"data": card_for(path, read_card(card)).model_dump(mode="json")}
        card.write_text(json.dumps(changes["data"]), encoding="utf-8")
    else:
        changes = {"weights_sha256": sha256(path)}
    record = bench.folder / RUN / "run.json"
    tree = json.loads(record.read_text(encoding="utf-8"))
    record.write_text(json.dumps({**tree, **changes}), encoding="utf-8")


def commands(rng: random.Random, bench: Bench) -> Attempt:
    """Damage a run, a comparison or dvc.lock, and run a command that reads it."""
    kind = rng.choice(("compare", "compare", "report", "report", "verify"))
    if kind == "compare":
        name = rng.choice(("run.json", "timing.json", "losses.csv", "model.safetensors"))
        path = bench.folder / OTHER / name
        what = spoil(rng, path, bench)
        more = rng.choice(((), ("--json",), ("--require", "bitwise"), ("--require", "tolerance")))
        command = partial(bench, "samebits", "compare", *rng.sample((RUN, OTHER), 2), *more)
        return Attempt(what, command, VERDICT, _names_of(path))
    if kind == "report":
        path = bench.folder / "reports/comparison.json"
        what, options = spoil(rng, path, bench), rng.choice(((), ("--out-dir", "again")))
        return Attempt(what, partial(bench, "samebits", "report", *options), {0, 2, 3}, (path.name,))
    what = _lock(rng, bench)
    params = {"train": {"numerics": ["exact"], "strategies": ["single"]}}
    bench.write_params(params)
    quick = rng.choice(((), ("--quick",)))
    return Attempt(what, partial(bench, "samebits", "verify", *quick, seconds=AGAIN_SECONDS), VERDICT, ("dvc.lock",))


def _lock(rng: random.Random, bench: Bench) -> str:
    """Damage ``dvc.lock``, mostly the entry of the run."""
    path = bench.folder / "dvc.lock"
    choice = rng.random()
    if choice < 0.15:
        return f"dvc.lock: {not_a_file(rng, path, bench.outside)}"
    if choice < 0.35:
        data = rng.choice((b"[" * 100_000, b"stages: 3\n", b"[]\n", b"", b"stages: &s {a: *s}\n", b"x: 2001-99-99\n",
        b"\xff\n",
                           b"stages: !!python/object/apply:os.system [touch canary]\n", b"a: 1\na: 2\n",
                           b"stages: []\n",
                           b"x: " + b"9" * 5000, b"null\n", damaged(rng, path.read_bytes())))  # fmt: skip
        path.write_bytes(data)
        return f"dvc.lock: {data[:60]!r}"
    tree: Any = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    stage = "train@single-exact"
    tree["stages"] = {stage: tree["stages"][stage]}
    place = rng.choice([place for place in places(tree) if place])
    new = value(rng, bench.outside)
    path.write_text(json.dumps(changed(rng, tree, place, new)), encoding="utf-8")
    return f"dvc.lock: {'.'.join(map(str, place))} = {str(new)[:60]!r}"


def tracking(rng: random.Random, bench: Bench, template: Path) -> Attempt:
    """Damage a log, its provenance, its delivery state or an artifact of a run."""
    run_id = own_store(bench, template)
    kind = rng.choice(("log", "log", "state", "provenance", "artifact", "artifact"))
    if kind == "artifact":
        (folder,) = (bench.folder / "mlartifacts").glob("*/artifacts")
        name = rng.choice(
            (
                "provenance.json",
                "provenance.json",
                "run.json",
                "params.yaml",
                "losses.csv",
                "model.safetensors",
                "timing.json",
            )
        )
        what = f"artifact {spoil(rng, folder / name, bench)}"
        reader = rng.choice((("reproduce", run_id, "--yes"), ("compare", RUN, run_id)))
        return Attempt(what, partial(bench, "samebits", *reader, seconds=AGAIN_SECONDS), VERDICT, (name, run_id))
    (log,) = (bench.folder / ".samebits/runs").glob("*.jsonl")
    if kind == "state":
        what = spoil(rng, log.with_suffix(".state.json"), bench)
    else:
        forget_delivery(bench)
        what = _log(rng, log, bench) if kind == "log" else spoil(rng, provenance_of(log), bench)
    command = rng.choice((("track", "sync"), ("track", "sync"), ("doctor",)))
    return Attempt(what, partial(bench, "samebits", *command), {0, 2, 3}, (log.stem,))


def _log(rng: random.Random, log: Path, bench: Bench) -> str:
    lines = log.read_bytes().splitlines()
    if rng.random() < 0.1:
        return f"log: {not_a_file(rng, log, bench.outside)}"
    number = rng.randrange(len(lines))
    match rng.randrange(8):
        case 0:
            new = [*lines[:number], *lines[number + 1 :]]
        case 1:
            new = rng.sample(lines, len(lines))
        case 2:
            event = {"event": "comparison", "log_schema": SCHEMA, "tracking_uri": None, "key": "k'", "time_ms": 1,
                     "keys": [str(value(rng, bench.outside)) for _ in range(3)],
                     "reports": str(rng.choice(("reports", bench.outside))), "runs": str(rng.choice(("runs",
                     bench.outside)))}  # fmt: skip
            new = [_signed(json.dumps(event).encode()), lines[-1]]
        case _:
            new = list(lines)
            line = json_of(rng, lines[number].decode(), bench.outside).replace(b"\n", b" ")
            new[number] = _signed(line) if rng.random() < 0.5 else line
    log.write_bytes(b"\n".join(new) + rng.choice((b"\n", b"\n", b"")))
    return f"log: line {number}, {[line[:40] for line in new[number : number + 1]]}"


def _signed(line: bytes) -> bytes:
    """A line of a log with a right checksum, so that the reader gets as far as its contents."""
    try:
        tree = json.loads(line)
    except (ValueError, RecursionError):
        tree = None
    if isinstance(tree, dict):  # in the format of the log
        tree.pop("crc32", None)
        line = json.dumps(tree, separators=(",", ":")).encode() + b"\n"
    text = line.rpartition(b',"crc32":')[0] or line.rstrip()[:-1]
    return text + b',"crc32":"%08x"}' % zlib.crc32(text)


def checkpoints(rng: random.Random, bench: Bench) -> Attempt:
    """Give a bad checkpoint to the doctor or to a training."""
    return rng.choice((shown, left))(rng, bench)


def shown(rng: random.Random, bench: Bench) -> Attempt:
    """Give the doctor a file that is no checkpoint."""
    path = bench.folder / "checkpoint.safetensors"
    good = (bench.folder / RUN / "model.safetensors").read_bytes()
    how = rng.choice(("pickle", "torch.save", "tensors", "tensors", "bytes", "no file"))
    path.write_bytes(good)
    match how:
        case "pickle":
            path.write_bytes(bench.pickle())
        case "torch.save":
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
    """Leave a bad checkpoint with a right hash in its name. The training sets it aside and has the same bits."""
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
    (folder / f"{2:012d}-{digest}.safetensors").write_bytes(data)
    return Attempt(f"a checkpoint of the training: {how}, {data[:60]!r}", partial(_trained, bench, good), {0})


def _trained(bench: Bench, good: bytes) -> Child:
    child = bench("train", "--strategy", "single", "--no-tracking")
    if child.code == 0:
        expect("it is set aside" in child.err(), "a checkpoint that is none was not looked at", child.err())
        expect((bench.folder / RUN / "model.safetensors").read_bytes() == good, "wrong bits")
    return child
