"""Wall seconds until something useful happens: imports, commands, workers.

    python benchmarks/startup.py

Everything takes turns; each command is a fresh interpreter with its files in the page cache.
"""

from __future__ import annotations

import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
from ruamel.yaml import YAML

from common import ROOT, few, in_turns, middle_of, run, save, show_middle, stage, with_out_dir
from samebits.params import parse_params
from samebits.records.run import read_run
from samebits.strategies.placement import Devices
from samebits.training.placement import place
from samebits.training.worker import make_worker
from samebits.workers.processes import launch

if TYPE_CHECKING:
    from collections.abc import Callable

    from samebits.strategies.placement import Placement
    from samebits.workers.rank import Reporter

PARAMS = {"train": {"repeats": 1}}  # without timed slices after the training
PYTHON = sys.executable


def nothing(_: Reporter) -> None:
    """Run in each worker."""


def join(placement: Placement, _: Reporter) -> None:
    """Run in each worker."""
    worker = make_worker(placement, parse_params(PARAMS).train)
    worker.setup()
    worker.ranks.barrier()
    worker.close()


def seconds_of_launch(function: Callable[[Reporter], None]) -> float:
    """Seconds from the launch in a warm parent to the end of both workers."""
    started = time.perf_counter()
    launch(function, 2)
    return time.perf_counter() - started


def training_overhead(folder: Path) -> float:
    """Seconds of a training's command besides the training."""
    seconds = stage("train", "--strategy", "single", "--no-tracking", "--params", "small.yaml", folder=folder)
    return seconds - read_run(folder / "runs/single-fast").timing.training_seconds


@click.command(help=__doc__)
@click.option("--rounds", default=few(10, 1), show_default=True, help="Times each is started.")
@with_out_dir
def main(rounds: int, out_dir: Path) -> None:
    params = parse_params({"train": {"num_devices": 2, "oversubscribe": True}})
    placement, _ = place("ddp", params, "fast", Devices(gpus=0, cores=2))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        YAML().dump(PARAMS, folder / "small.yaml")
        stage("prepare", "--params", "small.yaml", folder=folder)
        things: dict[str, Callable[[], float]] = {
            "import torch": lambda: run(PYTHON, "-c", "import torch", folder=folder),
            "samebits --help": lambda: run(str(Path(PYTHON).with_name("samebits")), "--help", folder=folder),
            "pipeline/host.py": lambda: stage("host", "--params", f"{ROOT}/params.yaml", folder=folder),
            "launch of 2 workers that end at once": lambda: seconds_of_launch(nothing),
            "launch of 2 workers that join a process group": lambda: seconds_of_launch(partial(join, placement)),
            "pipeline/train.py --strategy single, less its training": lambda: training_overhead(folder),
        }
        for measure in things.values():
            measure()
        seconds = in_turns(things, rounds)
    middles = {name: middle_of(values) for name, values in seconds.items()}
    for name, middle in middles.items():
        show_middle(name, middle)
    print(save(out_dir, "startup", {"question": "wall seconds before anything trains", "seconds": middles}))


if __name__ == "__main__":
    main()
