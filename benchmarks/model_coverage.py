"""How many families of models train in exact, and at what price: small ones with random weights, nobody's favourites.

Each family trains some steps on one thread, in a process of its own. In exact the batch is fed as 1, 2 and 4 parts, as
ranks have it, and the hashes of the weights have to be one. The price is the CPU time of an exact step over that of a
fast one: at this size both are bound by Python and small kernels, so it is not that of a training. Some of the families
train again in other environments, and their weights have to be the same.

python benchmarks/model_coverage.py [FAMILY ...] [--kept FILE]
"""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
import queue
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click
import torch

from common import few, save, some, with_out_dir
from families import SAMPLES, families
from samebits.errors import RefusedError, SamebitsError, first_line
from samebits.numerics.exact.compiled.build import ZIG
from samebits.numerics.exact.functions import replace_apply
from samebits.numerics.exact.numerics import ExactNumerics
from samebits.numerics.fast import FastNumerics
from samebits.numerics.initialization import portable_initialization
from samebits.numerics.interface import MicroBatch, Numerics
from samebits.params import parse_params
from samebits.portable.random import Stream
from samebits.records.provenance import git_state
from samebits.training.diagnosis import require_same_again

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from families import Family

SHARDS, STEPS, SPLITS = 4, few(3, 1), (1, 2, 4)
SECONDS = 180
"""Time for one family, whose own code may wait for a network."""
ENVIRONMENTS = {
    "SSE alone": {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    "kernels by clang": {"CC": " ".join(ZIG)},
    "no kernels, shard by shard": {"SAMEBITS_KERNELS": "python", "SAMEBITS_SHARDS": "apart"},
}
AGAIN = few(20, 1)
"""Families that train again in each of the environments."""
CPU = torch.device("cpu")
TRAIN = parse_params({"train": {"optimizer": {"name": "adamw", "lr": 0.001}}}).train


def built(family: Family, numerics: Numerics) -> nn.Module:
    """The model with portable weights. Layers that a real batch never reaches stay at the price of nothing."""
    with numerics.construction(), portable_initialization(0):
        model = family.make()
    return model.train()


def batch_of(family: Family, model: nn.Module) -> tuple[Tensor, Tensor]:
    """A batch, and classes for each place of the model's output."""
    inputs = family.batch(torch.Generator().manual_seed(0))
    with torch.no_grad():
        outputs = model(inputs)
    count = outputs[..., 0].numel()
    targets = torch.from_numpy(Stream(1, "classes").below(outputs.shape[-1], count))
    return inputs, targets.view(outputs.shape[:-1])


def train(numerics: Numerics, model: nn.Module, inputs: Tensor, targets: Tensor, splits: int) -> tuple[str, float]:
    """Hash of the weights after some steps of ``splits`` parts each, and CPU seconds of a step."""
    numerics.prepare(model)
    torch.manual_seed(0)
    module, optimizer = numerics.module(model), numerics.optimizer(model)
    bounds = [SHARDS * part // splits for part in range(splits + 1)]
    rows, seconds = SAMPLES // SHARDS, []
    whole = MicroBatch(inputs, targets, 0, range(SHARDS))
    if isinstance(numerics, ExactNumerics):
        require_same_again(numerics, module, whole)
    for step in range(STEPS):
        began = time.process_time()
        while True:
            optimizer.zero_grad(set_to_none=True)
            for first, last in itertools.pairwise(bounds):
                part = slice(first * rows, last * rows)
                batch = MicroBatch(inputs[part], targets[part], step, range(first, last))
                loss = numerics.loss(numerics.forward(module, batch), batch.targets)
                numerics.backward(loss if numerics.reduction == "sum" else loss * (last - first) / SHARDS)
            if numerics.accepts_grads(lambda values: values):
                break
        numerics.step(optimizer)
        seconds.append(time.process_time() - began)
    digest = hashlib.sha256()
    for name, tensor in sorted(numerics.model_state_dict(model).items()):
        digest.update(name.encode() + tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest(), min(seconds)


def measure(family: Family) -> dict[str, Any]:
    """What became of a family in fast and in exact."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    fast = FastNumerics(TRAIN, CPU, "cross_entropy")
    try:
        model = built(family, fast)
        inputs, targets = batch_of(family, model)
        _, of_fast = train(fast, model, inputs, targets, 1)
    except Exception as error:  # noqa: BLE001 - the family's own code may raise anything
        return {"outcome": "not in fast", "why": f"{type(error).__name__}: {first_line(str(error))[:200]}"}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    found: dict[str, Any] = {"parameters": parameters, "fast_s": of_fast}
    hashes, seconds, apart = set(), [], list[str | None]()
    try:
        for splits in SPLITS:
            shape = tuple(targets.shape[1:])
            exact = ExactNumerics(TRAIN, CPU, "cross_entropy", shape, seed=0, shards=SHARDS, samples=SAMPLES)
            exact.configure()
            weights, took = train(exact, built(family, exact), inputs, targets, splits)
            hashes.add(weights)
            seconds.append(took)
            apart.append(exact.apart)
    except RefusedError as error:
        return {**found, "outcome": "refused", "why": first_line(str(error))[:300]}
    except Exception as error:  # noqa: BLE001 - a model may raise anything
        kind = "" if isinstance(error, SamebitsError) else f"{type(error).__name__}: "
        return {**found, "outcome": "failed", "why": f"{kind}{first_line(str(error))[:300]}"}
    outcome = "trains" if len(hashes) == 1 else "two hashes"
    price = seconds[0] / of_fast
    return {**found, "outcome": outcome, "weights": sorted(hashes)[0][:12], "price": price, "apart": apart[0]}


def in_a_process(family: Family) -> dict[str, Any]:
    """``measure`` in a process of its own, whose end or hang counts as a failure."""
    context = multiprocessing.get_context("fork")
    answers: Any = context.Queue()
    process = context.Process(target=lambda: answers.put(measure(family)))
    process.start()
    try:
        found: dict[str, Any] = answers.get(timeout=SECONDS)
    except queue.Empty:
        found = {"outcome": "failed", "why": f"no answer within {SECONDS} s"}
    process.kill()
    process.join()
    return found


def measured(chosen: dict[str, Family], kept: Path | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """What became of each family. What ``kept`` holds of this commit is not measured again; the others are added."""
    commit = git_state().commit
    lines = kept.read_text(encoding="utf-8").splitlines() if kept and kept.is_file() else []
    before = {line["name"]: line["found"] for line in map(json.loads, lines) if line["commit"] == commit}
    for name, family in chosen.items():
        found = before.get(name) or {"library": family.library, **in_a_process(family)}
        if kept and name not in before:
            with kept.open("a", encoding="utf-8") as file:
                print(json.dumps({"commit": commit, "name": name, "found": found}), file=file)
        yield name, found


def weights_in(environ: dict[str, str], names: list[str]) -> dict[str, str]:
    """Weights of families that train in another environment, with kernels made there; or what became of a family."""
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, __file__, "--weights", *names], env={**os.environ, "XDG_CACHE_HOME": cache, **environ},
            stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
    weights: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return weights


def train_elsewhere(found: dict[str, dict[str, Any]]) -> None:
    """Train some of the families in other environments, and note with each in which its weights differ."""
    names = [name for name, one in found.items() if one["outcome"] == "trains"]
    names = names[:: max(len(names) // AGAIN, 1)][:AGAIN]
    for environment, environ in ENVIRONMENTS.items():
        weights = weights_in(environ, names) if names else {}
        for name in names:
            unlike = found[name].setdefault("differs_in", {})
            if weights[name] != found[name]["weights"]:
                unlike[environment] = weights[name]
        print(f"{environment}: {names}", flush=True)


def summary(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Counts of outcomes among the families that train in fast, and the median price."""
    counts = Counter(entry["outcome"] for entry in found.values())
    prices = [entry["price"] for entry in found.values() if "price" in entry]
    total = sum(counts.values()) - counts["not in fast"]
    whole = sum(entry["outcome"] == "trains" and entry["apart"] is None for entry in found.values())
    again = [entry["differs_in"] for entry in found.values() if "differs_in" in entry]
    return {
        "families": total, **counts, "whole": whole, "price": median(prices) if prices else None,
        "again": len(again), "differ": sum(map(bool, again)),
    }  # fmt: skip


@click.command()
@click.argument("names", nargs=-1)
@click.option("--weights", is_flag=True, help="Print the weights of these families as JSON, and nothing else.")
@click.option("--kept", type=click.Path(path_type=Path), help="Go on with the results that FILE holds of this commit.")
@with_out_dir
def main(names: tuple[str, ...], weights: bool, kept: Path | None, out_dir: Path) -> None:
    """Train each family, print what became of it, and write a record of all of them."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    replace_apply()  # before a library keeps it under another name, as a process that trains in exact does
    chosen = families()
    chosen = some({name: family for name, family in chosen.items() if not names or name in names})
    if weights:
        of_each = dict(measured(chosen, None))
        print(json.dumps({name: one.get("weights", one["outcome"]) for name, one in of_each.items()}))
        return
    found: dict[str, dict[str, Any]] = {}
    for name, one in measured(chosen, kept):
        found[name] = one
        said = f"{one['price']:.1f} times fast" if "price" in one else one.get("why", "")
        print(f"{name}: {one['outcome']}: {said}", flush=True)
    train_elsewhere(found)
    print(summary(found))
    if not names:
        record = {"families": found, "environments": [*ENVIRONMENTS], "summary": summary(found)}
        save(out_dir, "model_coverage", record)


if __name__ == "__main__":
    main()
