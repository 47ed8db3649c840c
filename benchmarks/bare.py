"""The kit's training beside loops written by hand, in the same processes and in turns.

All start from the same weights, feed the same batches in the same order, and must end with the same losses (checked).
What a loop needs once (its loader, its optimizer, a ``Trainer``) is made outside the time that counts.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from common import Variant, interleave, ratio_of, show, verdict
from samebits.data.batches import Batches, equal_parts, load_split
from samebits.data.card import read_card
from samebits.data.prepare import prepare
from samebits.launch import launch
from samebits.models.build import build_model
from samebits.numerics.fast import FastNumerics
from samebits.params import Params, parse_params
from samebits.placement import Placement, place
from samebits.progress import Progress
from samebits.strategies import make_strategy
from samebits.trainer import Snapshot, Trainable, train, warm_up

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn

    from samebits.data.batches import Batch
    from samebits.strategies import Strategy

# name -> model, global batch, steps of a slice
CASES = {
    "mlp at batch 64": ("mlp", 64, 256),
    "mlp at batch 256": ("mlp", 256, 128),
    "wide_mlp at batch 256": ("wide_mlp", 256, 2),
}
OPTIMIZER = {"lr": 0.01, "momentum": 0.9}
LAUNCHER = ("LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "RANK", "WORLD_SIZE")
TOLERANCE = 1e-5  # by which losses of the same work may differ


@dataclass(frozen=True)
class Setting:
    """What a loop is given.

    ``order`` lists the rows of ``data`` that this rank feeds, ``rows`` of them at each step. ``losses`` takes those of
    the loop's last run under its name.
    """

    model: nn.Module
    data: Batch
    order: Tensor
    rows: int
    clock: Callable[[], float]
    losses: dict[str, list[float]]

    @property
    def steps(self) -> int:
        """Steps of a run."""
        return len(self.order) // self.rows


def resetting(model: nn.Module, then: Callable[[], None]) -> Callable[[], None]:
    """A reset to the weights that ``model`` has now, in the state that PyTorch starts in."""
    initial = Snapshot(model)

    def reset() -> None:
        torch.use_deterministic_algorithms(False)
        initial.restore()
        then()

    return reset


def bare(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[Setting, str], Variant]:
    """The least that trains: all data in memory, whole batches by indexing; no schedule, no clock, no tracker."""

    def make(setting: Setting, name: str) -> Variant:
        module = wrap(setting.model)
        optimizer = torch.optim.SGD(setting.model.parameters(), **OPTIMIZER)
        inputs, targets = setting.data

        def run() -> None:
            found = []
            for step in range(setting.steps):
                rows = setting.order[step * setting.rows : (step + 1) * setting.rows]
                x, y = inputs[rows], targets[rows]
                optimizer.zero_grad()
                loss = F.cross_entropy(module(x), y)
                loss.backward()
                optimizer.step()
                found.append(loss.detach())
            setting.losses[name] = torch.stack(found).tolist()

        return Variant(run, resetting(setting.model, optimizer.state.clear))

    return make


def kit(job: Trainable, setting: Setting) -> Variant:
    """The kit's own loop, with its schedule, its clock and a tracker that shows nothing."""

    def run() -> None:
        tracker = Progress("", setting.steps, shown=False)
        setting.losses["kit"] = train(job, setting.steps, step_seconds=1e-3, tracker=tracker).losses

    def reset() -> None:
        torch.use_deterministic_algorithms(True)
        job.reset()

    return Variant(run, reset)


@dataclass(frozen=True)
class Task:
    """What the workers measure, and the folder in which rank 0 leaves it."""

    params: Params
    placement: Placement
    folder: Path
    rounds: int
    loops: Mapping[str, Callable[[Setting, str], Variant]]
    clock: Callable[[], float]


def work(task: Task, _: Path) -> None:
    """Run in each worker."""
    strategy = make_strategy(task.placement, task.params.train)
    strategy.setup()
    if strategy.world_size == 1:
        for name in [name for name in os.environ if name.startswith(LAUNCHER)]:
            del os.environ[name]  # else a peer takes itself for one of several and sets its own threads
    measure(task, strategy)
    gc.collect()  # the wrappers must be gone before their process group
    strategy.close()


def measure(task: Task, strategy: Strategy) -> None:
    params = task.params
    card = read_card(task.folder / "card.json")
    data = load_split(task.folder, card, "train")
    numerics = FastNumerics(params.train, strategy.device, card.loss)
    numerics.configure()
    batches = Batches(
        data,
        card,
        seed=params.seed,
        global_batch_size=params.train.global_batch_size,
        layout=equal_parts(params.train.global_batch_size, rank=strategy.rank, ranks=strategy.world_size),
        device=strategy.device,
    )
    model = build_model(params.model, card, params.seed)
    order = torch.cat([batches._rows(step, 0) for step in range(params.total_steps)])

    def setting() -> Setting:
        return Setting(copy.deepcopy(model), data, order, batches.rows, task.clock, losses)

    losses: dict[str, list[float]] = {}
    job = Trainable(copy.deepcopy(model), batches, strategy, numerics, params)
    warm_up(job, 3)
    variants = {"kit": kit(job, setting())}
    variants |= {name: make(setting(), name) for name, make in task.loops.items()}
    interleave(variants, 3, strategy, task.clock)
    ours = strategy.total(torch.tensor(losses["kit"])) / strategy.world_size
    for name in task.loops:
        apart = float((strategy.total(torch.tensor(losses[name])) / strategy.world_size - ours).abs().max())
        assert apart <= TOLERANCE, f"{name} does not do the same work: its losses differ by {apart}"
    assert torch.get_num_threads() == 1, "a loop has set the number of threads"
    gc.freeze()  # so that collecting before each slice looks at new objects alone
    seconds = interleave(variants, task.rounds, strategy, task.clock)
    if strategy.rank == 0:
        (task.folder / "seconds.json").write_text(json.dumps(seconds))


def against(
    strategy: str, loops: Mapping[str, Callable[[Setting, str], Variant]], rounds: int, clock: Callable[[], float]
) -> dict[str, Any]:
    """Measure every case on two CPU devices at most; print and return the ratio of the kit to each loop."""
    results = {}
    for name, (model, batch, steps) in CASES.items():
        params = parse_params(
            {
                "data": {"num_samples": batch * steps, "test_samples": 64},
                "model": {"name": model},
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
        placement = place(strategy, params.train, gpus=0, cores=2)
        with tempfile.TemporaryDirectory() as folder:
            prepare(params, Path(folder))
            launch(work, Task(params, placement, Path(folder), rounds, loops, clock), placement.world_size)
            seconds = json.loads((Path(folder) / "seconds.json").read_text())
        over = {}
        for loop in loops:
            ratio = ratio_of(seconds["kit"], seconds[loop])
            over[loop] = {"ratio": ratio, "verdict": verdict(ratio)}
            show(f"{name}, kit over {loop}", ratio)
        middle = {key: 1e3 * sorted(values)[len(values) // 2] / steps for key, values in seconds.items()}
        results[name] = {"over": over, "ms_per_step": middle, "steps_per_slice": steps}
    return results
