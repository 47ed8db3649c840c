"""A scaling curve for a terminal: the answers, a bar for each number of devices, the fit with its errors, and notes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.text import Text

from samebits.errors import counted
from samebits.results.figures import duration, milliseconds, multiple, three_digits, times
from samebits.results.lines import WIDTHS, answer, axis, extent, rule, wrapped
from samebits.results.scaling.curve import STRONG_AND_WEAK, ProjectedPoint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from samebits.records.run import Spread
    from samebits.results.scaling.curve import Fitted, MeasuredPoint, Scaling, ScalingName

_NAME, _ROWS, _STEP, _SPEED, _EFFICIENCY = 23, 11, 10, 20, 12
"""Columns of the table. The bars have the rest; a narrow form has neither rows nor efficiency."""

_MEASURED, _PROJECTED = "█", "░"


def lines_of(scaling: Scaling, width: int) -> list[Text]:
    """Answers, curves, fit and notes, in lines of at most so many columns."""
    size = f"{scaling.gradient_bytes / 1e6:.3g} MB of gradients"
    facts = [scaling.model, f"{scaling.model_parameters:,} parameters", size, f"ddp in fast on {_kind(scaling)}s"]
    lines = [rule(width), *map(Text, wrapped(" · ".join(facts), width)), Text(), *_answers(scaling, width)]
    titles = {
        "strong": f"Strong scaling: the {scaling.global_batch_size:,} samples of a step are shared out",
        "weak": f"Weak scaling: {scaling.global_batch_size:,} samples of a step on each device",
    }
    for name in STRONG_AND_WEAK:
        lines += [Text(), Text(titles[name], style="bold"), *_curve(scaling, name, width)]
    lines.append(Text())
    if scaling.fit:
        lines += [Text(line) for line in wrapped(_say_fit(scaling.fit), width, "     ")]
    lines += [Text(line) for told in _say_held_out(scaling) for line in wrapped(told, width, "          ")]
    return [*lines, *(Text(line) for note in scaling.notes for line in wrapped(f"note: {note}", width, "      "))]


def _kind(scaling: Scaling) -> str:
    return "GPU" if scaling.device_type == "cuda" else "CPU device"


def _answers(scaling: Scaling, width: int) -> Iterator[Text]:
    known = [(one, one.speedup) for one in _measured(scaling, "strong") if one.counts and one.speedup]
    if several := [(one, speedup) for one, speedup in known if one.devices > 1]:
        most, speedup = max(several, key=lambda pair: pair[0].devices)
        told = f"{counted(most.devices, _kind(scaling))} that share a batch; range {_range(speedup)}"
        yield from answer("What do more buy?", multiple(speedup.median), told, width, "bold")
    else:
        yield from answer("What do more buy?", "–", "no training counts that shared a batch out", width, "bold")
    if beyond := [one for one in scaling.projections if one.scaling == "strong"]:
        last = max(beyond, key=lambda one: one.devices)
        over = f" over {last.network}" if last.network else ""
        told = f"{counted(last.devices, _kind(scaling))}{over}, projected; range {_range(last.speedup)}"
        yield from answer("And still more?", multiple(last.speedup.median), told, width, "bold")
    else:
        why = "nothing is projected for a batch that is shared out" + (": see the notes" if scaling.notes else "")
        yield from answer("And still more?", "–", why, width, "bold")
    if scaling.held_out:
        worst = max(scaling.held_out, key=lambda one: abs(one.error))
        told = f"largest error where measured devices were predicted by a fit without them ({worst.devices} of them)"
        yield from answer("How far to trust it?", f"{worst.error:+.1%}", told, width, "bold")
    elif scaling.fit and not scaling.projections:
        told = f"the fit misses the points by {scaling.fit.scatter:.0%}; see the notes"
        yield from answer("How far to trust it?", "not far", told, width, "bold")
    elif scaling.fit:
        told = "untested here: that takes two numbers of devices above 1"
        yield from answer("How far to trust it?", "?", told, width, "bold")


def _measured(scaling: Scaling, name: ScalingName) -> list[MeasuredPoint]:
    return [one for one in scaling.measured if one.scaling == name]


def _curve(scaling: Scaling, name: ScalingName, width: int) -> Iterator[Text]:
    """The head with the axis, and a line for each number of devices."""
    points: list[MeasuredPoint | ProjectedPoint] = [*_measured(scaling, name)]
    points += [one for one in scaling.projections if one.scaling == name]
    wide = width == WIDTHS[1]
    columns = width - _NAME - _STEP - _SPEED - (_ROWS + _EFFICIENCY if wide else 0)
    most = math.ceil(max((one.speedup.median for one in points if one.speedup), default=1.0))
    limit = 1.06 * most
    rows, efficiency = (f"{'rows each':>{_ROWS - 2}}  ", f"{'efficiency':>{_EFFICIENCY}}") if wide else ("", "")
    head = f"{'':<{_NAME}}{rows}{axis(most, limit, columns)}{'a step':>{_STEP}}{'speed':>{_SPEED}}{efficiency}"
    yield Text(head, style="dim")
    for point in points:
        projected, bar = isinstance(point, ProjectedPoint), ""
        if point.speedup:
            _, length = extent(0, point.speedup.median, limit, columns)
            bar = (_PROJECTED if projected else _MEASURED) * length
        words = counted(point.devices, "device") + (", projected" if projected else "")
        share = f"{point.speedup.median / point.devices:.0%}" if point.speedup else "–"
        rows, efficiency = (f"{point.rows:>{_ROWS - 2},g}  ", f"{share:>{_EFFICIENCY}}") if wide else ("", "")
        yield Text(
            f"{words:<{_NAME}}{rows}{bar:<{columns}}{milliseconds(point.step_ms.median):>{_STEP}}"
            f"{times(point.speedup):>{_SPEED}}{efficiency}"
        )
        if not isinstance(point, ProjectedPoint) and point.label:
            yield from (Text(line) for line in wrapped(f"  {point.label}", width, "  "))


def _range(spread: Spread) -> str:
    return f"{spread.low:.2f} to {spread.high:.2f}"


def _step(spread: Spread) -> str:
    return f"{milliseconds(spread.median)} ({three_digits(spread.low)}–{three_digits(spread.high)})"


def _say_fit(fit: Fitted) -> str:
    by = fit.coefficients
    parts = [
        (by.fixed, f"{duration(by.fixed)} of each step"),
        (by.per_row, f"{duration(by.per_row)} of a sample"),
        (by.contention, f"{duration(by.contention)} for each device beside it"),
        (by.contention_per_row, f"{duration(by.contention_per_row)} of a sample for each device beside it"),
        (by.latency, f"{duration(by.latency)} of a message"),
        (by.per_byte, f"{1e-9 / by.per_byte if by.per_byte else 0:.3g} GB/s of a link"),
        (by.overlap, f"{by.overlap:.0%} of what can be hidden behind backward is"),
    ]
    said = ", ".join(text for value, text in parts if value)
    errors = f"{fit.points} points, typical error {fit.scatter:.1%}, largest {fit.largest_residual:.1%}"
    return f"fit: {said} ({errors})"


def _say_held_out(scaling: Scaling) -> Iterator[str]:
    for one in scaling.held_out:
        yield (
            f"held out: {one.devices} devices, {one.scaling}: a fit without them says {_step(one.predicted_ms)}, "
            f"measured {milliseconds(one.measured_ms)}, {one.error:+.1%}"
        )
