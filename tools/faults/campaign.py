r"""Try faults of every kind for so many minutes, and print what held.

\b
Examples:
  make faults MINUTES=60
  make faults ONLY=kills/17
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch._dynamo  # noqa: F401 - every training that is forked from here would import it, for seconds

import samebits.workers.launch  # noqa: F401
from faults.area import Case, Missed
from faults.damage import Damage
from faults.inputs import Inputs
from faults.kills import Kills
from faults.pipelines import Pipelines
from faults.subject import Broken, expect_none, marked
from faults.tracking import Tracking
from faults.writes import Writes
from samebits.files import write_json
from samebits.host import host_facts
from samebits.records.provenance import git_state
from samebits.tracking.sender import GIVE_UP_SECONDS, LINGER_SECONDS

AREAS = {area.NAME: area for area in (Kills, Writes, Damage, Inputs, Tracking, Pipelines)}


@dataclass
class Result:
    """Counts and failures of one area."""

    unit: str
    tried: int = 0
    held: int = 0
    missed: int = 0
    of: int | None = None
    seconds: float = 0.0
    failures: list[dict[str, str]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--minutes", default=10.0, show_default=True, help="Shared out among the kinds of fault.")
@click.option("--seed", default=0, show_default=True, help="Of all choices.")
@click.option("--only", default=None, help="One kind of fault, or one case of it: kills, kills/17.")
@click.option("--out", default=None, type=click.Path(path_type=Path), help="JSON file to write.")
@click.option("--keep", is_flag=True, help="Keep the folder that all was done in.")
def main(minutes: float, seed: int, only: str | None, out: Path | None, keep: bool) -> None:  # noqa: D103 - click
    name, _, number = (only or "").partition("/")
    if (name and name not in AREAS) or (number and not number.isdecimal()):
        accepted = ", ".join(AREAS)
        raise click.UsageError(f"--only: got {only}, accepts one of {accepted}, and perhaps /NUMBER")
    for variable in ("MLFLOW_TRACKING_URI", "PYTHONDONTWRITEBYTECODE"):
        os.environ.pop(variable, None)
    git = git_state()  # before anything is written
    chosen = [AREAS[name]] if name else list(AREAS.values())
    share = 60 * minutes / sum(area.WEIGHT for area in chosen)
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    results: dict[str, Result] = {}
    try:
        for kind in chosen:
            (folder / kind.NAME).mkdir()
            started = time.monotonic()
            result = results[kind.NAME] = Result(kind.UNIT)
            try:
                area = kind(folder / kind.NAME, seed)
            except Broken as error:
                broken(result, kind.NAME, "what is undisturbed", str(error), f"ONLY={kind.NAME} SEED={seed}")
                continue
            result.of = area.total
            numbers = [int(number)] if number else area.order()
            for index in numbers:
                late = time.monotonic() - started > share * kind.WEIGHT  # the undisturbed runs alone may take that long
                if late and not number and result.tried + result.missed:
                    break
                attempt(result, area.case(index), f"{kind.NAME}/{index}", f"ONLY={kind.NAME}/{index} SEED={seed}")
            for case in area.final():
                attempt(result, case, kind.NAME, f"MINUTES={minutes:g} ONLY={kind.NAME} SEED={seed}")
            result.seconds, result.figures = time.monotonic() - started, area.figures()
            click.echo(line_of(kind.NAME, result))
        result = results["processes"] = Result("campaigns whose senders all ended")
        living = partial(marked, folder.name, whole=False)
        ended = partial(expect_none, living, LINGER_SECONDS + GIVE_UP_SECONDS + 10)
        case = Case("senders end when there is nothing left to deliver", ended)
        attempt(result, case, "processes", f"MINUTES={minutes:g} SEED={seed}")
    finally:
        if keep:
            click.echo(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    if out is not None:
        write_json(out, {"minutes": minutes, "seed": seed, "host": host_facts().model_dump(mode="json"),
                         "git": git.model_dump(mode="json"),
                         "areas": {name: asdict(result) for name, result in results.items()}})  # fmt: skip
    few = [] if name or minutes < 60 else too_few(results)
    for line in few:
        click.echo(line, err=True)
    sys.exit(int(bool(few) or any(result.failures for result in results.values())))


def attempt(result: Result, case: Case, name: str, again: str) -> None:
    """Run one case and print a failure at once. ``again`` are the settings of ``make faults`` that repeat it."""
    try:
        case.run()
    except Missed:
        result.missed += case.faults
        return
    except Broken as error:
        seen = str(error)
    except Exception:  # noqa: BLE001 - a bug of the campaign or of the kit, to be looked at in either case
        seen = traceback.format_exc()
    else:
        result.tried += case.faults
        result.held += case.faults
        return
    result.tried += case.faults
    broken(result, name, case.what, seen, again)


def broken(result: Result, name: str, what: str, seen: str, again: str) -> None:
    """Print a broken promise and record it."""
    again = f"make faults {again}"
    result.failures.append({"case": name, "what": what, "seen": seen, "again": again})
    click.echo(f"BROKEN {name}: {what}\n    {seen.strip()}\n    again: {again}", err=True)


def too_few(results: dict[str, Result]) -> list[str]:
    """One line for each area with too few faults for a campaign of an hour."""
    return [
        f"{name}: {results[name].tried} {area.UNIT} tried, expected at least {area.IN_AN_HOUR}"
        for name, area in AREAS.items()
        if results[name].tried < area.IN_AN_HOUR
    ]


def line_of(name: str, result: Result) -> str:
    """The summary line of an area."""
    of = f" of {result.of}" if result.of is not None else ""
    missed = f", {result.missed} came too late" if result.missed else ""
    return f"{name}: {result.tried}{of} {result.unit} tried, {result.held} held{missed}, {result.seconds:.0f} s"
