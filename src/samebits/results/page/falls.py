"""The waterfalls of a page: runs of one numerics below each other, on one axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from samebits.results.answers import fastest, parallel, speed_up
from samebits.results.figures import milliseconds, multiple, signed_ms
from samebits.results.lines import marks
from samebits.results.text import devices_of
from samebits.results.waterfall import Extent, Waterfall, percent, single_ms, waterfall, why_no_speed_up, why_untold
from samebits.strategies import BASELINE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from samebits.results.comparison import Row


@dataclass(frozen=True)
class Bar:
    """A line of a waterfall: words, a bar on its axis, ms and speed in words; ``whisker`` is the interval's bar."""

    kind: str
    words: str
    bar: Extent | None = None
    ms: str = ""
    speed: str = ""
    whisker: Extent | None = None
    bound: bool = False


@dataclass(frozen=True)
class Fall:
    """A run in the chart of waterfalls: its strategy, what it ran on, its lines, or a sentence in their place."""

    strategy: str
    on: str
    bars: tuple[Bar, ...]
    said: str = ""


@dataclass(frozen=True)
class Falls:
    """The waterfalls of one numerics on one axis: marks at whole numbers, and the place of the ideal."""

    marks: tuple[tuple[float, str], ...]
    ideal: float | None
    runs: tuple[Fall, ...]


def falls(rows: Sequence[Row]) -> Falls:
    """The waterfalls of the runs of one numerics: the fastest first, those without a speed-up next, single last."""
    best = fastest(rows)
    found = [waterfall(row) for row in sorted(filter(parallel, rows), key=lambda row: row is not best)]
    limit = 1.05 * max(
        [1.0, *(max(one.ideal, one.speedup.high, one.row.bound.high if one.row.bound else 0) for one in found)]
    )
    most = max((one.ideal for one in found), default=1)
    rest = [_unmeasured(row) for row in rows if not row.speedup and row.strategy != BASELINE.name]
    base = [row for row in rows if row.strategy == BASELINE.name]
    return Falls(
        marks=tuple((percent(0, number, limit)["width"], f"{number}×") for number in marks(most)),
        ideal=percent(0, most, limit)["width"] if found else None,
        runs=(
            *(_fall(one, limit) for one in found),
            *rest,
            *(_single(row, single_ms(rows, best), limit) for row in base),
        ),
    )


def _fall(one: Waterfall, limit: float) -> Fall:
    ideal = Bar("ideal", f"Ideal of {devices_of(one.row)}", percent(0, one.ideal, limit), "", multiple(one.ideal))
    stages = [
        Bar(
            "lost" if stage.lost else "gained",
            stage.words,
            percent(stage.start, stage.end, limit),
            signed_ms(stage.ms),
            multiple(stage.end),
            bound=stage.name == "fixed",
        )
        for stage in one.stages
    ]
    ratio = one.speedup
    got = Bar(
        "got",
        "What you get",
        percent(0, ratio.median, limit),
        milliseconds(one.step_ms) if one.step_ms else "",
        speed_up(ratio),
        whisker=percent(ratio.low, ratio.high, limit),
    )
    return Fall(one.row.strategy, devices_of(one.row), (ideal, *stages, got), why_untold(one.row) or "")


def _unmeasured(row: Row) -> Fall:
    text = why_no_speed_up(row)
    said = f"{text[0].upper()}{text[1:]}. No speed-up is claimed."
    return Fall(row.strategy, "not parallel here" if row.devices_used == 1 else devices_of(row), (), said)


def _single(row: Row, ms: float | None, limit: float) -> Fall:
    took = milliseconds(ms) if ms else ""
    return Fall(row.strategy, "one device", (Bar("got", "", percent(0, 1, limit), took, multiple(1)),))
