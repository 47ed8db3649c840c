"""A comparison becomes the parent run of the runs that it compares, and adds to each what only it knows."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samebits.errors import UserError
from samebits.files import read_json
from samebits.records import read_run
from samebits.report.table import markdown
from samebits.report.text import describe_row
from samebits.runlog import LOGS, RunLog, new_key
from samebits.tracking.recorder import log_params, metric, record_all, send, set_tags
from samebits.tracking.restore import events
from samebits.tracking.store import NOTE_TAG, RUN_TAG, experiment_id, find_run, tracking_uri
from samebits.tracking.view import prepare_view

if TYPE_CHECKING:
    from mlflow import MlflowClient

PARENT_TAG = "mlflow.parentRunId"


def comparison_key(rows: list[dict[str, Any]]) -> str:
    """A name that comparisons of the same runs share, so that comparing again makes no new run."""
    return "comparison-" + hashlib.sha256("\n".join(row["run"] for row in rows).encode()).hexdigest()[:12]


def log_comparison(comparison: dict[str, Any], *, reports: Path, runs: Path) -> Path:
    """Write the log of a comparison that stands in ``reports``, over runs whose folders are in ``runs``."""
    log = RunLog(LOGS / f"{new_key('comparison')}.jsonl")
    rows = comparison["rows"]
    log.event(
        "comparison",
        tracking_uri=tracking_uri(),
        key=comparison_key(rows),
        keys=[row["run"] for row in rows],
        reports=str(reports.resolve()),
        runs=str(runs.resolve()),
    )
    log.event("end", status="FINISHED")
    log.close()
    return log.path


def record_comparison(client: MlflowClient, event: dict[str, Any]) -> None:
    """Make or find the parent run, restore what is missing, link and describe the children.

    Does nothing where a later comparison has taken the place of the one that the event speaks of.
    """
    reports = Path(event["reports"])
    comparison = read_json(reports / "comparison.json", made_by="python pipeline/compare.py")
    rows, params, when = comparison["rows"], comparison["params"], event["time_ms"]
    key = comparison_key(rows)
    if key != event["key"]:
        sys.stderr.write(f"{reports}: holds a later comparison\n")
        return
    experiment = experiment_id(client, params["tracking"]["experiment"])
    parent = find_run(client, experiment, key)
    if parent is None:
        tags = {RUN_TAG: key, "host_fingerprint": comparison["host_fingerprint"]}
        name = f"{comparison['model']} on {comparison['task']}"
        parent = client.create_run(experiment, start_time=when, tags=tags, run_name=name)
    parent_id = str(parent.info.run_id)
    log_params(client, parent_id, params)
    for row in rows:
        child_id = _child(client, experiment, row, Path(event["runs"]))
        if child_id is None:
            continue
        _add(client, child_id, _figures(row), when)
        tags = {
            PARENT_TAG: parent_id,
            NOTE_TAG: describe_row(row),
            "labels": ", ".join(label["kind"] for label in row["labels"]),
            "verdict": row["verdict"]["grade"] if row["verdict"] else "",
        }
        set_tags(client, child_id, tags)
    best = {f"speedup.{row['strategy']}-{row['numerics']}": row["speedup"]["median"] for row in rows if row["speedup"]}
    _add(client, parent_id, best, when)
    set_tags(client, parent_id, {NOTE_TAG: markdown(comparison)})
    client.log_artifacts(parent_id, str(reports), "report")
    client.set_terminated(parent_id, "FINISHED", end_time=when)
    prepare_view(client, experiment)


def _child(client: MlflowClient, experiment: str, row: dict[str, Any], runs: Path) -> str | None:
    """The run of a row, recorded again from its files if MLflow does not have it."""
    found = find_run(client, experiment, row["run"])
    if found is not None:
        return str(found.info.run_id)
    try:
        run = read_run(runs / f"{row['strategy']}-{row['numerics']}")
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return None
    return record_all(client, events(run)) if run.record["run"] == row["run"] else None


def _figures(row: dict[str, Any]) -> dict[str, float]:
    figures = {name: row[name] for name in ("eval_loss", "accuracy", "scaling_efficiency")}
    figures |= {"loss_above_floor": row["above_floor"], "loss_floor": row["floor"]}
    figures |= {name: row[name]["median"] for name in ("speedup", "bound") if row[name]}
    return {name: value for name, value in figures.items() if value is not None}


def _add(client: MlflowClient, run_id: str, figures: dict[str, float], time_ms: int) -> None:
    """Log what is new or has changed, so that a comparison made again adds no points."""
    known = client.get_run(run_id).data.metrics
    send(client, run_id, [metric(name, value, time_ms) for name, value in figures.items() if known.get(name) != value])
