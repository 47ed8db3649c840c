"""Deliver local logs to MLflow.

How far a log was delivered is kept beside it, and every point carries the time it was logged at, so delivering
twice changes nothing.
"""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any, TypedDict

from samebits.files import write_json
from samebits.runlog import LOGS, writer_gone
from samebits.tracking.comparison import record_comparison
from samebits.tracking.recorder import BATCH, Recorder, send
from samebits.tracking.store import connect, is_permanent, locked, tracking_uri

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mlflow import MlflowClient

    from samebits.provenance import Provenance
    from samebits.tracking.telemetry import Telemetry


class State(TypedDict):
    """How far a log was delivered: bytes of it, to which run of which store, and why it never will be.

    ``provenance``: whether commit, packages and environment were recorded.
    """

    uri: str | None
    run_id: str | None
    provenance: bool
    offset: int
    ended: bool
    refused: str | None


class Delivery:
    """One log on its way to MLflow; whoever uses it holds the log's lock."""

    def __init__(self, log: Path) -> None:
        self._log, self._file = log, log.with_suffix(".state.json")
        self.state: State = {"uri": None, "run_id": None, "provenance": False, "offset": 0, "ended": False,
                              "refused": None}  # fmt: skip
        if self._file.exists():
            self.state |= json.loads(self._file.read_text(encoding="utf-8"))

    @property
    def client(self) -> MlflowClient:
        """A client of that store."""
        return connect(self.uri)

    @property
    def uri(self) -> str:
        """The store that was in use when the run began."""
        uri = self.state["uri"]
        if uri is None:
            with self._log.open(encoding="utf-8") as stream:
                uri = str(json.loads(stream.readline()).get("tracking_uri") or tracking_uri({}))
            self.state["uri"] = uri
        return uri

    def aim(self, uri: str) -> None:
        """Choose a store, unless one has the run already."""
        if self.state["run_id"] is None:
            self.state["uri"] = uri
            self._save()

    @property
    def done(self) -> bool:
        """Whether nothing is left to be delivered, or what is left was refused."""
        whole = self.state["ended"] and self.state["offset"] == self._log.stat().st_size
        return (whole and not self._owes_provenance) or self.state["refused"] is not None

    @property
    def final(self) -> bool:
        """Whether it is done and stays so: what a run was made from may come after all else was delivered."""
        return self.done and bool(self.state["run_id"] is None or self.state["provenance"] or self.state["refused"])

    @property
    def _owes_provenance(self) -> bool:
        there = self._log.with_suffix(".provenance.json").exists()
        return there and self.state["run_id"] is not None and not self.state["provenance"]

    def _pending(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Whole lines that were not delivered, each with the offset behind it; runs of losses as one event."""
        with self._log.open("rb") as stream:
            stream.seek(self.state["offset"])
            data = stream.read()
        position, held = self.state["offset"], None
        for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
            event = json.loads(line)
            if held and event["event"] == "losses" and len(held["losses"]) < BATCH:
                held["losses"] += event["losses"]
            else:
                if held:
                    yield position, held
                    held = None
                if event["event"] == "losses":
                    held = event
                else:
                    yield position + len(line), event
            position += len(line)
        if held:
            yield position, held

    def deliver(self, *, at_most: int | None = None) -> None:
        """Deliver what is pending, or so many events of it, and remember how far that was."""
        try:
            for offset, event in itertools.islice(self._pending(), at_most):
                self._record(event)
                self.state["offset"] = offset
                self._save()
            if self.state["ended"] and self._owes_provenance:
                self.state["provenance"] = self._record_provenance(Recorder(self.client, self.state["run_id"]))
                self._save()
        except Exception as error:
            if not is_permanent(error):
                raise
            self.state["refused"] = str(error)
            self._save()

    def _record(self, event: dict[str, Any]) -> None:
        if event["event"] == "comparison":
            deliver_runs(LOGS / f"{key}.jsonl" for key in event["keys"])
            record_comparison(self.client, event)
        elif event["event"] != "end" or self.state["run_id"]:
            recorder = Recorder(self.client, self.state["run_id"])
            recorder.record(event)
            if event["event"] == "start":
                self.state["run_id"] = recorder.run_id
                self._save()
            if event["event"] in ("start", "end") and not self.state["provenance"]:
                self.state["provenance"] = self._record_provenance(recorder)
        self.state["ended"] = event["event"] == "end"

    def _record_provenance(self, recorder: Recorder) -> bool:
        file = self._log.with_suffix(".provenance.json")
        if not file.exists():
            return False
        found: Provenance = json.loads(file.read_text(encoding="utf-8"))
        patch = self._log.with_suffix(".patch")
        recorder.provenance(found, patch if patch.exists() else None)
        return True

    def abandon(self) -> None:
        """End the run of a writer that is gone without a word, at its last word."""
        if not self.state["ended"]:
            self._record({"event": "end", "status": "FAILED", "time_ms": int(self._log.stat().st_mtime * 1000)})
            self.state["ended"], self.state["offset"] = True, self._log.stat().st_size
            self._save()

    def send_telemetry(self, telemetry: Telemetry) -> None:
        """Deliver what was sampled."""
        if self.state["run_id"] and (points := telemetry.take()):
            try:
                send(self.client, self.state["run_id"], points)
            except Exception:
                telemetry.put_back(points)
                raise

    def _save(self) -> None:
        write_json(self._file, self.state)


def deliver(log: Path, telemetry: Telemetry | None = None, *, at_most: int | None = None) -> bool:
    """Deliver what a log holds now, or so many events of it; True if that was the rest of it."""
    with locked(log.with_suffix(".lock")):
        delivery = Delivery(log)
        gone = writer_gone(log)  # asked before reading, so that nothing written last is missed
        delivery.deliver(at_most=at_most)
        if telemetry is not None:
            delivery.send_telemetry(telemetry)
        if gone and at_most is None and not delivery.done:
            delivery.abandon()
        return delivery.done


def deliver_runs(logs: Iterator[Path]) -> None:
    """Deliver the logs of ended runs that a comparison speaks of; there may be none on this host."""
    for log in logs:
        if log.exists() and not Delivery(log).done:
            deliver(log)


def sync() -> tuple[int, dict[Path, str]]:
    """Deliver every log whose writer has ended, to the store in use now; return how many, and why others could not be.

    A run that another store has in part goes on there.
    """
    count, problems = 0, {}
    for log in sorted(LOGS.glob("*.jsonl")):
        if Delivery(log).done or not writer_gone(log):
            continue
        with locked(log.with_suffix(".lock")):
            Delivery(log).aim(tracking_uri())
        try:
            deliver(log)
        except Exception as error:  # noqa: BLE001 - each log is told of
            problems[log] = " ".join(str(error).split())
        else:
            refused = Delivery(log).state["refused"]
            count += refused is None
            if refused:
                problems[log] = refused
    return count, problems
