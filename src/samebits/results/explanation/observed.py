"""What a run's step shows: all that causes are found in, and advice is reckoned from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from samebits.results.explanation.parts import Turn, turns_of

if TYPE_CHECKING:
    from samebits.records.breakdown import Breakdown
    from samebits.records.run import Placement, Ratio
    from samebits.results.comparison import SliceSteps

BUSY_CORES = 0.3
"""Cores' worth of time of other processes, from which a host is busy."""


@dataclass(frozen=True)
class Observed:
    """All that causes are found in; ``slices`` are steps paired with one device's, and ``speedup`` what those show.

    ``batches`` are the whole global batches in the data, and ``graphs`` whether CUDA graphs are asked for, which
    accumulation turns off.
    """

    breakdown: Breakdown
    placement: Placement
    slices: SliceSteps | None
    speedup: Ratio | None = None
    batches: int | None = None
    graphs: bool = False

    @property
    def one_device_is_faster(self) -> bool:
        """Whether the paired steps show that."""
        return self.slices is not None and self.speedup is not None and self.speedup.high < 1

    @property
    def turns(self) -> list[Turn]:
        """The turns that count."""
        return turns_of(self.breakdown)

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
