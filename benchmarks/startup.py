"""Wall seconds until something useful happens: imports, commands, workers.

    python benchmarks/startup.py

Everything takes turns; each command is a fresh interpreter with its files in the page cache.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import click
from ruamel.yaml import YAML

from common import ROOT, in_turn, middle_of, run, save, show_middle
from samebits.files import read_json
from samebits.launch import launch
from samebits.params import parse_params
from samebits.placement import Placement, place
from samebits.strategies import make_strategy

PARAMS = {"train": {"repeats": 1}}  # the training alone, without timed slices after it
PYTHON = sys.executable


def nothing(_: object, __: Path) -> None:
    """Run in each worker."""


def join(placement: Placement, _: Path) -> None:
    """Run in each worker."""
    strategy = make_strategy(placement, parse_params(PARAMS).train)
    strategy.setup()
    strategy.barrier()
    strategy.close()


def seconds_of_launch(function: object, job: object) -> float:
    """From a warm parent until both workers have ended."""
    started = time.perf_counter()
    launch(function, job, 2)
    return time.perf_counter() - started


def training_overhead(folder: Path) -> float:
    """The seconds of a training's command that are not training."""
    train = ("--strategy", "single", "--no-tracking", "--params", "small.yaml")
    seconds = run(PYTHON, f"{ROOT}/pipeline/train.py", *train, folder=folder)
    return seconds - read_json(folder / "runs/single-fast/timing.json", made_by="train.py")["training_seconds"]


@click.command(help=__doc__)
@click.option("--rounds", default=10, show_default=True, help="Times each is started.")
def main(rounds: int) -> None:
    placement = place("ddp", parse_params({"train": {"num_devices": 2, "oversubscribe": True}}).train, gpus=0, cores=2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        YAML().dump(PARAMS, folder / "small.yaml")
        run(PYTHON, f"{ROOT}/pipeline/prepare.py", "--params", "small.yaml", folder=folder)
        host = (PYTHON, f"{ROOT}/pipeline/host.py", "--params", f"{ROOT}/params.yaml")
        things = {
            "import torch": lambda: run(PYTHON, "-c", "import torch", folder=folder),
            "samebits --help": lambda: run(str(Path(PYTHON).with_name("samebits")), "--help", folder=folder),
            "pipeline/host.py": lambda: run(*host, folder=folder),
            "launch of 2 workers that end at once": lambda: seconds_of_launch(nothing, None),
            "launch of 2 workers that join a process group": lambda: seconds_of_launch(join, placement),
            "pipeline/train.py --strategy single, less its training": lambda: training_overhead(folder),
        }
        for measure in things.values():
            measure()
        seconds: dict[str, list[float]] = {name: [] for name in things}
        for number in range(rounds):
            for name in in_turn([*things], number):
                seconds[name].append(things[name]())
    found = {name: middle_of(values) for name, values in seconds.items()}
    for name, values in found.items():
        show_middle(name, values)
    print(save("startup", {"question": "wall seconds before anything trains", "seconds": found}))


if __name__ == "__main__":
    main()
