"""Figures in words: quantities with their units, and ratios with their intervals."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from samebits.records.run import Ratio, Spread

NO_DIFFERENCE = "no difference shown"
"""The words for a ratio whose 95% interval holds 1."""


def three_digits(value: float) -> str:
    """A number with three digits, or with all digits before the point, but never as a power of ten."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def milliseconds(value: float) -> str:
    """Milliseconds with three digits."""
    return f"{three_digits(value)} ms"


def signed_ms(value: float) -> str:
    """Milliseconds with their sign."""
    return f"{'−' if value < 0 else '+'}{milliseconds(abs(value))}"


def multiple(value: float) -> str:
    """A speed as a multiple of one device's: ``1.54×``."""
    return f"{value:.2f}×"


def wall_seconds(value: float) -> str:
    """The seconds of a training: hundredths, or three digits of less than a second. A fast device takes a hundredth."""
    return f"{value:.2f}" if value >= 1 else f"{Decimal(f'{value:.2e}'):f}"


def wall_time(seconds: float) -> str:
    """Seconds of a stage or of a whole run: ``12 s``, ``4 min 41 s``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s" if seconds >= 9.95 else f"{seconds:.1f} s"


def duration(seconds: float) -> str:
    """Seconds with three digits and a unit that fits."""
    return _in_unit(seconds, ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")))


def gib(count: float) -> str:
    """Bytes in GiB or MiB, with three digits."""
    return _in_unit(count, ((2**30, "GiB"), (2**20, "MiB")))


def joules(value: float | None) -> str:
    """An energy with three digits."""
    return "–" if value is None else _in_unit(value, ((1e6, "MJ"), (1e3, "kJ"), (1.0, "J")))


def _in_unit(value: float, units: Sequence[tuple[float, str]]) -> str:
    """A value with three digits in the first of ``units`` whose size it reaches, or else in the last one."""
    size, unit = next((one for one in units if abs(value) >= one[0]), units[-1])
    return f"{three_digits(value / size)} {unit}"


def flops(tera: float, beside: float | None = None) -> str:
    """A rate with two digits and no exponent, in the unit of the rate that it stands ``beside``."""
    unit, size = ("TFLOP/s", 1.0) if (tera if beside is None else beside) >= 1 else ("GFLOP/s", 1e-3)
    value = tera / size
    return f"{value:.0f} {unit}" if value >= 10 else f"{value:.2g} {unit}"


def signed(ratio: float) -> str:
    """What a ratio adds, in percent with its sign."""
    return f"{100 * (ratio - 1):+.0f}%"


def share(value: float | None) -> str:
    """A share in percent."""
    return "–" if value is None else f"{value:.0%}" if value >= 0.1 else f"{100 * value:.2g}%"


def fine_percent(value: float) -> str:
    """A share in percent with two significant digits, also if it is tiny."""
    return f"{Decimal(f'{100 * value:.1e}').normalize():f}%"


def is_open(ratio: Ratio | None) -> bool:
    """Whether a ratio was measured and its interval holds 1. The ratio of ``single`` to itself was not measured."""
    return ratio is not None and ratio.low < ratio.high and ratio.holds_one


def times(ratio: Spread | None) -> str:
    """A ratio with its interval, for a table."""
    if ratio is None:
        return "–"
    if ratio.low == ratio.high:
        return f"{ratio.median:.2f}x"
    return f"{ratio.median:.2f}x ({ratio.low:.2f}–{ratio.high:.2f})"


def undecided(ratio: Ratio | None) -> str:
    """The words after a ratio that shows no difference; empty for any other ratio."""
    return f", {NO_DIFFERENCE}" if is_open(ratio) else ""


def gain(ratio: Ratio | None) -> str:
    """A speed-up with its interval, for a table; it says if no difference is shown."""
    return times(ratio) + undecided(ratio)


def times_of(ratio: Ratio, what: str = "") -> str:
    """A ratio with its interval, for a sentence: ``1.48 times the speed of single (1.45 to 1.56)``."""
    text = f"{ratio.median:.2f} times{what and ' '}{what}"
    return text if ratio.low == ratio.high else f"{text} ({ratio.low:.2f} to {ratio.high:.2f})"
