"""A scaling curve as text for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from samebits.results.figures import duration, milliseconds, three_digits, times
from samebits.results.scaling.curve import STRONG_AND_WEAK

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from samebits.records.run import Spread
    from samebits.results.scaling.curve import Fitted, Scaling, ScalingName

_HEAD = ("devices", "rows each", "step", "speed-up", "efficiency", "")


def say(scaling: Scaling) -> str:
    """Measured and projected steps, the fit with its errors, and notes."""
    kind = "GPUs" if scaling.device_type == "cuda" else "CPU devices"
    size = f"{scaling.gradient_bytes / 1e6:.3g} MB of gradients"
    lines = [f"{scaling.model}, {scaling.model_parameters:,} parameters, {size}, ddp in fast on {kind}"]
    titles = {
        "strong": f"strong scaling: the {scaling.global_batch_size} samples of a step are shared out",
        "weak": f"weak scaling: {scaling.global_batch_size} samples of a step on each device",
    }
    for name in STRONG_AND_WEAK:
        if rows := list(_rows(scaling, name)):
            lines += ["", titles[name], *_table([_HEAD, *rows])]
    if scaling.fit:
        lines += ["", *_say_fit(scaling.fit), *_say_held_out(scaling)]
    return "\n".join([*lines, *(f"note: {note}" for note in scaling.notes)])


def _rows(scaling: Scaling, name: ScalingName) -> Iterator[tuple[str, ...]]:
    for one in scaling.measured:
        if one.scaling == name:
            label = one.label or ""
            yield (str(one.devices), str(one.rows), _step(one.step_ms), *_gain(one.speedup, one.devices), label)
    for two in scaling.projections:
        if two.scaling == name:
            label = "projection" + (f" over {two.network}" if two.network else "")
            yield (str(two.devices), f"{two.rows:g}", _step(two.step_ms), *_gain(two.speedup, two.devices), label)


def _step(spread: Spread) -> str:
    return f"{milliseconds(spread.median)} ({three_digits(spread.low)}–{three_digits(spread.high)})"


def _gain(speedup: Spread | None, devices: int) -> tuple[str, str]:
    return times(speedup), f"{speedup.median / devices:.0%}" if speedup else "–"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with columns as wide as their widest cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _say_fit(fit: Fitted) -> list[str]:
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
    return [f"fit: {said} ({errors})"]


def _say_held_out(scaling: Scaling) -> Iterator[str]:
    if not scaling.held_out:
        yield "held out: nothing, since that takes two numbers of devices above 1; the projections are untested here"
    for one in scaling.held_out:
        yield (
            f"held out: {one.devices} devices, {one.scaling}: a fit without them says {_step(one.predicted_ms)}, "
            f"measured {milliseconds(one.measured_ms)}, {one.error:+.1%}"
        )
