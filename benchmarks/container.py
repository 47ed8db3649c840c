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

from common import ROOT, in_turn, middle_of, run, save, show_middle
from samebits.container.stage import find_place
from samebits.errors import exit_on_error

PARAMS = {"train": {"repeats": 1, "epochs": 1}}
STAGES = {
    "host": ("host.py", "--params", "params.yaml"),
    "prepare": ("prepare.py", "--params", "small.yaml"),
    "train, single": ("train.py", "--strategy", "single", "--no-tracking", "--params", "small.yaml"),
}


@click.command(help=__doc__)
@click.option("--rounds", default=10, show_default=True, help="Times each is started.")
def main(rounds: int) -> None:
    with exit_on_error(), tempfile.TemporaryDirectory() as name:
        image = find_place(ROOT).image.tags[0]
        folder = Path(name) / "clone"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
        YAML().dump(PARAMS, folder / "small.yaml")
        places = {
            place: {**os.environ, "SAMEBITS_RUNTIME": place, "PYTHONPATH": str(folder / "src")}
            for place in ("host", "container")
        }
        seconds: dict[str, dict[str, list[float]]] = {stage: {place: [] for place in places} for stage in STAGES}
        for number in range(rounds + 1):
            for stage, command in STAGES.items():
                for place in in_turn([*places], number):
                    script = f"pipeline/{command[0]}"
                    spent = run(sys.executable, script, *command[1:], folder=folder, environ=places[place])
                    if number:  # the first fills the page cache
                        seconds[stage][place].append(spent)
    found = {}
    for stage, taken in seconds.items():
        more = [inside - outside for inside, outside in zip(taken["container"], taken["host"], strict=True)]
        found[stage] = {
            "host": middle_of(taken["host"]),
            "container": middle_of(taken["container"]),
            "more": middle_of(more),
        }
        show_middle(f"{stage}: more in the container", found[stage]["more"])
    print(
        save(
            "container",
            {"question": "wall seconds of a stage in the image and on the host", "image": image, "seconds": found},
        )
    )


if __name__ == "__main__":
    main()
