"""The kit's training under ddp against a bare DistributedDataParallel script.

    python benchmarks/ddp.py

Both run in the same two processes and over the same process group, in turns, so that they share the host's weather.
A slice's time is the wall time of the slowest rank. The bare script indexes whole batches of its rank's share and
does nothing else. Both start from the same weights and end with the same losses (checked).
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from common import ratio_of, save, show, verdict
from samebits.data.batches import Batches, load_split
from samebits.data.card import read_card
from samebits.data.prepare import prepare
from samebits.launch import launch
from samebits.models.build import build_model
from samebits.numerics.fast import FastNumerics
from samebits.params import Params, parse_params
from samebits.placement import place
from samebits.strategies import make_strategy
from samebits.trainer import Snapshot, Trainable, train, warm_up

if TYPE_CHECKING:
    from collections.abc import Callable

    from samebits.strategies import Strategy

CASES = {
    "mlp at batch 64": ({"name": "mlp"}, 64, 128),
    "mlp at batch 256": ({"name": "mlp"}, 256, 128),
    "wide_mlp at batch 256": ({"name": "wide_mlp"}, 256, 2),
}
WORKERS = 2


@dataclass(frozen=True)
class Task:
    """What the workers measure, and where rank 0 leaves it."""

    params: Params
    folder: Path
    rounds: int


class Silent:
    """No tracker."""

    def losses(self, first_step, losses, learning_rates) -> None:
        """Drop them."""


def work(task: Task, _: Path) -> None:
    """Run in each worker."""
    train_params = task.params.train
    strategy = make_strategy(place("ddp", train_params, gpus=0, cores=WORKERS), train_params)
    strategy.setup()
    measure(task, strategy)
    gc.collect()  # the wrappers must be gone before their process group
    strategy.close()


def measure(task: Task, strategy: Strategy) -> None:
    params, train_params = task.params, task.params.train
    card = read_card(task.folder / "card.json")
    data = load_split(task.folder, card, "train")
    numerics = FastNumerics(train_params, strategy.device, card.loss)
    numerics.configure()
    batch, steps, rank = train_params.global_batch_size, params.total_steps, strategy.rank
    model = build_model(params.model, card, params.seed)
    batches = Batches(
        data, card, seed=0, global_batch_size=batch, accum=1, shard=rank, shards=WORKERS, device=strategy.device
    )
    job = Trainable(model, batches, strategy, numerics, params)
    warm_up(job, 3)

    bare_model = build_model(params.model, card, params.seed)
    initial = Snapshot(bare_model)
    bare_ddp = DistributedDataParallel(bare_model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(bare_model.parameters(), lr=0.01, momentum=0.9)
    inputs, targets = data
    order = torch.cat([batches._rows(step, 0) for step in range(steps)])
    rows = batch // WORKERS
    losses: dict[str, list[float]] = {}

    def kit() -> None:
        losses["kit"] = train(job, steps, step_seconds=1e-3, tracker=Silent()).losses

    def bare() -> None:
        found = []
        for step in range(steps):
            chosen = order[step * rows : (step + 1) * rows]
            x, y = inputs[chosen], targets[chosen]
            optimizer.zero_grad()
            loss = F.cross_entropy(bare_ddp(x), y)
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        means = torch.stack(found)
        dist.all_reduce(means)
        losses["bare"] = (means / WORKERS).tolist()

    def reset_bare() -> None:
        torch.use_deterministic_algorithms(False)
        initial.restore()
        optimizer.state.clear()

    def reset_kit() -> None:
        torch.use_deterministic_algorithms(True)
        job.reset()

    def timed(reset: Callable[[], None], run: Callable[[], None]) -> float:
        reset()
        strategy.barrier()
        started = time.perf_counter()
        run()
        spent = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
        return float(strategy.gather(spent).max())

    variants = {"kit": (reset_kit, kit), "bare": (reset_bare, bare)}
    names = list(variants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-3, task.rounds):
        for name in names if number % 2 else reversed(names):
            spent = timed(*variants[name])
            if number >= 0:
                seconds[name].append(spent)
    assert losses["kit"] == losses["bare"], "the two do not do the same work"
    if rank == 0:
        (task.folder / "seconds.json").write_text(json.dumps(seconds))


@click.command(help=__doc__)
@click.option("--rounds", default=60, show_default=True, help="Slices of each.")
def main(rounds: int) -> None:
    cases = {}
    for name, (model, batch, steps) in CASES.items():
        params = parse_params(
            {
                "data": {"num_samples": batch * steps, "test_samples": 64},
                "model": model,
                "train": {
                    "num_devices": WORKERS,
                    "oversubscribe": True,
                    "global_batch_size": batch,
                    "epochs": 1,
                    "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9},
                    "schedule": {"name": "constant"},
                },
            }
        )
        with tempfile.TemporaryDirectory() as folder:
            prepare(params, Path(folder))
            launch(work, Task(params, Path(folder), rounds), WORKERS)
            seconds = json.loads((Path(folder) / "seconds.json").read_text())
        ratio = ratio_of(seconds["kit"], seconds["bare"])
        middle = {key: 1e3 * sorted(values)[len(values) // 2] / steps for key, values in seconds.items()}
        cases[name] = {"ratio": ratio, "verdict": verdict(ratio), "ms_per_step": middle, "steps_per_slice": steps}
        show(name, ratio)
    print(save("ddp", {"question": "wall time of the kit's ddp over a bare DDP script", "cases": cases}))


if __name__ == "__main__":
    main()
