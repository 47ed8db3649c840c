"""A training with a dataset beside PyTorch's plain loop over a DataLoader of the same dataset, by paired wall time.

Both load with as many processes, feed the same samples in the same order, and start their processes outside of the
clock. Samples are images of 3 x 32 x 32 that are moved and turned at random, as for CIFAR. The kit also gives each
sample random numbers of its own.

python benchmarks/loading.py
"""

from __future__ import annotations

import copy
import os
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import click
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from bare import DEVICES, LAUNCHER, OPTIMIZER, resetting
from common import Variant, few, interleave, judged, result_of, save, some, with_out_dir
from samebits.numerics.fast import FastNumerics
from samebits.params import parse_params
from samebits.training.batches import order_of
from samebits.training.datasets import LoadedBatches
from samebits.training.loop import Trainable, warm_up
from samebits.training.meters import StepClock
from samebits.training.placement import place
from samebits.training.samples import Samples
from samebits.training.worker import make_worker

if TYPE_CHECKING:
    from pathlib import Path

    from samebits.workers.rank import Reporter

BATCH, STEPS = 64, few(24, 2)
LOADERS = some({"in the training's process": 0, "in one process": 1, "in two processes": 2})


class Images(Dataset[Any]):
    """Bytes in memory, each cropped out of a frame at random and perhaps mirrored."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._images = torch.randint(256, (count, 3, 40, 40), dtype=torch.uint8, generator=generator)
        self._labels = torch.randint(10, (count,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        top, left, mirrored = torch.randint(9, (3,)).tolist()
        image = self._images[number, :, top : top + 32, left : left + 32].float() / 255
        return (image.flip(2) if mirrored > 4 else image), self._labels[number]


def net() -> nn.Module:
    """A small convolutional net."""
    layers = [nn.Conv2d(3, 32, 3, stride=2), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(64 * 7 * 7, 10))


def kit(trainable: Trainable, losses: dict[str, list[float]]) -> Variant:
    """The kit's steps, with its clock, out of its batches of the dataset."""

    def run() -> float:
        clock = StepClock(trainable.worker.device)
        losses["kit"] = trainable.mean_losses(trainable.run(0, trainable.rates(0, STEPS), clock))
        return clock.seconds

    def reset() -> None:
        torch.set_deterministic_debug_mode("error")
        trainable.reset()

    return Variant(run, reset)


def plain(
    model: nn.Module, dataset: Dataset[Any], order: list[int], workers: int, losses: dict[str, list[float]]
) -> Variant:
    """The tutorials' loop. Its clock begins when the first batch is there, as the kit's does."""
    optimizer = torch.optim.SGD(model.parameters(), **OPTIMIZER)
    several: dict[str, Any] = {"prefetch_factor": 2, "multiprocessing_context": "fork"}
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=BATCH, sampler=order, num_workers=workers, **(several if workers else {})
    )

    def run() -> float:
        batches, found = iter(loader), []
        batch = next(batches)
        began = time.perf_counter()
        while batch is not None:
            images, labels = batch
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            found.append(loss.detach())
            batch = next(batches, None)
        spent = time.perf_counter() - began
        losses["plain"] = torch.stack(found).tolist()
        return spent

    return Variant(run, resetting(model, optimizer.state.clear))


def work(workers: int, rounds: int, _: Reporter) -> dict[str, list[float]]:
    """Measure in a worker. Returns the seconds of each variant's slices."""
    loader = {"num_workers": workers, "prefetch_factor": 2}
    count = BATCH * STEPS
    params = parse_params(
        {
            "data": {"task": "dataset", "num_samples": count, "test_samples": 1},
            "model": {"name": "loading:net"},
            "train": {"global_batch_size": BATCH, "epochs": 1, "optimizer": OPTIMIZER, "loader": loader,
                      "schedule": {"name": "constant"}},
        }
    )  # fmt: skip
    placement, split = place("single", params, "fast", DEVICES)
    worker = make_worker(placement, params.train)
    for name in [name for name in os.environ if name.startswith(LAUNCHER)]:
        del os.environ[name]
    worker.setup()
    numerics = FastNumerics(params.train, worker.device, "cross_entropy")
    numerics.configure()
    torch.manual_seed(0)
    model, dataset, losses = net(), Images(count), dict[str, list[float]]()
    ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
    batches = LoadedBatches(
        Samples("train_data", dataset, count, 0), split, params.train.loader, rank=0, seed=0, device=worker.device
    )
    trainable = Trainable(model=ours, batches=batches, worker=worker, numerics=numerics, params=params)
    warm_up(trainable, 2)
    variants = {
        "kit": kit(trainable, losses),
        "plain": plain(theirs, dataset, order_of(0, 0, count).tolist(), workers, losses),
    }
    seconds = interleave(variants, rounds, worker, time.perf_counter)
    assert len(losses["kit"]) == len(losses["plain"]) == STEPS
    worker.close()
    return seconds


@click.command(help=__doc__)
@click.option("--rounds", default=few(40, 1), show_default=True, help="Slices of each.")
@with_out_dir
def main(rounds: int, out_dir: Path) -> None:
    cases = {}
    for name, workers in LOADERS.items():
        seconds = result_of(partial(work, workers, rounds))
        over = {"plain": judged(f"loaded {name}, kit over plain", seconds["kit"], seconds["plain"])}
        middle = {key: 1e3 * statistics.median(values) / STEPS for key, values in seconds.items()}
        cases[name] = {"over": over, "ms_per_step": middle, "steps_per_slice": STEPS}
    question = "wall time of a training with a dataset over PyTorch's plain loop"
    print(save(out_dir, "loading", {"question": question, "cases": cases}))


if __name__ == "__main__":
    main()
