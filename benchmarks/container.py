"""Wall seconds that a stage takes more in the image than on the host.

    samebits container build && python benchmarks/container.py

Both take turns, in a clone of this repository; it needs a Docker engine with the image for the locks.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import click
from ruamel.yaml import YAML

from common import ROOT, few, in_turn, middle_of, run, save, show_middle, with_out_dir
from samebits.engines.stage import find_place
from samebits.errors import exit_on_error

PARAMS = {"train": {"repeats": 1, "epochs": 1}}
SAMEBITS = str(Path(sys.executable).with_name("samebits"))
LOOP = ("-c", "for _ in range(50_000_000): pass")
STAGES = {
    "host": ("pipeline/host.py",),
    "prepare": ("pipeline/prepare.py", "--params", "small.yaml"),
    "train, single": ("pipeline/train.py", "--strategy", "single", "--no-tracking", "--params", "small.yaml"),
}


def commands() -> dict[str, dict[str, tuple[str, ...]]]:
    """Commands by name and place."""
    stages = {name: dict.fromkeys(("host", "container"), (sys.executable, *stage)) for name, stage in STAGES.items()}
    loop = {"host": (sys.executable, *LOOP), "container": (SAMEBITS, "container", "run", "python", *LOOP)}
    return {**stages, "an empty loop in Python": loop}


@click.command(help=__doc__)
@click.option("--rounds", default=few(10, 1), show_default=True, help="Times each is started.")
@with_out_dir
def main(rounds: int, out_dir: Path) -> None:
    with exit_on_error(), tempfile.TemporaryDirectory() as scratch:
        image = find_place(ROOT).image.tags[0]
        folder = Path(scratch) / "clone"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
        YAML().dump(PARAMS, folder / "small.yaml")
        places = {
            place: {**os.environ, "SAMEBITS_RUNTIME": place, "PYTHONPATH": str(folder / "src")}
            for place in ("host", "container")
        }
        known = commands()
        seconds: dict[str, dict[str, list[float]]] = {name: {place: [] for place in places} for name in known}
        for number in range(rounds + 1):
            for name, command in known.items():
                for place in in_turn([*places], number):
                    spent = run(*command[place], folder=folder, environ=places[place])
                    if number:  # the first fills the page cache
                        seconds[name][place].append(spent)
    middles = {}
    for stage, taken in seconds.items():
        more = [inside - outside for inside, outside in zip(taken["container"], taken["host"], strict=True)]
        middles[stage] = {
            "host": middle_of(taken["host"]),
            "container": middle_of(taken["container"]),
            "more": middle_of(more),
        }
        show_middle(f"{stage}: more in the container", middles[stage]["more"])
    question = "wall seconds of a stage in the image and on the host"
    print(save(out_dir, "container", {"question": question, "image": image, "seconds": middles}))


if __name__ == "__main__":
    main()
