"""From the ideal speed-up to the one that a run has, stage by stage: each in ms of a step, and as speed left."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from samebits.results.figures import milliseconds, multiple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from samebits.records.run import Ratio
    from samebits.results.comparison import Row, SliceSteps
    from samebits.results.explanation.explain import Unsteady

LEAST_SHOWN = 0.01
"""Least share of a step for which a stage is drawn. The first stage always is."""

STAGES: dict[str, tuple[str, str]] = {
    "fixed": ("Smaller shares cost more", "Smaller shares gain"),
    "contention": ("Slowing each other down", "Faster side by side"),
    "copies": ("DataParallel's copies", ""),
    "unexplained": ("Not explained", "Not explained"),
    "buffers": ("Sending buffers", ""),
    "communication": ("Sending gradients", "Sending gradients"),
    "wrapper": ("DDP's own work", ""),
    "waiting": ("Waiting for the slowest", ""),
    "sending": ("Sending gradients and waiting", "Sending gradients and waiting"),
}
"""Stages in order: the words for one that costs time, and for one that saves it."""

WITHIN_NOISE = "Smaller shares, within noise"

_WITHOUT_RANKS = {"unexplained": "Work of device 0 alone", "sending": "Copies, and work of device 0 alone"}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage: ms that it adds to a step, and the speed-ups ``start`` before and ``end`` after it."""

    name: str
    words: str
    ms: float
    start: float
    end: float

    @property
    def lost(self) -> bool:
        """Whether it costs speed, as it is drawn; noise may give its ms the other sign."""
        return self.end < self.start or (self.end == self.start and self.ms >= 0)


@dataclass(frozen=True, kw_only=True)
class Waterfall:
    """A run's stages from the speed-up ``ideal``, its number of devices, to ``speedup``.

    Without ``stages`` it is not known where the time goes. ``step_ms`` is a step of the slices; None without slices.
    """

    row: Row
    ideal: int
    speedup: Ratio
    stages: tuple[Stage, ...]
    step_ms: float | None


def single_ms(rows: Sequence[Row], best: Row | None) -> float | None:
    """A step on one device, from the slices of the run ``best``, or else from those of another one."""
    steps = (row.slice_step_ms for row in sorted(rows, key=lambda row: row is not best))
    return next((step.single for step in steps if step), None)


def why_no_speed_up(row: Row) -> str:
    """Why a run has no speed-up."""
    reason = row.speedup_unavailable
    return reason.text if reason else "its steps were not timed beside those of one device"


MOST_APART = 2.0
"""Ends of a speed-up's interval, as a ratio, from which a host is too unsteady to say where its time goes."""

MOST_MORE = 1.1
"""How many times a step of the whole a device's share may take, and a ratio of steps the speed-up, by noise alone."""


def why_untold(row: Row) -> str | None:
    """Why nobody can say where the time of a step goes, as one sentence; None if it is known as far as it was measured.

    Page, terminal and text show stages and causes by this alone.
    """
    step, speedup = row.slice_step_ms, row.speedup
    if row.explanation and row.explanation.unsteady:
        return say_unsteady(row.explanation.unsteady)
    if step is None or speedup is None:
        return None
    told = None
    if speedup.high > MOST_APART * speedup.low:
        told = f"its speed is between {multiple(speedup.low)} and {multiple(speedup.high)}"
    elif step.share > MOST_MORE * step.strategy:
        told = f"alone, a device needs {milliseconds(step.share)} for its share, longer than a whole step"
    elif not 1 / MOST_MORE < step.single / step.strategy / speedup.median < MOST_MORE:
        told = f"a step took {milliseconds(step.strategy)} and {milliseconds(step.single)} on one device, and yet the "
        told += f"speed-up is {multiple(speedup.median)}"
    what = "This host was too unsteady to say where the time goes"
    return told and f"{what}: {told}. Train again when nothing else runs."


def say_unsteady(unsteady: Unsteady) -> str:
    """Why the explanation gives no shares of a step."""
    took, other = milliseconds(unsteady.ms), milliseconds(unsteady.other_ms)
    seen = {
        "step": f"a step took {took} beside one device, and {other} a moment later",
        "sending": f"what is sent took {took} of a step beside one device, and {other} a moment later",
        "share": f"its share of the batch took one device {took}, and the whole batch {other}",
    }
    what = "This host was too unsteady to say what shares of a step its parts have"
    return f"{what}: {seen[unsteady.kind]}. Train again when nothing else runs."


def waterfall(row: Row) -> Waterfall:
    """The waterfall of a row with a speed-up."""
    assert row.speedup
    step = row.slice_step_ms
    stages = _stages(row, step, row.bound) if step and row.bound and not why_untold(row) else ()
    step_ms = step.strategy if step else None
    return Waterfall(row=row, ideal=row.devices_used, speedup=row.speedup, stages=tuple(stages), step_ms=step_ms)


def _stages(row: Row, step: SliceSteps, bound: Ratio) -> list[Stage]:
    """The stages that are large enough to be drawn.

    The first goes from the number of devices to the bound. The others are placed by what is left of the speed after so
    many ms, moved and stretched so that the first begins at the bound and the last ends at the speed-up: both are
    medians of ratios, which no quotient of two medians gives.
    """
    assert row.speedup
    added = _added_ms(row, step)
    first = added.pop("fixed")
    stages = [_stage("fixed", row, first, float(row.devices_used), bound.median)]
    if stages[0].lost != (first >= 0):  # two medians, of times and of ratios, do not agree on its sign
        stages[0] = replace(stages[0], words=WITHIN_NOISE)
    begin, end = step.single / step.share, step.single / step.strategy
    scale = (bound.median - row.speedup.median) / (begin - end) if begin != end else 0.0
    ms, last = 0.0, bound.median
    for name, more in added.items():
        ms += more
        after = row.speedup.median + (step.single / (step.share + ms) - end) * scale
        if abs(more) >= LEAST_SHOWN * step.strategy:
            stages.append(_stage(name, row, more, last, after))
            last = after
    return stages


def _added_ms(row: Row, step: SliceSteps) -> dict[str, float]:
    """What each stage adds to a step, in order. All but the first add up to a step without a device's share alone."""
    losses = row.explanation.losses if row.explanation else None
    if losses:
        return losses.stages()
    together = step.share if step.together is None else step.together
    return {
        "fixed": step.share - step.single / row.devices_used,
        "contention": together - step.share,
        "sending": step.strategy - together,
    }


def _stage(name: str, row: Row, ms: float, start: float, end: float) -> Stage:
    return Stage(name=name, words=stage_words(name, ms, has_ranks=row.has_ranks), ms=ms, start=start, end=end)


def stage_words(name: str, ms: float, *, has_ranks: bool) -> str:
    """The words for a stage that adds so many ms."""
    costs, saves = STAGES[name]
    costs = costs if has_ranks else _WITHOUT_RANKS.get(name, costs)
    return costs if ms >= 0 else saves or costs


Extent = dict[Literal["left", "width"], float]
"""Where a bar stands on its axis: its left edge and its width, in %."""


def percent(start: float, end: float, limit: float) -> Extent:
    """Where a bar from ``start`` to ``end`` stands on an axis from 0 to ``limit``."""
    low, high = sorted((max(0.0, start), max(0.0, end)))
    return {"left": round(100 * low / limit, 3), "width": round(100 * (high - low) / limit, 3)}
