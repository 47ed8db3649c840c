"""The sender: one process per repository that delivers its logs to MLflow while trainings go on.

Its low priority, from its start on, keeps it out of a training's way: it gets a tenth of a busy core. At the lowest
priority it would get a seventieth, and its imports alone would take minutes.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from samebits.errors import SamebitsError, exit_on_error, one_line
from samebits.here import repository_of_experiment, stage_command
from samebits.host import Counters, sample_seconds
from samebits.host.locks import locked
from samebits.records.log import LOGS, ComparedEvent, StartEvent, all_logs, now_ms, start_of, writer_gone
from samebits.records.provenance import Provenance, provenance_of
from samebits.tracking.comparison import log_comparison
from samebits.tracking.delivery import Delivery, deliver, remove_old_logs
from samebits.tracking.recorder import metric
from samebits.tracking.store import answers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mlflow.entities import Metric

    from samebits.results.comparison import Comparison

NICENESS = 10
POLL_SECONDS = 0.5
RETRY_SECONDS = 3.0
LINGER_SECONDS = 60.0  # so that the comparison, which a pipeline makes after its evaluations, finds a sender ready
GIVE_UP_SECONDS = 60.0  # for a store that is away, after the last writer; the next start or `track sync` delivers

_PAUSE_BY_LOOK = 20  # looking at very many logs takes long, and a training needs the core

_LOCK = LOGS.parent / "sender.lock"


def start_sender(log: Path) -> int:
    """Start the process that delivers ``log`` to MLflow, and return its number. It can outlive this process."""
    output = str(log.with_suffix(".sender.log"))
    process = os.posix_spawn(
        sys.executable,
        [sys.executable, "-P", "-m", "samebits.tracking.sender", str(log)],
        os.environ,
        setsid=True,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
    )
    _lower_priority(process)
    return process


@contextmanager
def taken_over() -> Iterator[None]:
    """Start a sender for each new log of the block, whose own senders end with its container or its job."""
    before = set(LOGS.glob("*.jsonl"))
    try:
        yield
    finally:
        for log in set(LOGS.glob("*.jsonl")) - before:
            start_sender(log)


def _lower_priority(process: int) -> None:
    """Lower the priority of the process and of its session, since Linux divides cores among sessions first."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, process, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
    with suppress(OSError):
        Path(f"/proc/{process}/autogroup").write_text(str(NICENESS))


def run(log: Path) -> None:
    """Deliver all logs, after another running sender has ended."""
    with locked(_LOCK):
        remove_old_logs()
        if not Delivery(log).done:  # the previous sender may have delivered it
            Sender().serve()


def hand_over(comparison: Comparison, *, reports: Path, runs: Path, wait_seconds: float) -> str | None:
    """Have a comparison delivered. Returns a message if MLflow does not have it after ``wait_seconds``.

    DVC removes the folder of a queued experiment, with the logs in it, so that it is left only when the sender ends.
    The comparison itself is complete, so that no problem with its local log or with MLflow is an error.
    """
    removed = repository_of_experiment(Path()) is not None
    try:
        log = log_comparison(comparison, reports=reports, runs=runs)
        process = start_sender(log)
        deadline = math.inf if removed else time.monotonic() + wait_seconds
        ended = False
        while not (delivery := Delivery(log)).done:
            if ended:
                again = f"`dvc exp apply` it, then `{stage_command('compare')}`"
                return f"MLflow does not have all runs of this experiment, whose folder DVC removes now: {again}"
            if time.monotonic() > deadline:
                return "MLflow has not answered yet; delivery goes on, or run `samebits track sync`"
            time.sleep(0.1)
            ended = removed and os.waitpid(process, os.WNOHANG) != (0, 0)
    except (OSError, SamebitsError) as error:
        return f"the comparison stays untracked: {error}"
    refused = delivery.state.refused
    return f"MLflow does not take the comparison: {refused}" if refused else None


class Telemetry(threading.Thread):
    """Samples this machine's counters. MLflow's own monitor would end when the server is away."""

    def __init__(
        self, gpus: Sequence[int], environ: Mapping[str, str] = os.environ, *, seconds: float | None = None
    ) -> None:
        super().__init__(daemon=True, name="telemetry")
        self._seconds = seconds or sample_seconds()
        self._counters = Counters(gpus, environ)
        self._done = threading.Event()
        self.points: list[Metric] = []  # samples to deliver; both threads change the list by single atomic calls
        self._samples = 0

    def run(self) -> None:
        """Sample until ``stop``. The first sample comes after one interval and is its average."""
        while not self._done.wait(self._seconds):
            self.sample()

    def sample(self) -> None:
        """Sample all counters once."""
        values, when = self._counters.sample(), now_ms()
        self.points.extend([metric(f"system/{name}", value, when, self._samples) for name, value in values.items()])
        self._samples += 1

    def stop(self) -> None:
        """End the thread before its next sample."""
        self._done.set()


class Sender:
    """Delivers every log of the repository until nothing is left to do."""

    def __init__(self) -> None:
        self._telemetry: dict[Path, Telemetry] = {}
        self._done: set[str] = set()
        self._newest: Path | None = None
        self._said: dict[Path, str] = {}

    def serve(self) -> None:
        """Deliver until all writers are gone and all logs are delivered, or the store is away for too long."""
        idle_since = time.monotonic()
        while True:
            waiting = self._undelivered()
            alive = [log for log in waiting if not writer_gone(log)]
            if alive:
                idle_since = time.monotonic()
            self._watch(alive)
            pause = POLL_SECONDS if self._deliver(waiting) else RETRY_SECONDS
            looked = time.monotonic()
            waiting = self._undelivered()
            took = time.monotonic() - looked
            idle = time.monotonic() - idle_since
            if not alive and idle > (GIVE_UP_SECONDS if waiting else self._linger_seconds()):
                return
            time.sleep(max(pause, _PAUSE_BY_LOOK * took))

    def _undelivered(self) -> list[Path]:
        """Logs that are not done, the oldest first."""
        deliveries = {log: Delivery(log) for log in all_logs(but=self._done)}
        self._done |= {log.name for log, delivery in deliveries.items() if delivery.done}
        self._newest = max([*deliveries, *filter(None, [self._newest])], default=None)
        return [log for log, delivery in deliveries.items() if not delivery.done]

    def _deliver(self, logs: list[Path]) -> bool:
        """Deliver what each log holds now. Other logs of a store that is away are left for the next time.

        Returns False if a log failed, so that the next try waits longer.
        """
        away, failed = set[str](), False
        for log in logs:
            uri = None
            try:
                uri = Delivery(log).uri
                if uri not in away:
                    deliver(log, self._telemetry.get(log))
            except Exception as error:  # noqa: BLE001 - any problem may be temporary
                failed = True
                if uri and not answers(uri):
                    away.add(uri)
                said = one_line(str(error))  # without a password that a driver's message may contain
                if self._said.get(log) != said:
                    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {log.name}: {said}\n")
                    self._said[log] = said
        return not failed

    def _watch(self, alive: list[Path]) -> None:
        """Sample the host beside each running training."""
        for log in alive:
            if log not in self._telemetry and isinstance(start := start_of(log), StartEvent):
                placed = start.placement
                here = placed.devices[: placed.devices_by_node[0]] if placed.devices_by_node else placed.devices
                gpus = here if placed.device_type == "cuda" else ()
                self._telemetry[log] = Telemetry(gpus, environment_of(log))
                self._telemetry[log].start()
        for log in self._telemetry.keys() - set(alive):
            self._telemetry[log].stop()  # its samples are kept until the store has them
        for log in [log for log in self._telemetry if log.name in self._done]:
            del self._telemetry[log]

    def _linger_seconds(self) -> float:
        """How long to wait for the next log: not at all after a comparison, which ends a pipeline."""
        newest = self._newest and start_of(self._newest)
        return 0.0 if isinstance(newest, ComparedEvent) else LINGER_SECONDS


def environment_of(log: Path) -> Mapping[str, str]:
    """The environment of a training, which differs from this process's if another training started the sender."""
    try:
        return Provenance.read(provenance_of(log), made_by=stage_command("train")).environment
    except SamebitsError:
        return os.environ


if __name__ == "__main__":
    with exit_on_error():
        run(Path(sys.argv[1]))
