"""Comparison of an MLflow store, read without MLflow, with what a training logged."""

from __future__ import annotations

import math
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy

from faults.subject import expect
from samebits.params import flatten
from samebits.records.log import LOGS, EndEvent, LossesEvent, StartEvent, parse_event, start_of
from samebits.records.provenance import Provenance, provenance_of
from samebits.records.run import FILES, WEIGHTS, Run, read_run

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from samebits.records.log import Event


@dataclass(frozen=True)
class Stored:
    """One run of a store."""

    run_id: str
    status: str
    artifacts: str
    params: dict[str, str]
    tags: dict[str, str]
    metrics: dict[str, list[tuple[int, float]]]


@dataclass(frozen=True)
class StoredModel:
    """One logged model of a store, with MLflow's number of its status and its linked metrics."""

    model_id: str
    status: int
    artifacts: str
    metrics: list[str]


_READY, _FAILED = 2, 3


class Store:
    """An SQLite store of MLflow. ``artifacts`` is a server's folder for ``mlflow-artifacts:``."""

    def __init__(self, database: Path, artifacts: Path | None = None) -> None:
        self.database, self._artifacts = database, artifacts

    def runs(self, key: str) -> list[Stored]:
        """Active runs with this key."""
        with closing(sqlite3.connect(self.database, timeout=30)) as database:
            found = database.execute(
                "SELECT run_uuid, status, artifact_uri FROM runs JOIN tags USING (run_uuid)"
                " WHERE tags.key = 'samebits.run' AND tags.value = ? AND lifecycle_stage = 'active'",
                (key,),
            ).fetchall()
            return [self._read(database, *row) for row in found]

    def running(self) -> int:
        """Number of runs with status RUNNING."""
        with closing(sqlite3.connect(self.database, timeout=30)) as database:
            (count,) = database.execute("SELECT count(*) FROM runs WHERE status = 'RUNNING'").fetchone()
            return int(count)

    def _read(self, database: sqlite3.Connection, run_id: str, status: str, artifacts: str) -> Stored:
        def pairs(table: str) -> dict[str, str]:
            return dict(database.execute(f"SELECT key, value FROM {table} WHERE run_uuid = ?", (run_id,)))  # noqa: S608

        metrics: dict[str, list[tuple[int, float]]] = {}
        query = "SELECT key, step, value, is_nan FROM metrics WHERE run_uuid = ? ORDER BY key, step, timestamp"
        for key, step, value, is_nan in database.execute(query, (run_id,)):
            metrics.setdefault(key, []).append((step, math.nan if is_nan else value))
        return Stored(run_id, status, artifacts, pairs("params"), pairs("tags"), metrics)

    def models(self, run: Stored) -> list[StoredModel]:
        """Active logged models of a run."""
        with closing(sqlite3.connect(self.database, timeout=30)) as database:
            found = database.execute(
                "SELECT model_id, status, artifact_location FROM logged_models"
                " WHERE source_run_id = ? AND lifecycle_stage = 'active'",
                (run.run_id,),
            ).fetchall()
            query = "SELECT metric_name FROM logged_model_metrics WHERE model_id = ?"
            return [
                StoredModel(model_id, status, artifacts, [name for (name,) in database.execute(query, (model_id,))])
                for model_id, status, artifacts in found
            ]

    def artifact(self, run: Stored | StoredModel, name: str) -> bytes | None:
        """Contents of an artifact of a run or a model. None if it is missing."""
        scheme, _, rest = run.artifacts.partition(":")
        folder = Path(rest) if scheme == "file" else Path(f"{self._artifacts}{rest}")
        file = Path("/" + str(folder / name).lstrip("/"))
        return file.read_bytes() if file.exists() else None


def empty_store(folder: Path) -> Path:
    """Make an empty SQLite store. MLflow's first use of one takes seconds, so cases copy it."""
    file = folder / "empty.db"
    code = f"from samebits.tracking.store import connect; connect('sqlite:///{file}')"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=folder, check=True, capture_output=True)
    return file


@dataclass
class Totals:
    """Totals over all cases."""

    runs: int = 0
    losses: int = 0
    lost: int = 0
    doubled: int = 0
    running: int = 0
    times_as_long: dict[str, list[float]] = field(default_factory=dict)  # ratios to untracked trainings, by harm


def check_run(store: Store, log: Path, run_dir: Path | None, totals: Totals | None = None) -> None:
    """Raise Broken unless a store has what a training's log says, and its files if it ended well."""
    totals = totals or Totals()
    start = start_of(log)
    if not isinstance(start, StartEvent):  # stopped before its first event
        return
    status = status_of(log)
    found = store.runs(start.run)
    totals.runs += 1
    totals.doubled += max(0, len(found) - 1)
    totals.running += sum(run.status == "RUNNING" for run in found)
    expect(len(found) == 1, f"{start.run} is in MLflow {len(found)} times", [(run.run_id, run.status) for run in found])
    (stored,) = found
    _check_losses(stored, losses_of(log), totals)
    params = {name: str(value) for name, value in flatten(start.params.model_dump(mode="json")).items()}
    expect(stored.params == params, "other params", set(stored.params.items()) ^ set(params.items()))
    tags = {"samebits.run": start.run, "strategy": start.strategy, "numerics": start.numerics}
    if run_dir is not None:
        run = read_run(run_dir)
        loss = numpy.array(stored.metrics.get("loss", ()), numpy.float32)
        losses = numpy.array([*enumerate(run.losses, 1)], numpy.float32)
        expect(numpy.array_equal(loss, losses, equal_nan=True), "other losses than losses.csv's, as single precision")
        tags |= _tags_of(run, log)
        for name in FILES:
            expect(store.artifact(stored, name) == (run_dir / name).read_bytes(), f"artifact {name} is another")
    seen = {name: stored.tags.get(name) for name in tags}
    expect(seen == tags, "other tags", f"{seen} in place of {tags}")
    expect(stored.status == status, f"status {stored.status} in place of {status}")
    _check_models(store, stored, run_dir)


def check_logs(store: Store, folder: Path, ended: Mapping[str, Path], totals: Totals | None = None) -> None:
    """Check every log of a folder. ``ended`` has the folders of runs that ended well by key; each run needs a log."""
    logs = sorted((folder / LOGS).glob("*.jsonl"))
    lost = ended.keys() - {log.stem for log in logs}
    expect(not lost, "a training's log is lost", lost)
    for log in logs:
        check_run(store, log, ended.get(log.stem), totals)


def _check_models(store: Store, stored: Stored, run_dir: Path | None) -> None:
    """A run that ended well has one logged model with its weights. No logged model is left pending."""
    models = store.models(stored)
    expect(len(models) <= 1, f"the run has {len(models)} logged models", models)
    expect(all(model.status in (_READY, _FAILED) for model in models), "a logged model is still pending", models)
    if run_dir is not None:
        expect([model.status for model in models] == [_READY], "the weights are no logged model", models)
        weights = store.artifact(models[0], WEIGHTS)
        expect(weights == (run_dir / WEIGHTS).read_bytes(), "the logged model holds other weights")
        expect(models[0].metrics.count("loss") == 1, "the loss is not linked with the logged model", models)


def events_of(log: Path) -> Iterator[Event]:
    """Events of the complete lines of a log."""
    text = log.read_bytes()
    for line in text[: text.rfind(b"\n") + 1].splitlines(keepends=True):
        yield parse_event(line, log)


def status_of(log: Path) -> str:
    """Status of a training by its end event. FAILED without one."""
    return next((event.status for event in events_of(log) if isinstance(event, EndEvent)), "FAILED")


def losses_of(log: Path) -> dict[int, float]:
    """Losses of a log by step."""
    losses: dict[int, float] = {}
    for event in events_of(log):
        if isinstance(event, LossesEvent):
            for step, value in enumerate(event.losses, event.first_step):
                expect(step not in losses, "the log has a step twice", step)
                losses[step] = value
    return losses


def _check_losses(stored: Stored, logged: dict[int, float], totals: Totals) -> None:
    points = stored.metrics.get("loss", [])
    steps = [step for step, _ in points]
    lost, doubled = len(set(logged) - set(steps)), len(steps) - len(set(steps))
    totals.losses += len(logged)
    totals.lost += lost
    totals.doubled += doubled
    expect(not lost, f"{lost} losses of {len(logged)} are not in MLflow", sorted(set(logged) - set(steps))[:9])
    expect(not doubled, f"{doubled} losses are in MLflow twice")
    expect(sorted(steps) == list(range(1, len(steps) + 1)), "steps are not 1 to N", steps[:9])
    same = numpy.array_equal(points, sorted(logged.items()), equal_nan=True)
    expect(same, "other losses than the log's")
    for name, values in stored.metrics.items():
        if not name.startswith("system/"):
            expect(len({step for step, _ in values}) == len(values), f"metric {name} is there twice", values[:9])


def _tags_of(run: Run, log: Path) -> dict[str, str]:
    record = run.record
    tags = {
        "weights_sha256": record.weights_sha256,
        "data_sha256": record.data.sha256,
        "host_fingerprint": record.host.fingerprint,
    }
    provenance = Provenance.read(provenance_of(log), made_by="python pipeline/train.py")
    tags |= {"version.torch": provenance.packages["torch"], "git_commit": provenance.git.told}
    return tags
