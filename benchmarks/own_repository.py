"""Wall seconds from an empty git repository to the answers, with samebits installed: on the host, and in an image.

    python benchmarks/own_repository.py

The stages run in an image if SAMEBITS_IMAGE names one; without it there is the host alone.
"""

from __future__ import annotations

import os
import sys
import tempfile
from functools import partial
from pathlib import Path

import click

from common import few, middles, run, save, with_out_dir

COMMANDS: dict[str, tuple[str, ...]] = {
    "git init": ("git", "init", "--quiet"),
    "samebits init": ("samebits", "init"),
    "dvc repro": ("dvc", "repro", *few([], ["host"])),
}


def environments() -> dict[str, dict[str, str]]:
    """The environment of each place where stages run."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    usual = {name: value for name, value in os.environ.items() if name not in ("SAMEBITS_IMAGE", "MLFLOW_TRACKING_URI")}
    usual |= {"PATH": path, "SAMEBITS_RUNTIME": "host"}
    image = os.environ.get("SAMEBITS_IMAGE")
    return {
        "host": usual,
        **({"image": {**usual, "SAMEBITS_RUNTIME": "container", "SAMEBITS_IMAGE": image}} if image else {}),
    }


def answered(environ: dict[str, str]) -> dict[str, float]:
    """Seconds of each command in a new repository, and of all."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:  # an idle sender may still use it
        spent = {what: run(*command, folder=Path(name), environ=environ) for what, command in COMMANDS.items()}
    return {**spent, "total": sum(spent.values())}


@click.command(help=__doc__)
@click.option("--rounds", default=few(3, 1), show_default=True, help="Repositories in each place.")
@with_out_dir
def main(rounds: int, out_dir: Path) -> None:
    seconds = middles({place: partial(answered, environ) for place, environ in environments().items()}, rounds)
    question = "wall seconds from an empty repository to the answers"
    print(save(out_dir, "own_repository", {"question": question, "seconds": seconds}))


if __name__ == "__main__":
    main()
