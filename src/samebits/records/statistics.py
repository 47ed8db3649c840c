"""Statistics of times: medians with their range, and ratios of paired chunks with their interval.

The interval of a ratio is a nested percentile bootstrap of the median: it resamples repeats, and chunks within each
repeat (Davison and Hinkley 1997, section 3.8). Because repeats are few, the interval is widened from the normal's
quantile to Student's (Hesterberg 2015, "What Teachers Should Know About the Bootstrap"). The degrees of freedom follow
from the share of the variance between repeats (Satterthwaite 1946). ``tools/intervals.py`` compares this interval with
others on simulated hosts whose ratios are known.
"""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from samebits.records.run import Ratio, Spread

if TYPE_CHECKING:
    from collections.abc import Sequence

    Floats = np.ndarray[Any, np.dtype[np.float64]]

NARROW = 0.05
"""Largest half width of an interval, relative to its median, at which a speed-up counts as known."""
RESAMPLES = 2000
_SEED = 0
_LEVEL = (2.5, 97.5)  # percent
_NORMAL = 1.959964
# Student's 97.5% quantiles; between these degrees of freedom, log t is nearly linear in 1/df.
_STUDENT = {1: 12.706, 1.2: 8.649, 1.5: 6.017, 2: 4.303, 3: 3.182, 4: 2.776, 6: 2.447, 10: 2.228, 30: 2.042}


def spread(values: Sequence[float]) -> Spread:
    """Median, smallest and largest."""
    return Spread(median=median(values), low=min(values), high=max(values))


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Quotients of paired measurements."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def paired_ratio(above: Sequence[Sequence[float]], below: Sequence[Sequence[float]]) -> Ratio | None:
    """The ratio of paired times, by repeat and chunk, with its 95% interval. The same times give the same interval.

    All repeats have the same number of chunks. None if there are fewer than two pairs, which give no interval, or if
    the clock was too coarse for one of the times.
    """
    if min(map(min, (*above, *below)), default=0.0) <= 0:
        return None
    logs = np.log([ratios(a, b) for a, b in zip(above, below, strict=True)])
    if logs.size < 2:
        return None
    middle = float(np.median(logs))
    medians = resampled_medians(logs, whole_repeats=True)
    factor = widening(logs)
    low, high = (middle + factor * (float(edge) - middle) for edge in np.percentile(medians, _LEVEL))
    return Ratio(median=math.exp(middle), low=math.exp(min(low, middle)), high=math.exp(max(high, middle)))


def resampled_medians(logs: Floats, *, whole_repeats: bool) -> Floats:
    """Medians of resamples of chunks within each repeat; ``whole_repeats`` resamples the repeats first."""
    repeats, chunks = logs.shape
    rng = np.random.default_rng(_SEED)
    drawn = rng.integers(0, repeats, (RESAMPLES, repeats)) if whole_repeats else np.arange(repeats)[None]
    inside = rng.integers(0, chunks, (RESAMPLES, repeats, chunks))
    medians: Floats = np.median(logs[drawn[:, :, None], inside].reshape(RESAMPLES, -1), axis=1)
    return medians


def widening(logs: Floats) -> float:
    """The factor by which a percentile interval of so few (repeats, chunks) is too narrow."""
    repeats, chunks = logs.shape
    between = float(np.var(np.median(logs, axis=1), ddof=1)) / repeats if repeats > 1 else 0.0
    within = float(np.var(resampled_medians(logs, whole_repeats=False)))
    parts = ((between, repeats - 1), (within, repeats * (chunks - 1)))
    uncertain = sum(variance**2 / freedom for variance, freedom in parts if freedom)
    freedom = (between + within) ** 2 / uncertain if uncertain else math.inf
    return student(freedom) / _NORMAL * math.sqrt(logs.size / (logs.size - 1))


def student(freedom: float) -> float:
    """Student's 97.5% quantile for real degrees of freedom from 1, accurate to 0.5%."""
    known = {**_STUDENT, math.inf: _NORMAL}
    inverse = [1 / degrees for degrees in reversed(known)]
    quantiles = [math.log(quantile) for quantile in reversed(known.values())]
    return math.exp(float(np.interp(1 / max(freedom, 1.0), inverse, quantiles)))
