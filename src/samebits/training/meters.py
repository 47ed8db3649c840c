"""Measures the time of steps and of their phases, and the peak of memory."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from samebits.records.breakdown import Phases

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from samebits.records.breakdown import PhaseName
    from samebits.training.worker import Worker

    Moment: TypeAlias = float | torch.cuda.Event
    Notes: TypeAlias = Callable[[PhaseName], None]
    """Called with each phase that a step begins."""

_GIB = 2**30
_TRIES = 10  # to read two clocks without an interruption between them


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its queued work; a CPU has none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def moment(device: torch.device) -> Moment:
    """The current time on a device: the host's clock, or an event on the current stream of a GPU."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(begin: Moment, end: Moment) -> float:
    """Seconds between two moments of one device; it must have passed both."""
    if isinstance(begin, float):
        assert isinstance(end, float)
        return end - begin
    assert not isinstance(end, float)
    return float(begin.elapsed_time(end)) / 1e3


class StepClock:
    """Times segments of steps: ``start``, one ``lap`` after each step, ``stop``.

    Both ends synchronise the device. Between them the host does not wait: laps on a GPU are events that are read only
    at ``stop``. Work between ``stop`` and the next ``start`` (logging, checkpoints) is not counted.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.step_seconds: list[float] = []
        self.seconds = 0.0
        self._started = 0.0
        self._laps: list[Moment] = []

    def start(self) -> None:
        """Begin a segment."""
        synchronize(self._device)
        first = moment(self._device)
        self._started = first if isinstance(first, float) else time.perf_counter()
        self._laps = [first]

    def lap(self) -> None:
        """Mark the end of a step."""
        self._laps.append(moment(self._device))

    def stop(self) -> float:
        """End the segment and return its seconds."""
        synchronize(self._device)
        seconds = time.perf_counter() - self._started
        self.seconds += seconds
        self.step_seconds += [seconds_between(a, b) for a, b in itertools.pairwise(self._laps)]
        return seconds


def ignore_phase(phase: PhaseName) -> None:
    """Notes without effect and almost without cost, for steps that are not divided into phases."""


class Queue:
    """Reads from the kernel how long the calling thread was ready and waited for a core.

    Source: /proc/thread-self/schedstat (documentation of the kernel, sched-stats); 0 if it cannot be read.
    """

    def __init__(self) -> None:
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._file = -1

    def seconds(self) -> float:
        """Seconds that the thread has waited for a core since it began."""
        if self._file < 0:
            return 0.0
        _, waited, _ = os.pread(self._file, 96, 0).split()
        return int(waited) / 1e9

    def close(self) -> None:
        """Close the kernel's file; ``seconds`` must not be called after this."""
        if self._file >= 0:
            os.close(self._file)


class PhaseClock:
    """Adds up the time of each phase: of the thread and its queue on a CPU, of the device's stream on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._queue = Queue()
        self._marks: list[tuple[PhaseName, Moment, float]] = []

    def __call__(self, phase: PhaseName) -> None:
        """Note the time at which a phase begins."""
        self._marks.append((phase, *self._now()))

    def _now(self) -> tuple[Moment, float]:
        """The time and the seconds in the queue so far, at one moment: else a phase could last less than 0."""
        if self._device.type == "cuda":
            return moment(self._device), 0.0
        for _ in range(_TRIES):
            waited, now = self._queue.seconds(), time.perf_counter()
            if self._queue.seconds() == waited:
                break
        return now, waited

    def take(self, steps: int) -> Phases:
        """Milliseconds of each phase since the last call, by step; the last phase ends now."""
        self("host")
        seconds: dict[str, float] = defaultdict(float)
        synchronize(self._device)
        for (phase, begin, before), (_, end, after) in itertools.pairwise(self._marks):
            seconds["queued"] += after - before
            seconds[phase] += seconds_between(begin, end) - (after - before)
        self._marks = []
        return Phases(**{phase: 1e3 * spent / steps for phase, spent in seconds.items()})

    def close(self) -> None:
        """Close the kernel's file."""
        self._queue.close()


def reset_peak(worker: Worker) -> None:
    """Reset the peak of memory: of the allocator on GPUs, of the process's resident set on CPUs."""
    for index in worker.cuda_devices:
        torch.cuda.reset_peak_memory_stats(index)
    if not worker.cuda_devices:
        with contextlib.suppress(OSError):  # some containers forbid it: the peak then includes the start
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_gib(worker: Worker) -> list[float]:
    """Peak of memory on each device of this worker since ``reset_peak``, in GiB; NaN if it cannot be read."""
    if worker.cuda_devices:
        return [torch.cuda.max_memory_allocated(index) / _GIB for index in worker.cuda_devices]
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return [int(line.split()[1]) * 1024 / _GIB]
    return [float("nan")]
