"""Observations of a run's step: the input for causes and for the gains of remedies."""

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
"""Cores that other processes use, from which a host counts as busy."""


FIXED_SHARE = 0.25
"""Share of a step. A step is bound by launches if more of it, on one device, does not depend on the batch."""

FLOOR_SHARE = 0.15
"""Share of an optimizer's time. If its floor is less, the optimizer spends its time on launching operations."""

MORE_THAN_ONCE = 1.5
"""Reduced bytes over the bytes of all gradients, above which gradients are reduced more than once."""

LATENCY_TIMES = 3
"""Time of an all-reduce over that of the smallest message, below which latency dominates, and not bandwidth."""


@dataclass(frozen=True)
class Observed:
    """The input for causes; ``slices`` are steps paired with those of one device, and ``speedup`` is their ratio.

    With slices, all milliseconds are of their step: the turns of the profiling pass are scaled to it. ``batches`` is
    the number of whole global batches in the data. ``graphs`` says that CUDA graphs are asked for; gradient
    accumulation turns them off. ``may_capture``: they are not, and could be. ``loaders`` is the number of processes
    that load a rank's samples out of a dataset; None for data in memory.
    """

    breakdown: Breakdown
    placement: Placement
    batches: int
    graphs: bool
    may_capture: bool = False
    loaders: int | None = None
    slices: SliceSteps | None = None
    speedup: Ratio | None = None

    @property
    def sending(self) -> tuple[str, ...]:
        """The parts that exist only between ranks. ``waiting`` is not among them: the slowest rank computes then."""
        queued = ("queued",) if self.quiet else ()  # because of the threads that send
        return ("buffers", "communication", "wrapper", *queued)

    @cached_property
    def _scales(self) -> tuple[float, float]:
        """Factors from times of the profiling pass to times of the slices: of most parts, and of the sending ones."""
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
        """The turns that count, scaled."""
        by, sending_by = self._scales
        return [turn.scaled(by, self.sending, sending_by) for turn in turns_of(self.breakdown)]

    @cached_property
    def parts(self) -> Parts:
        """The mean of each part over the turns."""
        return mean_parts(self.turns)

    @property
    def reads_ms(self) -> float:
        """Milliseconds of a step's reads of the device."""
        return self._scales[0] * self.breakdown.reads.ms

    @property
    def one_thread_ms(self) -> tuple[float, ...]:
        """Milliseconds of a step with one thread for each rank, by turn."""
        return tuple(self._scales[0] * ms for ms in self.breakdown.one_thread_ms)

    @property
    def oversubscribed(self) -> bool:
        """Whether several workers share a device."""
        return any(label.kind == "oversubscribed" for label in self.placement.labels)

    @property
    def share_gpus(self) -> bool:
        """Whether several workers share a GPU."""
        return self.oversubscribed and self.placement.device_type == "cuda"

    @property
    def quiet(self) -> bool:
        """Whether no other process, no other worker and no second thread of the model used a device's core."""
        others = self.breakdown.other_cores
        shared = self.oversubscribed or bool(self.breakdown.one_thread_ms)
        return not shared and others is not None and others < BUSY_CORES

    @property
    def cores_of_a_rank(self) -> int:
        """Cores for each rank of a machine."""
        machines = max(1, len(self.placement.devices_by_node))
        return self.breakdown.cores // max(1, len(self.breakdown.ranks) // machines)

    @property
    def devices(self) -> int:
        """Devices that get samples."""
        return self.placement.devices_used

    @property
    def times_reduced(self) -> float:
        """How often a step reduces all gradients; 1 also if it leaves some out, pads them, or sends none."""
        traffic = self.breakdown.traffic
        times = traffic.bytes_per_step / max(traffic.gradient_bytes, 1) if traffic else 1.0
        return times if times > MORE_THAN_ONCE else 1.0

    @property
    def of_latency(self) -> bool:
        """Whether an all-reduce of the gradients takes little longer than one of the smallest message."""
        first, last = self.breakdown.bounds.all_reduces[0], self.breakdown.bounds.all_reduces[-1]
        return first is last or last.ms < LATENCY_TIMES * first.ms

    @property
    def moves_memory(self) -> bool:
        """Whether the optimizer takes much of a step, and mostly for moving data instead of launching operations."""
        parts, floor_ms = self.parts, self.breakdown.bounds.optimizer_floor_ms
        return parts.optimizer >= FIXED_SHARE * parts.total and floor_ms >= FLOOR_SHARE * parts.optimizer
