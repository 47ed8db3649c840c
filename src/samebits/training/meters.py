"""What is measured of a training: the time of its steps, and the peak of memory."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from samebits.training.worker import Worker

_GIB = 2**30


class StepClock:
    """Times segments of steps: ``start``, one ``lap`` after each step, ``stop``; the host waits for nothing between.

    Both ends synchronise the device; laps on a GPU are events that are read only at ``stop``. What happens
    between ``stop`` and the next ``start`` (logging, checkpoints) is not counted.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self.step_seconds: list[float] = []
        self.seconds = 0.0
        self._started = 0.0
        self._ticks: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self._device)

    def start(self) -> None:
        """Begin a segment."""
        self._synchronize()
        self._events, self._ticks = [], []
        if self._cuda:
            self._record()
        self._started = time.perf_counter()
        self._ticks.append(self._started)

    def lap(self) -> None:
        """Mark the end of a step."""
        if self._cuda:
            self._record()
        else:
            self._ticks.append(time.perf_counter())

    def stop(self) -> float:
        """End the segment and return its seconds."""
        self._synchronize()
        seconds = time.perf_counter() - self._started
        self.seconds += seconds
        if self._cuda:
            pairs = zip(self._events, self._events[1:], strict=False)
            self.step_seconds += [a.elapsed_time(b) / 1e3 for a, b in pairs]
        else:
            self.step_seconds += [b - a for a, b in zip(self._ticks, self._ticks[1:], strict=False)]
        return seconds

    def _record(self) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)


def reset_peak(worker: Worker) -> None:
    """Start measuring: the allocator's peak on GPUs, the process's resident set on CPUs."""
    for index in worker.cuda_devices:
        torch.cuda.reset_peak_memory_stats(index)
    if not worker.cuda_devices:
        with contextlib.suppress(OSError):  # some containers forbid it; the peak then includes start-up
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_gib(worker: Worker) -> list[float]:
    """Peak of each device of this worker since ``reset_peak``, in GiB; NaN where it cannot be read."""
    if worker.cuda_devices:
        return [torch.cuda.max_memory_allocated(index) / _GIB for index in worker.cuda_devices]
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return [int(line.split()[1]) * 1024 / _GIB]
    return [float("nan")]
