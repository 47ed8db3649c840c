"""What the same bits everywhere cost: a step in exact numerics over one in fast fp32 and over plain float64.

    python benchmarks/exact.py

On one device, the whole batch, in turns within one process, by CPU time on one thread (by wall time on a GPU). The
breakdown is of one exact step by its parts. Plain float64 is the model and its loss in PyTorch's own float64: what a
matrix product on float64 units costs at least; ``python`` is exact without the kernels that are compiled for a CPU, and
``graphs``, on a GPU, exact whose passes are replayed. ``kept`` is how long it takes to see whether forward has written
anything, twice in a step, and ``tried`` how long to feed some shards twice, which few steps do.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import click
import torch
from torch.nn import functional as F

from common import (
    BATCH,
    MLP,
    VECTORS,
    Variant,
    few,
    import_torchvision,
    interleave,
    middle_of,
    ratio_of,
    result_of,
    save,
    show,
    show_middle,
    some,
    verdict,
    with_out_dir,
)
from samebits.data.prepare import prepare
from samebits.host import count_gpus
from samebits.numerics.exact.compiled import library
from samebits.numerics.exact.module import ExactModule
from samebits.params import parse_params
from samebits.records.card import read_card
from samebits.training.diagnosis import require_same_again
from samebits.training.loop import Snapshot, warm_up
from samebits.training.setup import Setup
from samebits.training.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from samebits.params import Params
    from samebits.params.schema import NumericsName
    from samebits.training.loop import Trainable
    from samebits.workers.rank import Reporter

HERE = Path(__file__).resolve().parent  # where a user's model lies
# name -> parameters, steps of a slice
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "mlp at batch 256": ({"model": MLP, "data": VECTORS}, 32),
    "wide_mlp at batch 256": ({"model": {"name": "wide_mlp"}, "data": VECTORS}, 1),
    "convnet at batch 256": ({"model": {"name": "convnet"}, "data": {"task": "images", "num_samples": 1024}}, 1),
    "gpt at batch 256": ({"model": {"name": "gpt"}, "data": {"task": "tokens", "num_samples": 1024}}, 1),
    **{
        f"a user's {name} at batch {batch}": (
            {"model": {"name": f"user_models:{name}"}, "data": {**data, "num_samples": 1024}, "batch": batch},
            1,
        )
        for data, batch, names in (
            ({"task": "images"}, 16, ("ManyModules", "ResNet50")),
            ({"task": "images"}, 64, ("ResNet", "ConvNeXt", "ViT")),
            ({"task": "tokens"}, 256, ("NanoGPT", "GPT2", "Llama", "Bert", "LSTM")),
        )
        for name in names
    },
}
# Larger where there is a GPU, on which the cases above would measure how fast the host launches kernels.
CASES_OF_GPUS: dict[str, tuple[dict[str, Any], int]] = {
    "wide_mlp of [2048, 2048] at batch 32768": (
        {"model": {"name": "wide_mlp", "kwargs": {"hidden": [2048, 2048]}}, "data": VECTORS, "batch": 32768},
        2,
    ),
    "convnet at batch 1024": (
        {"model": {"name": "convnet"}, "data": {"task": "images", "num_samples": 2048}, "batch": 1024},
        4,
    ),
    "gpt at batch 2048": (
        {"model": {"name": "gpt"}, "data": {"task": "tokens", "num_samples": 4096}, "batch": 2048},
        4,
    ),
}
PARTS = ("forward", "loss", "backward", "accepts_grads", "step")  # methods of numerics


def set_up(params: Params, numerics: NumericsName, folder: Path) -> Setup:
    """Set up one device with the whole batch. It sets this process's switches for the numerics."""
    worker = Worker([torch.device("cuda", 0) if count_gpus() else torch.device("cpu")])
    card, split = read_card(folder / "card.json"), params.batch_split(numerics)
    setup = Setup(params, numerics, card, split=split, worker=worker)
    setup.enter_process()
    return setup


def kit(setup: Setup, folder: Path) -> Trainable:
    """The kit's training in one of its numerics."""
    trainable = setup.trainable(setup.place(setup.build()), setup.batches(setup.load(folder)))
    trainable.require_same_again(0)
    warm_up(trainable, 3)
    return trainable


def float64(setup: Setup, folder: Path, steps: int) -> Variant:
    """A loop by hand in plain float64."""
    model = setup.build().to(setup.worker.device).double()
    batches, initial = setup.batches(setup.load(folder)), Snapshot(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def run() -> None:
        for step in range(steps):
            batch = batches.micro_batch(step, 0)
            inputs = batch.inputs.double() if batch.inputs.is_floating_point() else batch.inputs
            optimizer.zero_grad()
            F.cross_entropy(model(inputs).flatten(0, -2), batch.targets.flatten()).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if setup.worker.device.type == "cuda":
            torch.cuda.synchronize()

    def reset() -> None:
        setup.numerics.configure()
        initial.restore()

    return Variant(run, reset)


def running(trainable: Trainable, steps: int) -> Variant:
    """So many steps of the kit's training. Each run goes on from the one before, so that nothing is set up again."""

    def run() -> None:
        for step in range(steps):
            trainable.step(step, 0.01)
        if trainable.worker.device.type == "cuda":
            torch.cuda.synchronize()

    return Variant(run, trainable.numerics.configure)  # the other numerics have set this process's switches


def without_kernels(trainable: Trainable) -> None:
    """Let Python's functions answer in place of the compiled kernels."""
    trainable.numerics.configure()
    library.unused(trainable.worker.device.type)


def breakdown(trainable: Trainable, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Milliseconds of each part of an exact step."""
    seconds: dict[str, list[float]] = {part: [] for part in PARTS}
    numerics = trainable.numerics
    numerics.configure()
    methods = {part: getattr(numerics, part) for part in PARTS}

    def timed(part: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            started = clock()
            result = methods[part](*args)
            if trainable.worker.device.type == "cuda":
                torch.cuda.synchronize()
            seconds[part].append(1e3 * (clock() - started))
            return result

        return call

    for part in PARTS:
        setattr(numerics, part, timed(part))
    for step in range(rounds):
        trainable.step(step, 0.01)
    return {part: middle_of(values) for part, values in seconds.items()}


def watched(trainable: Trainable, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Milliseconds of the checks of a model: ``kept`` in a step, with its share, and ``tried`` each time."""
    module, batch = trainable.numerics.module(trainable.model), trainable.batches.micro_batch(0, 0)
    assert isinstance(module, ExactModule)
    look, spent = ExactModule.require_kept, [0.0]

    def timed(self: ExactModule, mode: bool, **settings: bool) -> None:
        started = clock()
        look(self, mode, **settings)
        spent[0] += clock() - started

    kept, tried, shares = [], [], []
    with patch.object(ExactModule, "require_kept", timed):
        for step in range(rounds):
            spent[0], started = 0.0, clock()
            trainable.step(step, 0.01)
            shares.append(spent[0] / (clock() - started))
            kept.append(1e3 * spent[0])
    for _ in range(3):
        started = clock()
        require_same_again(trainable.numerics, module, batch)
        tried.append(1e3 * (clock() - started))
    return {"kept": middle_of(kept), "tried": middle_of(tried), "share": middle_of(shares)}


def work(params: Params, folder: Path, steps: int, rounds: int, _: Reporter) -> dict[str, Any]:
    """Measure one case in a worker."""
    import_torchvision()  # as transformers does
    fast_setup = set_up(params, "fast", folder)
    worker = fast_setup.worker
    clock = time.process_time if worker.device.type == "cpu" else time.perf_counter
    fast, exact = kit(fast_setup, folder), kit(set_up(params, "exact", folder), folder)
    variants = {
        "exact": running(exact, steps),
        "fast": running(fast, steps),
        "float64": float64(fast_setup, folder, steps),
    }
    if library.chosen() is not None:
        variants["python"] = Variant(running(exact, steps).run, partial(without_kernels, exact))
    if worker.device.type == "cuda":
        replayed = params.model_copy(update={"train": params.train.model_copy(update={"cuda_graphs": True})})
        variants["graphs"] = running(kit(set_up(replayed, "exact", folder), folder), steps)
    interleave(variants, 2, worker, clock)
    seconds = interleave(variants, rounds, worker, clock)
    ratios = {name: ratio_of(seconds["exact"], seconds[name]) for name in variants if name != "exact"}
    looks = few(max(8, min(rounds, 20)), 1)
    measured = {
        "milliseconds": {name: middle_of([1e3 * s / steps for s in values]) for name, values in seconds.items()},
        "over": {name: {"ratio": ratio, "verdict": verdict(ratio)} for name, ratio in ratios.items()},
        "parts_ms": breakdown(exact, looks, clock),
    }
    measured["watched"] = watched(exact, looks, clock)
    return measured


@click.command(help=__doc__)
@click.option("--rounds", default=few(30, 1), show_default=True, help="Slices of each.")
@click.option("--case", "only", default="", help="Cases whose name contains this.")
@with_out_dir
def main(rounds: int, only: str, out_dir: Path) -> None:
    cases = {}
    for name, (changes, steps) in some(CASES_OF_GPUS if count_gpus() else CASES).items():
        if only not in name:
            continue
        data = {"num_samples": 65536, "test_samples": 256, **changes.get("data", {})}
        params = parse_params(
            {"model": changes["model"], "data": data, "train": {"global_batch_size": changes.get("batch", BATCH)}}
        )
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(HERE):
            prepare(params, Path(folder))
            case = result_of(partial(work, params, Path(folder), steps, rounds))
        cases[name] = case
        for reference, record in case["over"].items():
            show(f"{name}, exact over {reference}", record["ratio"])
        for part, values in case["parts_ms"].items():
            show_middle(f"  {part}", values, "ms")
        for part, values in case.get("watched", {}).items():
            show_middle(f"  {part}", values, "of a step" if part == "share" else "ms")
    if not only:
        print(save(out_dir, "exact", {"question": "what the same bits everywhere cost", "cases": cases}))


if __name__ == "__main__":
    main()
