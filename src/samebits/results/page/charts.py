"""Curves as lines of an SVG, whose axes and words are HTML around it, so that text keeps its size on any screen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from samebits.results.comparison import Row

MOST_TICKS = 5


@dataclass(frozen=True)
class Axis:
    """An axis: its name, its ends, and the values that are written at it."""

    name: str
    low: float
    high: float
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        """The place of a value in % of the axis."""
        return round(100 * (value - self.low) / (self.high - self.low), 2)

    def marks(self) -> list[tuple[float, str]]:
        """Place and text of each tick."""
        return [(self.at(tick), f"{tick:g}") for tick in self.ticks]


@dataclass(frozen=True)
class Line:
    """A run's curve, as points of an SVG of 100 x 100, and where each of its ends is read."""

    strategy: str
    points: str


@dataclass(frozen=True)
class Chart:
    """Curves of the runs of one numerics. ``floor`` is the place of the dotted line from the bottom, in %."""

    title: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    floor: float | None = None


def axis(name: str, values: Sequence[float], *, from_zero: bool = False) -> Axis:
    """An axis that shows all values, with round ticks."""
    low, high = (0.0 if from_zero else min(values)), max(values)
    if high <= low:
        low, high = low - 0.5, high + 0.5
    step = _round_step((high - low) / MOST_TICKS)
    first = math.ceil(low / step - 1e-9)
    ticks = tuple(round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1))
    return Axis(name, low, high, ticks)


def _round_step(least: float) -> float:
    """The smallest of 1, 2 or 5 times a power of ten that is at least so much."""
    power = 10 ** math.floor(math.log10(least))
    return float(next(power * times for times in (1, 2, 5, 10) if power * times >= least * (1 - 1e-9)))


def charts_of(rows: Sequence[Row]) -> list[Chart]:
    """What the runs of one numerics learned at each step and in time, and how long their steps took."""
    losses = [loss for row in rows for loss in row.curve.loss]
    floor = rows[0].floor
    loss = axis("loss of training", [*losses, *([floor] if floor is not None else [])])
    at_floor = None if floor is None else loss.at(floor)
    step = axis("step", [at for row in rows for at in row.curve.step], from_zero=True)
    seconds = axis("seconds", [at for row in rows for at in row.curve.seconds], from_zero=True)
    slowest = max(row.step_ms_percentiles[99] for row in rows)  # the last one in a hundred may be far away
    took = axis("milliseconds of a step", [0.0, slowest * 1.05])
    share = Axis("% of steps, at most so long", 0.0, 100.0, (0.0, 50.0, 100.0))
    ms = [[min(one, took.high) for one in row.step_ms_percentiles] for row in rows]
    steps = [Line(row.strategy, _points(took, one, share, range(101))) for row, one in zip(rows, ms, strict=True)]
    return [
        Chart("Loss at each step", step, loss, _lines(rows, step, loss, "step", "loss"), at_floor),
        Chart("Loss over time", seconds, loss, _lines(rows, seconds, loss, "seconds", "loss"), at_floor),
        Chart("Time of a step", took, share, tuple(steps)),
    ]


def _lines(rows: Sequence[Row], x: Axis, y: Axis, over: str, of: str) -> tuple[Line, ...]:
    return tuple(Line(row.strategy, _points(x, getattr(row.curve, over), y, getattr(row.curve, of))) for row in rows)


def _points(x: Axis, over: Sequence[float], y: Axis, values: Sequence[float]) -> str:
    places = [f"{x.at(at):g},{100 - y.at(value):.6g}" for at, value in zip(over, values, strict=True)]
    return " ".join(places if len(places) > 1 else places * 2)


def squares(sha256: str) -> str:
    """The first 64 bits of a hash as a path of 8 x 8 squares: equal squares are equal bits."""
    digits = sha256[:16]
    bits = int(digits, 16) if len(digits) == 16 and set(digits) <= set("0123456789abcdef") else 0
    on = [number for number in range(64) if bits >> (63 - number) & 1]
    return "".join(f"M{number % 8} {number // 8}h1v1h-1z" for number in on)
