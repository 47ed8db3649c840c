"""Record a comparison as the parent run of its trainings, and add its figures and tags to each of them."""

from __future__ import annotations

import hashlib
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from samebits.errors import UserError, without_password
from samebits.here import stage_command
from samebits.records.log import LOGS, SCHEMA, ComparedEvent, EndEvent, RunLog, new_key
from samebits.records.run import read_run
from samebits.results.answers import headline, how_much_faster, in_a_row
from samebits.results.comparison import EVALUATIONS, REPORT, Comparison
from samebits.results.explanation.words import advice_of, cause_of
from samebits.results.table import markdown
from samebits.results.text import describe_row
from samebits.results.where import NAME
from samebits.tracking.checkpoint import link_metrics
from samebits.tracking.recorder import events, log_params, metric, record_all, refuse_links, send, set_tags
from samebits.tracking.store import NOTE_TAG, RUN_TAG, experiment_id, find_run, tracking_uri
from samebits.tracking.ui import prepare_view

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from samebits.params.schema import Tracking
    from samebits.results.comparison import Row
    from samebits.results.explanation.explain import Explanation

PARENT_TAG = "mlflow.parentRunId"


def comparison_key(comparison: Comparison) -> str:
    """The key of a comparison, the same for the same runs under the same params, so that none is recorded twice.

    Other params give another key, because MLflow does not let a run's params change.
    """
    told = "\n".join([*(row.run for row in comparison.rows), comparison.params.model_dump_json()])
    return "comparison-" + hashlib.sha256(told.encode()).hexdigest()[:12]


def log_comparison(comparison: Comparison, *, reports: Path, runs: Path) -> Path:
    """Write the log of a comparison whose report is in ``reports`` and whose runs are in ``runs``.

    Raises OSError, UserError or HostError: it cannot be written.
    """
    event = ComparedEvent(
        log_schema=SCHEMA,
        tracking_uri=without_password(tracking_uri()),
        key=comparison_key(comparison),
        keys=tuple(row.run for row in comparison.rows),
        reports=str(reports.resolve()),
        runs=str(runs.resolve()),
    )
    with closing(RunLog(LOGS / f"{new_key('comparison')}.jsonl")) as log:
        log.append(event)
        log.append(EndEvent(status="FINISHED"))
        log.flush(0)
    return log.path


def record_comparison(client: MlflowClient, event: ComparedEvent) -> None:
    """Find or make the parent run, record missing trainings from their files, and link and describe all of them.

    Does nothing if a later comparison has replaced the event's own.
    """
    reports, when = Path(event.reports), event.time_ms
    comparison = Comparison.read(reports / "comparison.json", made_by=stage_command("compare"))
    key = comparison_key(comparison)
    if key != event.key:
        sys.stderr.write(f"{reports}: holds a later comparison\n")
        return
    experiment = experiment_id(client, comparison.params.tracking.experiment)
    parent = find_run(client, experiment, key)
    if parent is None:
        tags = {RUN_TAG: key, "host_fingerprint": comparison.host_fingerprint}
        name = f"{comparison.model} on {comparison.task}, batch {comparison.global_batch_size}"
        parent = client.create_run(experiment, start_time=when, tags=tags, run_name=name)
    parent_id = str(parent.info.run_id)
    log_params(client, parent_id, comparison.params)
    answered = how_much_faster(comparison).row
    for row in comparison.rows:
        child_id = _child(client, experiment, row, Path(event.runs), comparison.params.tracking)
        if child_id is None:
            continue
        _add(client, child_id, _figures(row), when)
        link_metrics(client, child_id)
        tags = {
            PARENT_TAG: parent_id,
            NOTE_TAG: describe_row(row),
            "labels": ", ".join(label.kind for label in row.labels),
            "verdict": row.verdict.grade if row.verdict else "",
            **in_a_row(comparison, row),
            **(_explained_tags(row.explanation) if row.explanation else {}),
        }
        set_tags(client, child_id, tags)
        if row is answered:
            _add_picture(client, child_id, reports / f"plots/{NAME}.png")
    best = {f"speedup.{row.name}": row.speedup.median for row in comparison.rows if row.speedup}
    _add(client, parent_id, best, when)
    set_tags(client, parent_id, {NOTE_TAG: f"**{headline(comparison)}**\n\n{markdown(comparison)}"})
    for path in (reports / name for name in (*REPORT, EVALUATIONS.name)):
        refuse_links([path, *path.rglob("*")])
        if path.is_dir():
            client.log_artifacts(parent_id, str(path), f"report/{path.name}")
        elif path.exists():
            client.log_artifact(parent_id, str(path), "report")
    client.set_terminated(parent_id, "FINISHED", end_time=when)
    prepare_view(client, experiment)


def _child(client: MlflowClient, experiment: str, row: Row, runs: Path, tracking: Tracking) -> str | None:
    """The run of a row, recorded from its files if MLflow does not have it whole; None if there are no files."""
    known = find_run(client, experiment, row.run)
    if known is not None and not (known.info.status == "RUNNING" and "restored" in known.data.tags):  # was cut off
        return str(known.info.run_id)
    try:
        run = read_run(runs / row.name)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return None
    return record_all(client, events(run, tracking=tracking)) if run.record.run == row.run else None


def _figures(row: Row) -> dict[str, float]:
    figures = {
        "eval_loss": row.eval_loss,
        "accuracy": row.accuracy,
        "scaling_efficiency": row.scaling_efficiency,
        "loss_above_floor": row.above_floor,
        "loss_floor": row.floor,
        "speedup": row.speedup.median if row.speedup else None,
        "bound": row.bound.median if row.bound else None,
    }
    measured = {name: value for name, value in figures.items() if value is not None}
    measured |= {f"eval_{name}": value for name, value in row.metrics.items()}
    return measured | (_explained_figures(row.explanation) if row.explanation else {})


def _explained_figures(explanation: Explanation) -> dict[str, float]:
    """Metrics: ``part.NAME_ms`` add up to ``part.step_ms``; ``limit.NAME`` is a bound of the host."""
    figures = {f"part.{name}_ms": ms for name, ms in explanation.parts.model_dump().items()}
    figures["part.step_ms"] = explanation.step_ms
    bounds = explanation.bounds
    figures["limit.copy_gb_per_s"] = bounds.copy_gb_per_s
    figures["limit.optimizer_ms"] = bounds.optimizer_floor_ms
    if bounds.all_reduces:
        figures["limit.all_reduce_ms"] = bounds.all_reduces[-1].ms
        figures["limit.all_reduce_gb_per_s"] = bounds.all_reduces[-1].bus_gb_per_s
    first = explanation.findings[0] if explanation.findings else None
    if first and first.share is not None:
        figures["cause_share"] = first.share
    if first and first.gain:
        figures["predicted_gain"] = first.gain.median
    return figures


def _explained_tags(explanation: Explanation) -> dict[str, str]:
    """Tags: name and sentence of the first cause, and the advice; empty if there is no cause."""
    if not explanation.findings:
        return {"cause": "", "cause_text": "", "advice": ""}
    first = explanation.findings[0]
    return {"cause": first.cause, "cause_text": cause_of(first), "advice": advice_of(first)}


def _add_picture(client: MlflowClient, run_id: str, picture: Path) -> None:
    """Log the picture of where the rest of the speed is, once, for the chart of pictures."""
    import mlflow

    refuse_links([picture])
    if picture.exists() and not client.list_artifacts(run_id, "images"):
        client.log_image(run_id, mlflow.Image(str(picture)), key=NAME, step=0)


def _add(client: MlflowClient, run_id: str, figures: dict[str, float], time_ms: int) -> None:
    """Log new and changed figures, so that a repeated comparison adds no points."""
    known = client.get_run(run_id).data.metrics
    send(client, run_id, [metric(name, value, time_ms) for name, value in figures.items() if known.get(name) != value])
