"""A cause of lost time, what it may be instead of found, and the figures that show it."""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

from samebits.files import Part


class Evidence(Part):
    """A figure that shows a cause, with its unit."""

    name: str
    value: float
    unit: str


def in_ms(name: str, value: float) -> Evidence:
    """Evidence in milliseconds."""
    return Evidence(name=name, value=value, unit="ms")


def number(name: str, value: float) -> Evidence:
    """Evidence without a unit."""
    return Evidence(name=name, value=value, unit="")


class Cause(NamedTuple):
    """A cause: the milliseconds of a step that it takes in each turn; ``rank`` and ``phase`` are a straggler's."""

    kind: str
    lost_ms: tuple[float, ...]
    evidence: tuple[Evidence, ...]
    rank: int | None = None
    phase: str | None = None

    @property
    def ms(self) -> float:
        """The median over the turns."""
        return median(self.lost_ms)


class NotJudged(NamedTuple):
    """A cause of which nothing can be said here, and why."""

    kind: str
    why: str
