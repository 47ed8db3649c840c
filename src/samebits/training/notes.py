"""Notes of what a step is doing: nothing where steps are timed, clock and events where they are divided."""

from __future__ import annotations

import itertools
import os
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Protocol

import torch

from samebits.records.breakdown import Phases

if TYPE_CHECKING:
    from samebits.records.breakdown import PhaseName


_TRIES = 10  # to read two clocks without being interrupted between them


class Notes(Protocol):
    """Is told what a step does from now on."""

    def __call__(self, phase: PhaseName) -> None:
        """From now on the step is in this phase."""


def ignore_phase(phase: PhaseName) -> None:
    """The notes of a step that nobody divides into phases: free of any cost."""


class Queue:
    """How long the calling thread has been ready and waited for a core, by the kernel's own account, in seconds.

    /proc/thread-self/schedstat (documentation of the kernel, sched-stats); 0 where it cannot be read.
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
        """Let go of the kernel's file; ``seconds`` may not be called any more."""
        if self._file >= 0:
            os.close(self._file)


class PhaseClock:
    """Adds up the seconds of each phase: of the thread and its queue on a CPU, of the device's stream on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._queue = Queue()
        self._marks: list[tuple[PhaseName, float, float]] = []
        self._events: list[tuple[PhaseName, torch.cuda.Event]] = []
        self.phase: PhaseName = "host"

    def __call__(self, phase: PhaseName) -> None:
        """Note the time at which a phase begins."""
        self.phase = phase
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            self._events.append((phase, event))
        else:
            self._marks.append((phase, *self._now()))

    def _now(self) -> tuple[float, float]:
        """The time, and how much was spent in the queue; both of one moment, or a phase could last less than 0."""
        for _ in range(_TRIES):
            waited, now = self._queue.seconds(), time.perf_counter()
            if self._queue.seconds() == waited:
                break
        return now, waited

    def take(self, steps: int) -> Phases:
        """Milliseconds of one of the steps since the last call, whose last phase ends now."""
        self("host")
        seconds: dict[str, float] = defaultdict(float)
        if self._cuda:
            torch.cuda.synchronize(self._device)
            for (phase, event), (_, following) in itertools.pairwise(self._events):
                seconds[phase] += event.elapsed_time(following) / 1e3
        for (phase, begin, before), (_, end, after) in itertools.pairwise(self._marks):
            seconds["queued"] += after - before
            seconds[phase] += end - begin - (after - before)
        self._marks, self._events = [], []
        return Phases(**{phase: 1e3 * spent / steps for phase, spent in seconds.items()})

    def close(self) -> None:
        """Release the kernel's file."""
        self._queue.close()
