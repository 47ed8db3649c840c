"""The sender: one process for a repository, which delivers its logs to MLflow while trainings go on.

It keeps out of a training's way: it has the lowest priority, does nothing while a training is young, so that a short
one has the host to itself, and beside an older one works a small share of the time. The rest is delivered at the end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from samebits.files import write_json
from samebits.provenance import capture
from samebits.runlog import LOGS, start_sender, writer_gone
from samebits.tracking.comparison import log_comparison
from samebits.tracking.delivery import Delivery, deliver
from samebits.tracking.store import locked
from samebits.tracking.telemetry import Telemetry

if TYPE_CHECKING:
    from pathlib import Path

POLL_SECONDS = 0.5
RETRY_SECONDS = 3.0
YOUNG_SECONDS = {"cuda": 10.0, "cpu": 180.0}  # on a CPU the sender's start takes seconds from the training's cores
REST = 60.0  # times the seconds that a delivery took, while a training needs all cores: the server may be here too
REST_WITH_SPARE_CORES = 1.0
LONGEST_REST_SECONDS = 15.0  # a server that takes long is far away, and costs this host nothing
LINGER_SECONDS = 60.0  # the comparison of a pipeline finds a sender that is ready, after its evaluations
GIVE_UP_SECONDS = 60.0  # of a store that is away, after the last writer; the next start or `track sync` delivers

DELAY = "SAMEBITS_TRACKING_DELAY_S"
"""Variable with the seconds that a training counts as young, in place of YOUNG_SECONDS."""

_clock = time.perf_counter
_LOCK = LOGS.parent / "sender.lock"


def run(log: Path) -> None:
    """Note where ``log`` comes from; then deliver all logs, unless another sender is doing that."""
    os.nice(19)
    provenance = log.with_suffix(".provenance.json")
    if not provenance.exists():  # else another sender, perhaps inside the container, was there when it began
        write_json(provenance, capture(log.with_suffix(".patch")))
    with locked(_LOCK):
        if not Delivery(log).done:  # the sender before this one may have seen to it
            Sender().serve()


def hand_over(comparison: dict[str, Any], *, reports: Path, runs: Path, wait_seconds: float) -> bool:
    """Have a comparison delivered; False if that takes longer than ``wait_seconds``."""
    log = log_comparison(comparison, reports=reports, runs=runs)
    start_sender(log)
    deadline = time.monotonic() + wait_seconds
    while not Delivery(log).done:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return Delivery(log).state["refused"] is None


class Sender:
    """Delivers every log of the repository until there is nothing left to do."""

    def __init__(self) -> None:
        self._telemetry: dict[Path, Telemetry] = {}
        self._done: set[Path] = set()
        self._said: dict[Path, str] = {}
        self._warm = False

    def serve(self) -> None:
        """Deliver until no writer is left and all is delivered, or the store was away for too long."""
        idle_since = time.monotonic()
        while True:
            waiting = self._undelivered()
            alive = [log for log in waiting if not writer_gone(log)]
            if alive:
                idle_since = time.monotonic()
            pause = POLL_SECONDS
            if not any(_is_young(log) for log in alive):
                self._watch(alive)
                started = _clock()
                if not self._deliver(waiting, at_most=1 if alive else None):
                    pause = RETRY_SECONDS
                if alive:
                    pause = max(pause, self._rest(_clock() - started, alive))
                waiting = self._undelivered()
            idle = time.monotonic() - idle_since
            if not alive and idle > (GIVE_UP_SECONDS if waiting else LINGER_SECONDS):
                return
            time.sleep(pause)

    def _undelivered(self) -> list[Path]:
        """Logs that MLflow does not have whole, the oldest first."""
        deliveries = {log: Delivery(log) for log in sorted(LOGS.glob("*.jsonl")) if log not in self._done}
        self._done |= {log for log, delivery in deliveries.items() if delivery.final}
        return [log for log, delivery in deliveries.items() if not delivery.done]

    def _rest(self, spent: float, alive: list[Path]) -> float:
        """How long to leave trainings alone; the first delivery, which imports MLflow, is not held against it."""
        first, self._warm = not self._warm, True
        if first:
            return POLL_SECONDS
        workers = sum(len(event["placement"]["devices"]) for log in alive if (event := _first_event(log)))
        spare = (os.cpu_count() or 1) >= 2 * workers + 2  # a worker on a GPU has threads for backward and copies
        return min(LONGEST_REST_SECONDS, spent * (REST_WITH_SPARE_CORES if spare else REST))

    def _deliver(self, logs: list[Path], *, at_most: int | None) -> bool:
        """Deliver what each log has now, so many events of it at most.

        False if a store was not there, which is then not asked again at once.
        """
        away = set()
        for log in logs:
            uri = Delivery(log).uri
            if uri in away:
                continue
            try:
                deliver(log, self._telemetry.get(log), at_most=at_most)
            except Exception as error:  # noqa: BLE001 - whatever the store's trouble is, it may pass
                away.add(uri)
                if self._said.get(log) != str(error):
                    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {log.name}: {error}\n")
                    self._said[log] = str(error)
        return not away

    def _watch(self, alive: list[Path]) -> None:
        """Sample the host beside each training that goes on."""
        for log in alive:
            if log not in self._telemetry and (event := _first_event(log)):
                placement = event["placement"]
                self._telemetry[log] = Telemetry(placement["devices"] if placement["device_type"] == "cuda" else [])
                self._telemetry[log].start()
        for log in self._telemetry.keys() - set(alive):
            self._telemetry.pop(log).stop()


def _first_event(log: Path) -> dict[str, Any] | None:
    """The start of a training; None if that is not written yet, or if the log is a comparison's."""
    with log.open(encoding="utf-8") as stream:
        line = stream.readline()
    event: dict[str, Any] = json.loads(line) if line.endswith("\n") else {}
    return event if event.get("event") == "start" else None


def _is_young(log: Path) -> bool:
    event = _first_event(log)
    if event is None:
        return False
    young = float(os.environ.get(DELAY) or YOUNG_SECONDS[event["placement"]["device_type"]])
    return bool(time.time() - event["time_ms"] / 1000 < young)
