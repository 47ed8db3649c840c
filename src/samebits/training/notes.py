"""Notes of the phases of a step: ignored while whole steps are timed, timed by ``PhaseClock`` otherwise."""

from __future__ import annotations

import itertools
import os
import time
from collections import defaultdict
from typing import TYPE_CHECKING

from samebits.records.breakdown import Phases
from samebits.training.meters import moment, seconds_between, synchronize

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    import torch

    from samebits.records.breakdown import PhaseName
    from samebits.training.meters import Moment

    Notes: TypeAlias = Callable[[PhaseName], None]
    """Called with each phase that a step begins."""

_TRIES = 10  # to read two clocks without an interruption between them


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
