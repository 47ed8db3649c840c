"""Where the wall time of `make repro` goes, in a new clone of this commit with a warm package cache.

    python benchmarks/repro.py

A stage's seconds end where the next stage begins; what DVC itself takes in between is counted with the stage before.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from common import ROOT, few, middle_of, run, save, show_middle, with_out_dir

INSTALL, REST = "install (make .venv)", "DVC before the first stage"


def environment() -> dict[str, str]:
    """This process's variables without those of its Python environment and of a calling make."""
    here = few(str(Path(sys.executable).parent), "")  # smoke uses the installed environment
    path = os.pathsep.join(part for part in os.environ["PATH"].split(os.pathsep) if part != here)
    hidden = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "VIRTUAL_ENV", "PYTHONPATH", "MLFLOW_TRACKING_URI")
    return {name: value for name, value in os.environ.items() if name not in hidden} | {"PATH": path}


def stages(folder: Path) -> list[tuple[str, float]]:
    """Seconds of each stage of `make repro`, from the times at which DVC announces them."""
    started = time.perf_counter()
    marks = [(REST, started)]
    with subprocess.Popen(
        few(["make", "repro", "PRESET=default"], ["dvc", "repro", "prepare"]),
        cwd=folder,
        env={**environment(), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout
        said = []
        for line in process.stdout:
            said.append(line)
            if match := re.search(r"Running stage '([^']+)'", line):
                marks.append((match[1], time.perf_counter()))
            elif match := re.search(r"Stage '([^']+)' is cached", line):  # a stage with the same inputs had run before
                marks.append((f"{match[1]} (from DVC's cache)", time.perf_counter()))
    if process.returncode or len(marks) == 1:
        raise SystemExit(f"make repro ended with {process.returncode}:\n{''.join(said)}")
    marks.append(("", time.perf_counter()))
    return [(what, after - at) for (what, at), (_, after) in itertools.pairwise(marks)]


@click.command(help=__doc__)
@click.option("--rounds", default=few(3, 1), show_default=True, help="Clones.")
@with_out_dir
def main(rounds: int, out_dir: Path) -> None:
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:  # an idle sender may still use it
            folder = Path(name) / "clone"
            run("git", "clone", "--quiet", str(ROOT), str(folder), folder=ROOT)
            parts = [
                (INSTALL, run("make", *few([".venv"], ["--dry-run", ".venv"]), folder=folder, environ=environment())),
                *stages(folder),
            ]
        for what, value in [*parts, ("total", sum(value for _, value in parts))]:
            seconds.setdefault(what, []).append(value)
    record = [{"what": what, "seconds": middle_of(values)} for what, values in seconds.items()]
    for what, values in seconds.items():
        show_middle(what, middle_of(values))
    print(save(out_dir, "repro", {"question": "where the wall time of make repro goes", "parts": record}))


if __name__ == "__main__":
    main()
