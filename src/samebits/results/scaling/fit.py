"""The fit of the cost model to measured points: least squares of relative errors, without negative coefficients.

Every set of coefficients that are not zero is tried. This finds the best one, and all that explain the points about as
well. If the points do not determine a coefficient, predictions have a range and are no guess. For example, one number
of devices does not tell latency from bandwidth.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from samebits.errors import UserError
from samebits.records.run import Spread
from samebits.results.scaling.model import LINEAR, Coefficients, Step, columns, columns_with_overlap, costs, is_longer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from samebits.results.scaling.network import Network

    Array = np.ndarray[Any, np.dtype[np.float64]]

LEAST_ERROR = 0.005  # relative error of any point: no fit counts as better than a clock on a busy host
WIDTH = 2.0  # standard deviations to either side of a range
_OVERLAPS = (0.0, 0.25, 0.5, 0.75, 1.0)
_TURNS = 4
_WIDEST = math.log(100.0)


class Point(Step):
    """A measured step."""

    seconds: float


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Coefficients, of which only ``chosen`` are not zero, with the sum of squares of the relative errors.

    ``covariance`` is the covariance of the chosen ones for points whose relative errors have a variance of 1.
    """

    coefficients: Coefficients
    chosen: tuple[int, ...]
    squares: float
    covariance: Array


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The best candidate, and all that explain the points about as well; ``scatter`` is the typical relative error."""

    points: tuple[Point, ...]
    best: Candidate
    candidates: tuple[Candidate, ...]
    scatter: float

    @property
    def coefficients(self) -> Coefficients:
        """The coefficients of the best candidate."""
        return self.best.coefficients

    @property
    def residuals(self) -> list[float]:
        """Relative error of the model at each point: predicted over measured, less 1."""
        return [costs(self.coefficients, point).seconds / point.seconds - 1 for point in self.points]

    def range_of(self, name: str) -> tuple[float, float]:
        """Smallest and largest value of a coefficient over the candidates."""
        values = [getattr(one.coefficients, name) for one in self.candidates]
        return min(values), max(values)

    def estimate(self, step: Step, network: Network | None = None) -> Spread:
        """The seconds of a step, over a ``network`` that may be slower than the link that was measured.

        The range covers the predictions of all candidates, each with ``WIDTH`` standard deviations by the scatter of
        the points.
        """
        ends = [_ends(one, step, network, self.scatter) for one in self.candidates]
        seconds = costs(over(self.coefficients, network), step).seconds
        return Spread(median=seconds, low=min(low for low, _ in ends), high=max(high for _, high in ends))


def fit(points: Sequence[Point]) -> Fit:
    """Fit the cost model.

    Raises:
        UserError: there are too few points, or none of more than one device.
    """
    if len(points) < 3 or not any(point.devices > 1 for point in points):
        raise UserError(
            f"{len(points)} points, expected at least 3, and some of more than one device",
            hint="measure more numbers of devices",
        )
    candidates = list(_candidates(points))
    least = min(candidates, key=lambda one: one.squares)
    freedom = max(1, len(points) - len(least.chosen))
    variance = max(least.squares / freedom, LEAST_ERROR**2)
    near = [one for one in candidates if one.squares <= least.squares + WIDTH**2 * variance]
    # Akaike's criterion: a coefficient has to explain more than it could by chance. Among equal candidates, the order
    # of the coefficients decides, where bytes come before latency, and then the smaller overlap.
    best = min(near, key=lambda one: (round(one.squares / variance + 2 * len(one.chosen), 6), one.chosen))
    return Fit(points=tuple(points), best=best, candidates=tuple(near), scatter=math.sqrt(variance))


def _candidates(points: Sequence[Point]) -> Iterator[Candidate]:
    """Every set of coefficients that the points allow, with every overlap."""
    seconds = np.array([point.seconds for point in points])
    overlaps = _OVERLAPS if any(point.hidable and point.bytes for point in points) else (0.0,)
    plain = np.array([columns(point) for point in points])
    present = [i for i in range(len(LINEAR)) if plain[:, i].any()]
    for size in range(1, min(len(present), len(points)) + 1):
        for chosen in itertools.combinations(present, size):
            communicates = any(LINEAR[i] in ("per_byte", "latency") for i in chosen)
            for overlap in overlaps if communicates else (0.0,):
                if candidate := _solved(points, seconds, chosen=chosen, overlap=overlap):
                    yield candidate


def _solved(points: Sequence[Point], seconds: Array, *, chosen: tuple[int, ...], overlap: float) -> Candidate | None:
    """Least squares with the chosen coefficients; None if one of them would be negative or is not determined."""
    best: Candidate | None = None
    for start in (False, True) if overlap else (False,):
        longer = [start] * len(points)
        for _ in range(_TURNS):
            solved = _least_squares(_design(points, seconds, chosen=chosen, overlap=overlap, longer=longer))
            if solved is None:
                break
            values, covariance = solved
            by = Coefficients(**{LINEAR[i]: float(v) for i, v in zip(chosen, values, strict=True)}, overlap=overlap)
            truly = [is_longer(by, point) for point in points]
            if overlap and truly != longer:
                longer = truly
                continue
            errors = [costs(by, point).seconds / point.seconds - 1 for point in points]
            squares = sum(error**2 for error in errors)
            if best is None or squares < best.squares:
                best = Candidate(coefficients=by, chosen=chosen, squares=squares, covariance=covariance)
            break
    return best


def _design(
    points: Sequence[Point], seconds: Array, *, chosen: tuple[int, ...], overlap: float, longer: Sequence[bool]
) -> Array:
    """The columns of the model at each point, divided by the point's seconds, so that errors are relative."""
    rows = [columns_with_overlap(point, overlap, longer=one) for point, one in zip(points, longer, strict=True)]
    return np.array(rows)[:, chosen] / seconds[:, None]


def _least_squares(design: Array) -> tuple[Array, Array] | None:
    """Coefficients that bring the rows nearest to 1, and their covariance; None if negative or not determined."""
    scale = np.linalg.norm(design, axis=0)
    if not scale.all():
        return None
    scaled = design / scale
    values, _, rank, _ = np.linalg.lstsq(scaled, np.ones(len(design)), rcond=1e-6)
    if rank < design.shape[1] or (values < 0).any():
        return None
    covariance = np.linalg.inv(scaled.T @ scaled) / np.outer(scale, scale)
    return values / scale, covariance


def over(by: Coefficients, network: Network | None) -> Coefficients:
    """The coefficients of a ring that also goes over a network: all links wait for the slowest one."""
    if network is None:
        return by
    slower = {
        "per_byte": max(by.per_byte, 1 / network.bytes_per_second),
        "latency": max(by.latency, network.latency_seconds),
    }
    return by.model_copy(update=slower)


def _ends(candidate: Candidate, step: Step, network: Network | None, scatter: float) -> tuple[float, float]:
    """The range of a step by one candidate; it is a factor, so that no time is negative."""
    by = over(candidate.coefficients, network)
    seconds = costs(by, step).seconds
    row = np.array(columns_with_overlap(step, by.overlap, longer=is_longer(by, step)))
    for i, name in enumerate(LINEAR):
        if getattr(by, name) != getattr(candidate.coefficients, name):
            row[i] = 0.0  # the network gives it, without an error
    row = row[list(candidate.chosen)]
    relative = scatter * math.sqrt(1 + float(row @ candidate.covariance @ row) / seconds**2)
    wide = math.exp(min(WIDTH * relative, _WIDEST))
    return seconds / wide, seconds * wide
