"""The sender: one process for a repository, which delivers its logs to MLflow while trainings go on.

It keeps out of a training's way by its priority, from its start on: of a core that is busy it gets a tenth. With the
lowest, a seventieth, its imports alone would take minutes on a busy host.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from samebits.errors import SamebitsError, exit_on_error, one_line
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
LINGER_SECONDS = 60.0  # the comparison of a pipeline finds a sender that is ready, after its evaluations
GIVE_UP_SECONDS = 60.0  # of a store that is away, after the last writer; the next start or `track sync` delivers

_PAUSE_BY_LOOK = 20  # of very many logs a look takes long, and a training wants the core

_LOCK = LOGS.parent / "sender.lock"


def start_sender(log: Path) -> None:
    """Start the process that delivers ``log`` to MLflow; nobody waits for it, and it outlives this one if it has to."""
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


@contextmanager
def taken_over() -> Iterator[None]:
    """Have delivered what the block's senders leave behind, which end with its container or with its job."""
    before = set(LOGS.glob("*.jsonl"))
    try:
        yield
    finally:
        for log in set(LOGS.glob("*.jsonl")) - before:
            start_sender(log)


def _lower_priority(process: int) -> None:
    """From its first import on, and as a group: Linux shares cores out among sessions first, then within each."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, process, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
    with suppress(OSError):
        Path(f"/proc/{process}/autogroup").write_text(str(NICENESS))


def run(log: Path) -> None:
    """Deliver all logs, unless another sender is doing that."""
    with locked(_LOCK):
        remove_old_logs()
        if not Delivery(log).done:  # the sender before this one may have seen to it
            Sender().serve()


def hand_over(comparison: Comparison, *, reports: Path, runs: Path, wait_seconds: float) -> str | None:
    """Have a comparison delivered; what there is to say if MLflow has not got it after ``wait_seconds``.

    A comparison stands for itself: no trouble with its local log, or with MLflow, is an error.
    """
    try:
        log = log_comparison(comparison, reports=reports, runs=runs)
        start_sender(log)
        deadline = time.monotonic() + wait_seconds
        while not (delivery := Delivery(log)).done:
            if time.monotonic() > deadline:
                return "MLflow has not answered yet; delivery goes on, or run `samebits track sync`"
            time.sleep(0.1)
    except (OSError, SamebitsError) as error:
        return f"the comparison stays untracked: {error}"
    refused = delivery.state.refused
    return f"MLflow does not take the comparison: {refused}" if refused else None


class Telemetry(threading.Thread):
    """Samples this machine's counters. Not MLflow's own monitor: it ends when the server is away."""

    def __init__(
        self, gpus: Sequence[int], environ: Mapping[str, str] = os.environ, *, seconds: float | None = None
    ) -> None:
        super().__init__(daemon=True, name="telemetry")
        self._seconds = seconds or sample_seconds()
        self._counters = Counters(gpus, environ)
        self._done = threading.Event()
        self.points: list[Metric] = []  # sampled and not yet delivered; each change of it is one atomic call
        self._samples = 0

    def run(self) -> None:
        """Sample until ``stop``; the first sample is taken after one interval, of which it is the average."""
        while not self._done.wait(self._seconds):
            self.sample()

    def sample(self) -> None:
        """Take one sample of everything."""
        values, when = self._counters.sample(), now_ms()
        self.points.extend([metric(f"system/{name}", value, when, self._samples) for name, value in values.items()])
        self._samples += 1

    def stop(self) -> None:
        """Have the thread end before its next sample."""
        self._done.set()


class Sender:
    """Delivers every log of the repository until there is nothing left to do."""

    def __init__(self) -> None:
        self._telemetry: dict[Path, Telemetry] = {}
        self._done: set[Path] = set()
        self._said: dict[Path, str] = {}

    def serve(self) -> None:
        """Deliver until no writer is left and all is delivered, or the store was away for too long."""
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
            if not alive and idle > (GIVE_UP_SECONDS if waiting else _linger_seconds()):
                return
            time.sleep(max(pause, _PAUSE_BY_LOOK * took))

    def _undelivered(self) -> list[Path]:
        """Logs that MLflow does not have whole, the oldest first."""
        deliveries = {log: Delivery(log) for log in all_logs(but=self._done)}
        self._done |= {log for log, delivery in deliveries.items() if delivery.done}
        return [log for log, delivery in deliveries.items() if not delivery.done]

    def _deliver(self, logs: list[Path]) -> bool:
        """Deliver what each log has now.

        False if one of them failed, which is then not tried again at once, nor is another one of a store that is away.
        """
        away, failed = set[str](), False
        for log in logs:
            uri = None
            try:
                uri = Delivery(log).uri
                if uri not in away:
                    deliver(log, self._telemetry.get(log))
            except Exception as error:  # noqa: BLE001 - whatever the trouble is, it may pass
                failed = True
                if uri and not answers(uri):
                    away.add(uri)
                said = one_line(str(error))  # without a password, which a driver's words may have
                if self._said.get(log) != said:
                    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {log.name}: {said}\n")
                    self._said[log] = said
        return not failed

    def _watch(self, alive: list[Path]) -> None:
        """Sample the host beside each training that goes on."""
        for log in alive:
            if log not in self._telemetry and isinstance(start := start_of(log), StartEvent):
                placed = start.placement
                here = placed.devices[: placed.devices_by_node[0]] if placed.devices_by_node else placed.devices
                gpus = here if placed.device_type == "cuda" else ()
                self._telemetry[log] = Telemetry(gpus, environment_of(log))
                self._telemetry[log].start()
        for log in self._telemetry.keys() - set(alive):
            self._telemetry[log].stop()  # what it has sampled is kept until the store has it
        for log in self._telemetry.keys() & self._done:
            del self._telemetry[log]


def environment_of(log: Path) -> Mapping[str, str]:
    """What a training has in its environment, which is not this process's if another training has started it."""
    try:
        return Provenance.read(provenance_of(log), made_by="python pipeline/train.py").environment
    except SamebitsError:
        return os.environ


def _linger_seconds() -> float:
    """For what may follow: a pipeline ends with its comparison."""
    newest = max(all_logs(), default=None)
    return 0.0 if newest is not None and isinstance(start_of(newest), ComparedEvent) else LINGER_SECONDS


if __name__ == "__main__":
    with exit_on_error():
        run(Path(sys.argv[1]))
