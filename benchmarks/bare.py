"""The kit's training beside loops written by hand, in the same processes and in turns.

All start from the same weights, feed the same batches in the same order and end with the same losses, which is checked.
What a loop needs once, such as its loader, its optimizer or a ``Trainer``, is made outside the timed part.
"""

from __future__ import annotations

import copy
import gc
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from common import MLP, VECTORS, Variant, few, interleave, judged, result_of, some
from samebits.data.prepare import prepare
from samebits.params import parse_params
from samebits.records.card import read_card
from samebits.strategies.placement import Devices
from samebits.training.batches import Batches
from samebits.training.loop import Snapshot, train, warm_up
from samebits.training.placement import place
from samebits.training.setup import Setup
from samebits.training.worker import make_worker
from samebits.workers.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from samebits.params import Params
    from samebits.strategies import StrategyName
    from samebits.training.batches import Data
    from samebits.training.loop import Trainable
    from samebits.workers.rank import Reporter

# name -> model, global batch, steps of a slice
CASES = some(
    {
        "mlp at batch 64": ("mlp", 64, few(256, 8)),
        "mlp at batch 256": ("mlp", 256, 128),
        "wide_mlp at batch 256": ("wide_mlp", 256, 2),
    }
)
DEVICES = Devices(gpus=0, cores=2)
OPTIMIZER: dict[str, Any] = {"lr": 0.01, "momentum": 0.9}
LAUNCHER = ("LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "RANK", "WORLD_SIZE")
TOLERANCE = 1e-5  # largest difference between losses of the same work


@dataclass(frozen=True)
class Setting:
    """The input of a loop.

    ``order`` has the rows of ``data`` that this rank feeds, (steps, samples). The loop puts the losses of its last run
    into ``losses`` under its name.
    """

    model: nn.Module
    data: Data
    order: Tensor
    clock: Callable[[], float]
    losses: dict[str, list[float]]


Loop = Callable[[Setting, str], Variant]
"""Makes a loop to time from its input and its name."""


def resetting(model: nn.Module, then: Callable[[], None]) -> Callable[[], None]:
    """A function that resets ``model`` to its current weights and PyTorch to its initial state."""
    initial = Snapshot(model)

    def reset() -> None:
        torch.set_deterministic_debug_mode("default")
        initial.restore()
        then()

    return reset


def bare(wrap: Callable[[nn.Module], nn.Module]) -> Loop:
    """The smallest loop: data in memory, whole batches by indexing, no schedule, no clock, no tracker."""

    def make(setting: Setting, name: str) -> Variant:
        module = wrap(setting.model)
        optimizer = torch.optim.SGD(setting.model.parameters(), **OPTIMIZER)
        inputs, targets = setting.data

        def run() -> None:
            losses = []
            for step in range(len(setting.order)):
                rows = setting.order[step]
                x, y = inputs[rows], targets[rows]
                optimizer.zero_grad()
                loss = F.cross_entropy(module(x), y)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                losses.append(loss.detach())
            setting.losses[name] = torch.stack(losses).tolist()

        return Variant(run, resetting(setting.model, optimizer.state.clear))

    return make


def kit(trainable: Trainable, steps: int, losses: dict[str, list[float]]) -> Variant:
    """The kit's own loop with its schedule, its clock and a silent tracker."""

    def run() -> None:
        tracker = Progress("", steps, lambda *_: None, None, shown=False)
        losses["kit"] = train(trainable, steps, step_seconds=1e-3, tracker=tracker).losses

    def reset() -> None:
        torch.set_deterministic_debug_mode("error")
        trainable.reset()

    return Variant(run, reset)


def work(
    params: Params,
    strategy: StrategyName,
    folder: Path,
    loops: Mapping[str, Loop],
    rounds: int,
    clock: Callable[[], float],
    _: Reporter,
) -> dict[str, list[float]]:
    """Measure in each worker, with the data in ``folder``. Returns the seconds of each variant's slices."""
    placement, split = place(strategy, params, "fast", DEVICES)
    worker = make_worker(placement, params.train)
    setup = Setup(params, "fast", read_card(folder / "card.json"), split=split, worker=worker)
    setup.enter_process()
    if worker.world_size == 1:
        for name in [name for name in os.environ if name.startswith(LAUNCHER)]:
            del os.environ[name]  # otherwise a peer sees several workers and sets its own threads
    seconds = measure(setup, folder, loops, rounds, clock)
    gc.collect()  # wrappers have to be freed before their process group
    worker.close()
    return seconds


def measure(
    setup: Setup, folder: Path, loops: Mapping[str, Loop], rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Check that all loops do the same work, then time them in turns."""
    worker, steps = setup.worker, setup.params.total_steps
    model, data = setup.build(), setup.load(folder)
    batches = setup.batches(data)
    assert isinstance(batches, Batches)
    assert isinstance(data, tuple)
    order = torch.stack([batches._rows(step, 0) for step in range(steps)])
    losses: dict[str, list[float]] = {}

    trainable = setup.trainable(setup.place(copy.deepcopy(model)), batches)
    warm_up(trainable, 3)
    variants = {"kit": kit(trainable, steps, losses)}
    for name, make in loops.items():
        variants[name] = make(Setting(copy.deepcopy(model), data, order, clock, losses), name)
    interleave(variants, 3, worker, clock)
    means = {name: worker.ranks.all_reduce(torch.tensor(values)) / worker.world_size for name, values in losses.items()}
    for name in loops:
        apart = float((means[name] - means["kit"]).abs().max())
        assert apart <= TOLERANCE, f"{name} does not do the same work: its losses differ by {apart}"
    assert torch.get_num_threads() == 1, "a loop has set the number of threads"
    gc.freeze()  # later collections skip the objects so far
    return interleave(variants, rounds, worker, clock)


def against(
    strategy: StrategyName, loops: Mapping[str, Loop], rounds: int, clock: Callable[[], float]
) -> dict[str, Any]:
    """Measure every case on at most two CPU devices. Prints and returns the ratios of the kit to each loop."""
    results = {}
    for name, (model, batch, steps) in CASES.items():
        params = parse_params(
            {
                "data": {**VECTORS, "num_samples": batch * steps, "test_samples": 64},
                "model": MLP if model == "mlp" else {"name": model},
                "train": {
                    "num_devices": 2,
                    "oversubscribe": True,
                    "global_batch_size": batch,
                    "epochs": 1,
                    "optimizer": OPTIMIZER,
                    "schedule": {"name": "constant"},
                },
            }
        )
        placement, _ = place(strategy, params, "fast", DEVICES)
        with tempfile.TemporaryDirectory() as folder:
            prepare(params, Path(folder))
            measured = partial(work, params, strategy, Path(folder), loops, rounds, clock)
            seconds = result_of(measured, placement.world_size)
        over = {loop: judged(f"{name}, kit over {loop}", seconds["kit"], seconds[loop]) for loop in loops}
        middle = {key: 1e3 * statistics.median(values) / steps for key, values in seconds.items()}
        results[name] = {"over": over, "ms_per_step": middle, "steps_per_slice": steps}
    return results
