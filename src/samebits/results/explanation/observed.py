"""What a run's step shows: all that causes are found in, and advice is reckoned from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from samebits.results.explanation.parts import Parts, Turn, mean_parts, turns_of

if TYPE_CHECKING:
    from samebits.records.breakdown import Breakdown
    from samebits.records.run import Ratio
    from samebits.results.comparison import SliceSteps
    from samebits.strategies.placement import Placement

BUSY_CORES = 0.3
"""Cores' worth of time of other processes, from which a host is busy."""


@dataclass(frozen=True)
class Observed:
    """All that causes are found in; ``slices`` are steps paired with one device's, and ``speedup`` what those show.

    Where there are slices, all milliseconds are of their step: turns of the profiling pass are scaled to it.
    ``batches`` are the whole global batches in the data, and ``graphs`` whether CUDA graphs are asked for, which
    accumulation turns off.
    """

    breakdown: Breakdown
    placement: Placement
    batches: int
    graphs: bool
    slices: SliceSteps | None = None
    speedup: Ratio | None = None

    @property
    def sending(self) -> tuple[str, ...]:
        """The parts that the ranks would not have without each other; a wait for the slowest is of its computation."""
        return ("buffers", "communication", *(("queued",) if self.quiet else ()))  # by the threads that send

    @cached_property
    def _scales(self) -> tuple[float, float]:
        """What makes milliseconds of the profiling pass those of the slices: of all parts, and of those that send."""
        if self.slices is None:
            return 1.0, 1.0
        parts = mean_parts(turns_of(self.breakdown))
        sent, step, together = parts.of(self.sending), self.slices.strategy, self.slices.together
        if not sent or together is None:
            return (step / parts.total,) * 2
        together = min(together, step)
        return together / (parts.total - sent), (step - together) / sent

    @cached_property
    def turns(self) -> list[Turn]:
        """The turns that count."""
        by, sending_by = self._scales
        return [turn.scaled(by, self.sending, sending_by) for turn in turns_of(self.breakdown)]

    @cached_property
    def parts(self) -> Parts:
        """The mean of each part over the turns."""
        return mean_parts(self.turns)

    @property
    def reads_ms(self) -> float:
        """What a step's reads of the device take."""
        return self._scales[0] * self.breakdown.reads.ms

    @property
    def one_thread_ms(self) -> tuple[float, ...]:
        """A step with one thread, by turn."""
        return tuple(self._scales[0] * ms for ms in self.breakdown.one_thread_ms)

    @property
    def oversubscribed(self) -> bool:
        """Whether several workers share a device."""
        return any(label.kind == "oversubscribed" for label in self.placement.labels)

    @property
    def share_gpus(self) -> bool:
        """Whether they share a GPU."""
        return self.oversubscribed and self.placement.device_type == "cuda"

    @property
    def quiet(self) -> bool:
        """Whether no other process, no other worker, and no second thread of the model took a device's core."""
        others = self.breakdown.other_cores
        shared = self.oversubscribed or bool(self.breakdown.one_thread_ms)
        return not shared and others is not None and others < BUSY_CORES

    @property
    def devices(self) -> int:
        """Devices that get samples."""
        return self.placement.devices_used
