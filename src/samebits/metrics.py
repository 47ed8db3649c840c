"""Statistics of step times and ratios, in plain Python."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections.abc import Sequence


class Spread(TypedDict):
    """A median and the range it was taken from."""

    median: float
    low: float
    high: float


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which ``percent`` of the sorted values fall, linear between neighbours (Hyndman and Fan 7)."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    lower = math.floor(position)
    upper = min(lower + 1, len(ordered) - 1)
    return ordered[lower] + (ordered[upper] - ordered[lower]) * (position - lower)


def spread(values: Sequence[float]) -> Spread:
    """Median, smallest and largest."""
    return {"median": median(values), "low": min(values), "high": max(values)}


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Quotients of paired measurements."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def relative_difference(a: float, b: float) -> float:
    """|a - b| over the larger magnitude; 0 for equal values, also zeros; infinite if one is not finite."""
    if a == b:
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b))
