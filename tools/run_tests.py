"""All tests that this host can run, in groups that can be called alone; ends with a table of them.

What some groups need is brought where it is missing, see .ci/with. A group that fails does not end the others.

\b
Examples:
  make test-all
  make test-container
  make test-exact SAMEBITS_TEST_PATIENCE=4
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import click
from rich import box
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
_TWO = ("-n", "2", "--dist", "loadscope", "--no-loadscope-reorder")
_SLOW = "slow and not container and not rehearsal"


@dataclass(frozen=True, kw_only=True)
class Group:
    """Tests that run together: pytest's arguments, what .ci/with brings for them, and a time limit for hangs.

    Without ``select`` it is the campaign of faults, which is no test of pytest. ``gpus_of`` is a host of
    ``tools/nvml``. Its GPUs are shown, but nothing computes on them.
    """

    about: str
    select: tuple[str, ...] | None
    brings: str | None = None
    venv: str = ".venv"
    minutes: int = 60
    gpus_of: str | None = None


_QUICK = ("-m", "not slow and not container", *_TWO, "--hypothesis-profile=searching")  # rehearsals are slow

GROUPS = {
    "quick": Group(about="what `make test` runs, where it makes up its cases with others", select=_QUICK),
    "four-gpus": Group(about="the same where NVIDIA's library tells of four GPUs", select=_QUICK, gpus_of="A"),
    "shared": Group(
        about="other users of the host, foreign servers, patches and strangers", select=("-m", "attack", "tests", *_TWO)
    ),
    "exact": Group(
        about="exact numerics in other environments, every operation and model",
        select=("-m", _SLOW, "tests/numerics", "tests/rehearsal", "tests/system/test_operations.py", *_TWO),
    ),
    "training": Group(
        about="trainings that are compiled, killed, or away from their server",
        select=("-m", _SLOW, "--ignore", "tests/numerics", "--ignore", "tests/rehearsal", "--ignore", "tests/system",
                *_TWO),
    ),
    "pipeline": Group(
        about="whole pipelines in clones of their own, and in a repository of a user's",
        select=("tests/system/test_pipeline.py", "tests/system/test_own_repository.py"),
    ),
    "browser": Group(
        about="MLflow's UI and the report in Chromium",
        select=("tests/system/test_browser.py", "tests/system/test_page.py"), brings="browser",
    ),
    "nodes": Group(
        about="several machines out of network namespaces, a real Slurm", select=("tests/system/nodes", *_TWO),
        brings="machines",
    ),
    "container": Group(
        about="a real Docker engine, Compose, PostgreSQL", select=("tests/system/container",), brings="engine",
        minutes=120,
    ),
    "rehearsal": Group(
        about="CUDA's code without a GPU", select=("-m", "rehearsal", "tests/rehearsal", *_TWO), venv=".venv-gpu"
    ),
    "faults": Group(about="kills, full disks, damage and bad input for ten minutes: `make faults`", select=None),
    "gpu": Group(about="what needs an NVIDIA GPU", select=("tests/gpu",), minutes=120),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a group."""

    group: str
    passed: int = 0
    failed: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    seconds: float

    @property
    def ran(self) -> bool:
        """Whether any of its tests ran."""
        return self.passed + self.failed > 0

    def row(self) -> list[str]:
        """Its row of the table."""
        why = "; ".join(f"{count} {reason}" for reason, count in self.skipped.most_common(3))
        more = len(self.skipped) - 3
        return [self.group, str(self.passed), str(self.failed), str(self.skipped.total()), f"{self.seconds:.0f}",
                f"{why}; and {more} other reasons" if more > 0 else why]  # fmt: skip


def read_outcome(group: str, report: Path, code: int, seconds: float) -> Outcome:
    """Count the results in a report. A session without a report, with a bad exit code or without tests has failed."""
    passed, failed, skipped = 0, 0, Counter[str]()
    if GROUPS[group].select is None:
        areas = json.loads(report.read_text())["areas"].values() if report.exists() else ()
        passed = sum(area["held"] for area in areas)
        failed = sum(area["tried"] - area["held"] for area in areas)
        return Outcome(group=group, passed=passed, failed=failed or int(code != 0 or not passed), seconds=seconds)
    for case in ET.parse(report).iter("testcase") if report.exists() else ():  # noqa: S314 - pytest's own
        reason = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif reason is not None:
            skipped[reason.get("message", "")] += 1
        else:
            passed += 1
    found = passed + skipped.total()
    failed = failed or int(code != 0 or not found)
    return Outcome(group=group, passed=passed, failed=failed, skipped=skipped, seconds=seconds)


def run(name: str, folder: Path, *, coverage: bool = False) -> Outcome:
    """Run one group to its end. With ``coverage`` write the reached lines to files beside ``.coverage``."""
    group, report, started = GROUPS[name], folder / name, time.monotonic()
    if group.venv == ".venv-gpu":
        made = subprocess.run(["make", ".venv-gpu/.installed"], cwd=ROOT, check=False)
        if made.returncode:
            return Outcome(group=name, failed=1, seconds=time.monotonic() - started)
    python = f"{group.venv}/bin/python"
    if group.select is None:
        seed = str(int(time.time()) // 86400)  # the day's number, so that each night tries other faults
        options = ("--minutes", "10", "--seed", seed, "--out", str(report))
        tests = ["env", "PYTHONPATH=tools:tests", python, "-m", "faults", *options]
    else:
        traced = ["-m", "coverage", "run"] if coverage else []
        tests = [python, *traced, "-m", "pytest", f"--junitxml={report}", *group.select]
    if group.gpus_of:
        if not shutil.which("cc"):
            return Outcome(group=name, skipped=Counter(["needs a C compiler that is called cc"]), seconds=0.0)
        tests = ["env", "PYTHONPATH=tools", python, "-m", "nvml", group.gpus_of, *tests]
    brought = [".ci/with", group.brings, *tests] if group.brings else tests
    bounded = [sys.executable, "tools/bounded.py", str(60 * group.minutes), *brought]
    environ = {**os.environ, "PATH": f"{ROOT / group.venv / 'bin'}:{os.environ['PATH']}"}  # as make has it
    with subprocess.Popen(bounded, cwd=ROOT, env=environ) as process:

        def stop(*_: object) -> NoReturn:
            process.terminate()  # the end of this block waits for it
            sys.exit(128 + signal.SIGTERM)

        signal.signal(signal.SIGTERM, stop)
        code = process.wait()
    return read_outcome(name, report, code, time.monotonic() - started)


@click.command(help=__doc__)
@click.option("--coverage", is_flag=True, help="Trace the library, for `coverage combine`.")
@click.argument("names", nargs=-1, type=click.Choice(list(GROUPS)), metavar="[GROUP]...")
def main(names: tuple[str, ...], *, coverage: bool) -> None:  # noqa: D103 - click
    has_gpu = shutil.which("nvidia-smi") and not subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode
    chosen = names or [name for name in GROUPS if name != "gpu" or has_gpu]
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="samebits-tests-") as folder:
        for name in chosen:
            click.secho(f"== {name}: {GROUPS[name].about}", bold=True)
            outcomes.append(run(name, Path(folder), coverage=coverage))
    table = Table("group", "passed", "failed", "skipped", "seconds", "why skipped", box=box.MARKDOWN)
    for outcome in outcomes:
        table.add_row(*outcome.row())
    Console(width=160).print(table)
    if "gpu" not in chosen and not names:
        click.echo("gpu is left out: no NVIDIA driver answers here")
    if idle := [outcome.group for outcome in outcomes if not outcome.ran]:
        click.echo(f"nothing of {', '.join(idle)} could run here")
    # A group named on the command line has to run. By default a group may be left out.
    sys.exit(any(outcome.failed or (names and not outcome.ran) for outcome in outcomes))


if __name__ == "__main__":
    main()
