"""The commands ``samebits compare``, ``explain`` and ``track``, for runs in a folder or in MLflow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from samebits.errors import HostError, UserError, counted, printable_lines
from samebits.files import scratch_folder
from samebits.here import repro_command
from samebits.params import load_params, require_repository
from samebits.records.log import count_hidden_logs

if TYPE_CHECKING:
    from samebits.records.run import Run
    from samebits.results.verdict import Require


def _find(references: tuple[str, ...], folder: Path) -> list[Run]:
    """The runs that these references name. Those in MLflow are downloaded below ``folder``."""
    from samebits.tracking.download import find_run_files

    runs = []
    for number, reference in enumerate(references):
        scratch = folder / str(number)
        scratch.mkdir()
        runs.append(find_run_files(reference, scratch))
    return runs


@click.command(short_help="Say whether two trainings are the same.")
@click.argument("a")
@click.argument("b")
@click.option("--require", type=click.Choice(["bitwise", "tolerance"]), help="Exit with 1 if the verdict is worse.")
@click.option("--json", "as_json", is_flag=True, help="The verdicts as JSON.")
@click.pass_context
def compare(context: click.Context, a: str, b: str, require: Require | None, as_json: bool) -> None:
    """Say whether two trainings are the same: bitwise, within tolerance, not comparable, or diverged.

    A and B are folders of runs or ids of MLflow runs. What differs between their settings and hosts is listed.

    \b
    Examples:
      samebits compare runs/single-fast runs/ddp-fast
      samebits compare runs/ddp-fast 0f3c9a8e7b6d5c4f3a2b1c0d9e8f7a6b --require tolerance
    """
    from samebits.results.verdict import compare_runs, meets, settings_that_differ
    from samebits.results.verdict_text import say_comparison

    with scratch_folder() as folder:
        runs = _find((a, b), folder)
        verdict, differences = compare_runs(*runs), settings_that_differ(*runs)
    as_data = {"a": a, "b": b, **verdict.model_dump(mode="json"), "differences": differences}
    click.echo(json.dumps(as_data, indent=2) if as_json else printable_lines(say_comparison(verdict, differences)))
    context.exit(int(not meets(verdict.grade, require)))


@click.command(short_help="Say why a step takes as long as it does, and what to change.")
@click.argument("run", required=False)
@click.option("--against", help="Another run, with which its speed is compared.")
@click.option("--json", "as_json", is_flag=True, help="The explanation as JSON.")
def explain(run: str | None, against: str | None, as_json: bool) -> None:
    """Say why a speed-up is what it is, and what to change, with the gain to expect.

    RUN is a folder of a run or the id of an MLflow run; without it, the run in runs/ with most devices is explained,
    among equals ddp's. Only runs in fast numerics with train.repeats above 1 have been divided into parts.

    \b
    Examples:
      samebits explain
      samebits explain runs/ddp-fast
      samebits explain runs/ddp-fast --against 0f3c9a8e7b6d5c4f3a2b1c0d9e8f7a6b
    """
    from samebits.results.comparison import explanation_of, figures_computed
    from samebits.results.current import require_current
    from samebits.results.explanation.against import change, say_change
    from samebits.results.explanation.words import say_explanation, say_trained

    with scratch_folder() as folder:
        chosen, *others = _find((run or _default_run(), *([against] if against else [])), folder)
        if run is None:
            require_current(chosen.record.params, chosen.folder, load_params("params.yaml"))
        explanation = explanation_of(chosen, run or str(chosen.folder))
        with figures_computed(chosen, *others):
            beside = change(chosen, others[0]) if others else None
    if as_json:
        data = {"run": chosen.name, **explanation.model_dump(mode="json")}
        if beside:
            data["against"] = {"run": others[0].name, **beside.model_dump(mode="json")}
        click.echo(json.dumps(data, indent=2))
        return
    click.echo(printable_lines(say_explanation(say_trained(chosen.record), explanation)))
    if beside:
        click.echo(printable_lines(f"\n{say_change(beside, chosen, others[0])}"))


def _default_run() -> str:
    """The folder of the run in fast numerics that a reader most likely means."""
    from samebits.records.run import RECORD, RunRecord, precedence

    require_repository()
    records = [RunRecord.read(file, made_by="dvc repro") for file in sorted(Path("runs").glob(f"*-fast/{RECORD}"))]
    if not records:
        others = sorted(Path().glob(f"*/runs/*-fast/{RECORD}"))
        hint = f"name a RUN, such as {others[0].parent}" if others else f"run `{repro_command()}`, or name a RUN"
        raise UserError("runs: there is no run in fast numerics", hint=hint)

    def order(record: RunRecord) -> tuple[int, bool]:
        placed = record.placement
        return precedence(placed.devices_used, placed.strategy, has_ranks=placed.has_ranks)

    return f"runs/{max(records, key=order).name}"


@click.group()
def track() -> None:
    """Deliver local logs to MLflow."""


@track.command()
def sync() -> None:
    """Deliver every log that MLflow does not have whole.

    Needed where a server was away for longer than the sender waits, and no training was started since. Runs that
    have begun nowhere go to the store that MLFLOW_TRACKING_URI names now.

    \b
    Example:
      MLFLOW_TRACKING_URI=http://mlflow.example:5000 samebits track sync
    """
    from samebits.tracking.delivery import sync as deliver

    require_repository()
    count, problems = deliver()
    hidden = count_hidden_logs()
    if hidden:
        click.echo(f"{counted(hidden, 'log')} of other users cannot be read: they deliver their own", err=True)
    if count or not (problems or hidden):
        click.echo(f"{counted(count, 'log')} delivered" if count else "nothing is left to deliver")
    for log, problem in problems.items():
        click.echo(f"{log}: {problem}", err=True)
    if problems:
        raise HostError(f"{len(problems)} could not be delivered", hint="see above; is MLFLOW_TRACKING_URI right?")
