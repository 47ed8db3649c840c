"""Deliver local logs to MLflow.

A state file beside each log holds the progress, and each point keeps the time of its event, so that a second delivery
of the same lines changes nothing.
"""

from __future__ import annotations

import itertools
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from samebits.errors import UserError, one_line, without_password
from samebits.files import DamagedError, Record
from samebits.here import stage_command
from samebits.host.locks import locked
from samebits.records.log import (
    LOGS,
    ComparedEvent,
    EndEvent,
    LossesEvent,
    StartEvent,
    all_logs,
    parse_event,
    start_of,
    writer_gone,
)
from samebits.records.provenance import Provenance, provenance_of
from samebits.tracking.comparison import record_comparison
from samebits.tracking.recorder import BATCH, Recorder, refuse_links, send
from samebits.tracking.store import connect, is_permanent, require_writable, tracking_uri

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mlflow import MlflowClient

    from samebits.records.log import Event
    from samebits.tracking.sender import Telemetry


_KEPT_SECONDS = 30 * 24 * 3600.0


class State(Record):
    """Delivery progress of one log: bytes sent, target store and run, and the refusal if MLflow rejected the rest."""

    uri: str | None = None
    run_id: str | None = None
    offset: int = 0
    ended: bool = False
    refused: str | None = None


class Delivery:
    """The delivery of one log. The caller holds the log's lock."""

    def __init__(self, log: Path) -> None:
        self._log, self._file = log, log.with_suffix(".state.json")
        self.state, self._foreign = State(), False
        if self._file.exists():
            try:
                self.state = State.read(self._file, made_by="samebits track sync")
            except DamagedError:
                pass  # a second delivery of the whole log changes nothing
            except UserError as error:  # another version of samebits wrote the state
                self.state, self._foreign = State(refused=str(error)), True

    @property
    def client(self) -> MlflowClient:
        """A client of the log's store. Raises HostError: it is another user's file."""
        require_writable(self.uri)
        return connect(self.uri)

    @property
    def uri(self) -> str:
        """The address of the store that was in use when the run began."""
        if self.state.uri is None:
            start = start_of(self._log)
            self._set(uri=(start and start.tracking_uri) or tracking_uri({}))
        assert self.state.uri
        return self.state.uri

    def aim(self, uri: str) -> None:
        """Choose a store, unless one already has the run."""
        if self.state.run_id is None:
            self._save(uri=uri)

    def try_again(self) -> None:
        """Forget a refusal by MLflow or by this version, whose cause may be gone."""
        if self.state.refused is not None and not self._foreign:
            self._save(refused=None)

    @property
    def done(self) -> bool:
        """Whether nothing is left to deliver: all is sent, the rest was refused, or the log was moved away."""
        try:
            size = self._log.stat().st_size
        except FileNotFoundError:
            return True
        return (self.state.ended and self.state.offset == size) or self.state.refused is not None

    @property
    def delivered(self) -> bool:
        """Whether MLflow has the whole log."""
        return self.done and self.state.refused is None

    def _pending(self) -> Iterator[tuple[int, list[Event]]]:
        """Undelivered events, grouped by call of MLflow, with the offset behind each group.

        Consecutive losses share a call. Only whole lines count.

        Raises UserError: a line cannot be read. All events before it have been yielded by then.
        """
        together: list[Event] = []
        position, points = self.state.offset, 0
        for line in self._lines_from(position):
            try:
                event = parse_event(line, self._log)
            except UserError:
                if together:
                    yield position, together
                raise
            more = len(event.losses) + 1 if isinstance(event, LossesEvent) else BATCH  # one more for a learning rate
            if together and points + more > BATCH:
                yield position, together
                together, points = [], 0
            together, points, position = [*together, event], points + more, position + len(line)
        if together:
            yield position, together

    def _lines_from(self, offset: int) -> Iterator[bytes]:
        """Whole lines behind an offset, read one by one, because a log can be larger than memory."""
        with self._log.open("rb") as stream:
            stream.seek(offset)
            yield from itertools.takewhile(lambda line: line.endswith(b"\n"), stream)

    def deliver(self) -> None:
        """Deliver the pending events and save the progress."""
        try:
            for offset, events in self._pending():
                self._record(events)
                self._save(offset=offset)
        except Exception as error:
            if not (isinstance(error, UserError) or is_permanent(error)):
                raise
            self._end_refused()
            self._save(refused=one_line(str(error)))

    def _end_refused(self) -> None:
        """End the run, so that neither it nor its logged model waits for the refused events."""
        try:
            if self.state.run_id and not self.state.ended:
                self._fail()
        except Exception as error:
            if not is_permanent(error):  # a store that refuses this too has no such run
                raise

    def _record(self, events: list[Event]) -> None:
        """Record one event, or several events of losses."""
        event = events[0]
        if isinstance(event, ComparedEvent):
            for log in (LOGS / f"{key}.jsonl" for key in event.keys):  # of ended runs, perhaps from another host
                if log.is_file() and not Delivery(log).done:
                    deliver(log)
            record_comparison(self.client, event)
        elif not isinstance(event, EndEvent) or self.state.run_id:
            recorder = Recorder(self.client, self.state.run_id)
            try:
                recorder.record(*events)
            finally:  # also where a run was begun and an error followed
                self._set(run_id=recorder.run_id)
            if isinstance(event, StartEvent):
                self._save()
                self._record_provenance(recorder)
        self._set(ended=isinstance(event, EndEvent))

    def _record_provenance(self, recorder: Recorder) -> None:
        file, patch = provenance_of(self._log), self._log.with_suffix(".patch")
        refuse_links([file, patch])
        if file.exists():  # a run without it is still worth recording
            provenance = Provenance.read(file, made_by=stage_command("train"))
            recorder.provenance(provenance, patch if patch.is_file() else None)

    def abandon(self) -> None:
        """End the run of a writer that died without an end event."""
        if not self.state.ended:
            self._fail()
            self._save(offset=self._log.stat().st_size)

    def _fail(self) -> None:
        """End the run as failed, at the time of the log's last write."""
        self._record([EndEvent(status="FAILED", time_ms=int(self._log.stat().st_mtime * 1000))])

    def send_telemetry(self, telemetry: Telemetry | None) -> None:
        """Deliver the samples, if there are any. Those of a failed delivery stay for the next one."""
        if telemetry and self.state.run_id and (points := telemetry.points[:]):
            send(self.client, self.state.run_id, points)
            del telemetry.points[: len(points)]

    def _set(self, **changes: object) -> None:
        self.state = self.state.model_copy(update=changes)

    def _save(self, **changes: object) -> None:
        self._set(**changes)
        self.state.write(self._file)


def deliver(log: Path, telemetry: Telemetry | None = None) -> bool:
    """Deliver what a log holds now; True if nothing is left."""
    with locked(log.with_suffix(".lock")):
        delivery = Delivery(log)
        gone = writer_gone(log)  # asked before the log is read, so that its last lines are not missed
        delivery.send_telemetry(telemetry)  # before the end event, after which nobody delivers samples
        delivery.deliver()
        delivery.send_telemetry(telemetry)  # of a run that has just begun
        if gone and not delivery.done:
            delivery.abandon()
        return delivery.done


def remove_old_logs() -> None:
    """Remove logs that MLflow has had whole for a month, and the files beside them that bear their names."""
    logs = {log.stem: log for log in all_logs()}
    old = {stem for stem, log in logs.items() if _is_old(log)}
    for file in [*LOGS.iterdir()] if old else ():
        parts = file.name.split(".")
        stems = (".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))
        if next((stem for stem in stems if stem in logs), None) in old:  # the longest: names share beginnings
            with suppress(OSError):  # for example another user's file
                file.unlink(missing_ok=True)


def _is_old(log: Path) -> bool:
    try:
        return time.time() - log.stat().st_mtime > _KEPT_SECONDS and Delivery(log).delivered
    except OSError:
        return False


def sync() -> tuple[int, dict[Path, str]]:
    """Deliver every log whose writer has ended to the store in use now.

    A run that another store has in part goes on there. Returns how many logs were delivered, and the problem of each
    other one.
    """
    count, problems = 0, {}
    for log in all_logs():
        if not writer_gone(log):
            continue
        try:
            with locked(log.with_suffix(".lock")):
                delivery = Delivery(log)
                delivery.try_again()
                if delivery.done:
                    continue
                here = without_password(tracking_uri())
                delivery.aim(here)
                if delivery.uri != here:
                    sys.stderr.write(f"{log.name} goes on to {one_line(delivery.uri)}, where its run began\n")
            deliver(log)
        except Exception as error:  # noqa: BLE001 - each log has its own report
            problems[log] = one_line(str(error))
        else:
            refused = Delivery(log).state.refused
            count += refused is None
            if refused:
                problems[log] = refused
    return count, problems
