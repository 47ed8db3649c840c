"""The losses of a run as a curve."""

from __future__ import annotations

import itertools
from statistics import fmean
from typing import TYPE_CHECKING, Self

from pydantic import model_validator

from samebits.files import Part

if TYPE_CHECKING:
    from samebits.records.run import Run

MAX_POINTS = 100
"""Points of a curve. Each is the mean of a group of steps, because their batches differ."""


class Curve(Part):
    """Loss over steps and over seconds: at most ``MAX_POINTS`` points, each the mean of as many steps."""

    step: tuple[int, ...]
    seconds: tuple[float, ...]
    loss: tuple[float, ...]

    @model_validator(mode="after")
    def _alike(self) -> Self:
        if not len(self.step) == len(self.seconds) == len(self.loss) > 0:
            raise ValueError("step, seconds and loss should have as many points, and one at least")
        return self


def curve(run: Run) -> Curve:
    """The losses of a run as a curve of at most ``MAX_POINTS`` points."""
    group = -(-len(run.losses) // MAX_POINTS)
    seconds = list(itertools.accumulate(milliseconds / 1e3 for milliseconds in run.record.measurement.step_ms))
    ends = tuple(range(group, len(run.losses) + 1, group))
    return Curve(
        step=ends,
        seconds=tuple(round(seconds[end - 1], 6) for end in ends),
        loss=tuple(fmean(run.losses[end - group : end]) for end in ends),
    )
