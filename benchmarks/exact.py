"""What the same bits everywhere cost: a step in exact numerics over one in fast fp32 and over plain float64.

    python benchmarks/exact.py

On one device, the whole batch, in turns within one process, by CPU time on one thread (by wall time on a GPU). The
breakdown is of one exact step by its parts. Plain float64 is the model and its loss in PyTorch's own float64: what a
matrix product on float64 units costs at least.
"""

from __future__ import annotations

import copy
import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch
from torch.nn import functional as F

from common import Variant, interleave, middle_of, ratio_of, save, show, show_middle, verdict
from samebits.data.batches import Batches, load_split, on_device, shard_parts
from samebits.data.card import read_card
from samebits.data.prepare import prepare
from samebits.host import count_cores, count_gpus
from samebits.launch import launch
from samebits.models.build import build_model
from samebits.numerics.make import make_numerics
from samebits.params import Params, parse_params
from samebits.placement import Placement, place
from samebits.strategies import make_strategy
from samebits.trainer import Snapshot, Trainable, warm_up

if TYPE_CHECKING:
    from collections.abc import Callable

    from samebits.strategies import Strategy

# name -> parameters, steps of a slice
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "mlp at batch 256": ({"model": {"name": "mlp"}}, 32),
    "wide_mlp at batch 256": ({"model": {"name": "wide_mlp"}}, 1),
    "convnet at batch 256": ({"model": {"name": "convnet"}, "data": {"task": "images", "num_samples": 1024}}, 1),
    "gpt at batch 256": ({"model": {"name": "gpt"}, "data": {"task": "tokens", "num_samples": 1024}}, 1),
}
PARTS = ("outputs", "loss", "backward", "settled", "step")


class Bench:
    """The variants of one case, from the same weights."""

    def __init__(self, params: Params, folder: Path, strategy: Strategy) -> None:
        self.params, self.strategy = params, strategy
        self.card = read_card(folder / "card.json")
        self.data = on_device(load_split(folder, self.card, "train"), strategy.device)
        self.model = build_model(params.model, self.card, params.seed)

    def batches(self) -> Batches:
        """Whole batches."""
        samples = self.params.train.global_batch_size
        layout = shard_parts(samples, self.params.exact.shards, accum=1)
        device = self.strategy.device
        return Batches(self.data, self.card, seed=0, global_batch_size=samples, layout=layout, device=device)

    def kit(self, name: Any) -> Trainable:
        """The kit's training in one of its numerics."""
        device, card = self.strategy.device, self.card
        numerics = make_numerics(name, self.params, device, card.loss, tuple(card.target_shape))
        numerics.configure()
        model = copy.deepcopy(self.model)
        numerics.adopt(model)
        job = Trainable(model.to(device), self.batches(), self.strategy, numerics, self.params)
        warm_up(job, 3)
        return job

    def float64(self, steps: int) -> Variant:
        """A loop by hand in plain float64."""
        model = copy.deepcopy(self.model).to(self.strategy.device).double()
        batches, initial = self.batches(), Snapshot(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def run() -> None:
            for step in range(steps):
                batch = batches.micro_batch(step, 0)
                inputs = batch.inputs.double() if batch.inputs.is_floating_point() else batch.inputs
                optimizer.zero_grad()
                F.cross_entropy(model(inputs).flatten(0, -2), batch.targets.flatten()).backward()
                optimizer.step()

        return Variant(run, initial.restore)


def running(job: Trainable, steps: int) -> Variant:
    """So many steps of the kit's training; they begin where the ones before ended, so that nothing is set up anew."""

    def run() -> None:
        for step in range(steps):
            job.step(step, 0.01)
        if job.strategy.device.type == "cuda":
            torch.cuda.synchronize()

    return Variant(run, lambda: None)


def breakdown(job: Trainable, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Milliseconds of each part of an exact step."""
    seconds: dict[str, list[float]] = {part: [] for part in PARTS}
    originals = {part: getattr(job.numerics, part) for part in PARTS}

    def timed(part: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            started = clock()
            result = originals[part](*args)
            if job.strategy.device.type == "cuda":
                torch.cuda.synchronize()
            seconds[part].append(1e3 * (clock() - started))
            return result

        return call

    for part in PARTS:
        setattr(job.numerics, part, timed(part))
    for step in range(rounds):
        job.step(step, 0.01)
    return {part: middle_of(values) for part, values in seconds.items()}


def work(task: tuple[Params, Placement, Path, int, int], scratch: Path) -> None:  # noqa: ARG001 - as the launcher calls it
    """Measure one case and leave the figures in its folder."""
    params, placement, folder, steps, rounds = task
    strategy = make_strategy(placement, params.train)
    strategy.setup()
    clock = time.process_time if strategy.device.type == "cpu" else time.perf_counter
    bench = Bench(params, folder, strategy)
    fast, exact = bench.kit("fast"), bench.kit("exact")
    variants = {"exact": running(exact, steps), "fast": running(fast, steps), "float64": bench.float64(steps)}
    interleave(variants, 2, strategy, clock)
    seconds = interleave(variants, rounds, strategy, clock)
    found = {
        "milliseconds": {name: middle_of([1e3 * s / steps for s in values]) for name, values in seconds.items()},
        "over": {
            other: {"ratio": (ratio := ratio_of(seconds["exact"], seconds[other])), "verdict": verdict(ratio)}
            for other in ("fast", "float64")
        },
        "parts_ms": breakdown(exact, max(8, min(rounds, 20)), clock),
    }
    (folder / "found.json").write_text(json.dumps(found))


@click.command(help=__doc__)
@click.option("--rounds", default=30, show_default=True, help="Slices of each.")
@click.option("--case", "only", default="", help="Cases whose name contains this.")
def main(rounds: int, only: str) -> None:
    cases = {}
    for name, (changes, steps) in CASES.items():
        if only not in name:
            continue
        data = {"num_samples": 65536, "test_samples": 256, **changes.get("data", {})}
        params = parse_params({"model": changes["model"], "data": data})
        placement = place("single", params.train, gpus=count_gpus(), cores=count_cores(), shards=params.exact.shards)
        with tempfile.TemporaryDirectory() as folder:
            prepare(params, Path(folder))
            launch(work, (params, placement, Path(folder), steps, rounds), 1)
            found = json.loads((Path(folder) / "found.json").read_text())
        cases[name] = found
        for other, record in found["over"].items():
            show(f"{name}, exact over {other}", record["ratio"])
        for part, values in found["parts_ms"].items():
            show_middle(f"  {part}", values, "ms")
    if not only:
        print(save("exact", {"question": "what the same bits everywhere cost", "cases": cases}))


if __name__ == "__main__":
    main()
