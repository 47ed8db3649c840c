"""Figures in words: ratios, how large and how certain they are, and whether any difference is shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samebits.records.run import Ratio, Spread

NO_DIFFERENCE = "no difference shown"
"""What is said of a ratio whose 95% interval holds 1."""


def three_digits(value: float) -> str:
    """A number with three digits, or all before its point, never as a power of ten."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def is_open(ratio: Ratio | None) -> bool:
    """Whether a ratio was measured and may be 1; that of ``single`` to itself is 1 and not measured."""
    return ratio is not None and ratio.low < ratio.high and ratio.holds_one


def times(ratio: Spread | None) -> str:
    """A ratio with its interval, for a table."""
    if ratio is None:
        return "–"
    if ratio.low == ratio.high:
        return f"{ratio.median:.2f}x"
    return f"{ratio.median:.2f}x ({ratio.low:.2f}–{ratio.high:.2f})"


def gain(ratio: Ratio | None) -> str:
    """A speed-up with its interval, for a table, and whether that shows a difference."""
    return f"{times(ratio)}, {NO_DIFFERENCE}" if is_open(ratio) else times(ratio)


def times_of(ratio: Ratio, what: str = "", *, digits: int = 2) -> str:
    """A ratio with its interval, for a sentence: ``1.48 times the speed of single (1.45 to 1.56)``."""
    text = f"{ratio.median:.{digits}f} times{what and ' '}{what}"
    return text if ratio.low == ratio.high else f"{text} ({ratio.low:.{digits}f} to {ratio.high:.{digits}f})"
