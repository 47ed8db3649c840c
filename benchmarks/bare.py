"""The kit's training against a bare one, written by hand, in the same processes and in turns.

The bare one keeps all data in memory, indexes whole batches of its rank's share and does nothing else: no schedule,
no clock, no tracker. Both start from the same weights, feed the same batches, and end with the same losses (checked).
"""

from __future__ import annotations

import gc
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from common import Variant, interleave, ratio_of, show, verdict
from samebits.data.batches import Batches, load_split
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
    from collections.abc import Callable

    from torch import nn

    from samebits.strategies import Strategy

# name -> model, global batch, steps of a slice
CASES = {
    "mlp at batch 64": ("mlp", 64, 256),
    "mlp at batch 256": ("mlp", 256, 128),
    "wide_mlp at batch 256": ("wide_mlp", 256, 2),
}
OPTIMIZER = {"lr": 0.01, "momentum": 0.9}


@dataclass(frozen=True)
class Task:
    """What the workers measure, and the folder in which rank 0 leaves it."""

    params: Params
    placement: Placement
    folder: Path
    rounds: int
    wrap: Callable[[nn.Module], nn.Module]
    clock: Callable[[], float]


def work(task: Task, _: Path) -> None:
    """Run in each worker."""
    strategy = make_strategy(task.placement, task.params.train)
    strategy.setup()
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
        accum=1,
        shard=strategy.rank,
        shards=strategy.world_size,
        device=strategy.device,
    )
    job = Trainable(build_model(params.model, card, params.seed), batches, strategy, numerics, params)
    warm_up(job, 3)

    model = build_model(params.model, card, params.seed)
    initial = Snapshot(model)
    module = task.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), **OPTIMIZER)
    inputs, targets = data
    steps, size = params.total_steps, batches.rows
    order = torch.cat([batches._rows(step, 0) for step in range(steps)])
    losses: dict[str, list[float]] = {}

    def kit() -> None:
        tracker = Progress("", steps, shown=False)
        losses["kit"] = train(job, steps, step_seconds=1e-3, tracker=tracker).losses

    def reset_kit() -> None:
        torch.use_deterministic_algorithms(True)
        job.reset()

    def bare() -> None:
        found = []
        for step in range(steps):
            rows = order[step * size : (step + 1) * size]
            x, y = inputs[rows], targets[rows]
            optimizer.zero_grad()
            loss = F.cross_entropy(module(x), y)
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        losses["bare"] = strategy.mean(torch.stack(found)).tolist()

    def reset_bare() -> None:
        torch.use_deterministic_algorithms(False)
        initial.restore()
        optimizer.state.clear()

    variants = {"kit": Variant(kit, reset_kit), "bare": Variant(bare, reset_bare)}
    interleave(variants, 3, strategy, task.clock)
    assert losses["kit"] == losses["bare"], "the two do not do the same work"
    seconds = interleave(variants, task.rounds, strategy, task.clock)
    if strategy.rank == 0:
        (task.folder / "seconds.json").write_text(json.dumps(seconds))


def against_bare(
    strategy: str, wrap: Callable[[nn.Module], nn.Module], rounds: int, clock: Callable[[], float]
) -> dict[str, Any]:
    """Measure every case on two CPU devices at most; print and return a ratio for each."""
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
            launch(work, Task(params, placement, Path(folder), rounds, wrap, clock), placement.world_size)
            seconds = json.loads((Path(folder) / "seconds.json").read_text())
        ratio = ratio_of(seconds["kit"], seconds["bare"])
        middle = {key: 1e3 * sorted(values)[len(values) // 2] / steps for key, values in seconds.items()}
        results[name] = {"ratio": ratio, "verdict": verdict(ratio), "ms_per_step": middle, "steps_per_slice": steps}
        show(name, ratio)
    return results
