"""Decides how often timed slices are repeated: until the speed-up is known well enough or a limit is reached."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from samebits.records.measurement import Repeats
from samebits.records.progress import tell
from samebits.records.statistics import NARROW
from samebits.remarks import Prolonged, Unrepeated

if TYPE_CHECKING:
    from collections.abc import Callable

    from samebits.records.measurement import StopKind
    from samebits.records.run import Ratio

MOST_REPEATS = 100  # for slices so short that the time limit would allow thousands


def why_stop(ratio: Ratio | None, *, count: int, spent: float, longest: float, limit: float) -> StopKind | None:
    """Why no repeat should follow the ``count`` timed ones; None if one should.

    ``ratio`` is None while there are too few pairs for an interval. ``spent`` are the seconds of the ``limit`` that
    additional repeats have taken; the next repeat is expected to take ``longest`` seconds.
    """
    # One repeat does not show differences between repeats.
    if ratio is not None and ratio.half_width <= NARROW and count > 1:
        return "narrow"
    if not limit:
        return "off"
    if count >= MOST_REPEATS:
        return "most"
    return "limit" if spent + longest > limit else None


def notes_of(repeats: Repeats | None) -> list[Prolonged | Unrepeated]:
    """Notes that a measurement was prolonged, or that its interval comes from one repeat."""
    if repeats is not None and repeats.count == 1 and repeats.half_width is not None:
        return [Unrepeated()]
    if repeats is None or repeats.count == repeats.planned:
        return []
    known, seconds = repeats.stopped == "narrow", repeats.prolonged_seconds
    return [Prolonged(planned=repeats.planned, count=repeats.count, prolonged_seconds=seconds, known=known)]


class Prolonging:
    """Decides for one rank, after each repeat, whether another follows; ``limit`` is ``train.prolong_s``."""

    def __init__(self, planned: int, limit: float, now: Callable[[], float] = time.perf_counter) -> None:
        self._planned, self._limit, self._now = planned, limit, now
        self._last, self._longest, self._spent = now(), 0.0, 0.0
        self._count = 0
        self._half_width: float | None = None
        self._stopped: StopKind | None = None

    def tell(self) -> None:
        """Say which repeat begins."""
        tell("timing slices", self._count + 1, max(self._planned, self._count + 1))

    def wants_more(self, ratio: Callable[[], Ratio | None] | None) -> bool:
        """Whether to time another repeat, after one has ended.

        ``ratio`` returns the speed-up known so far; it is None if there will be no speed-up.
        """
        now = self._now()
        seconds, self._last = now - self._last, now
        self._longest = max(self._longest, seconds)
        self._spent += seconds if self._count >= self._planned else 0.0
        self._count += 1
        if self._count < self._planned:
            return True
        if ratio is None:
            self._half_width, self._stopped = None, "no_ratio"
            return False
        value = ratio()
        self._half_width = value.half_width if value else None
        self._stopped = why_stop(value, count=self._count, spent=self._spent, longest=self._longest, limit=self._limit)
        return self._stopped is None

    def result(self) -> Repeats:
        """The repeats for the record, once none follows."""
        assert self._stopped
        return Repeats(
            planned=self._planned,
            count=self._count,
            prolonged_seconds=round(self._spent, 3),
            half_width=self._half_width,
            stopped=self._stopped,
        )
