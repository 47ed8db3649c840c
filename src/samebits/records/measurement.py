"""Times of a training: of its own steps, and of the slices that were timed after it."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, NonNegativeInt, model_validator

from samebits.files import Part

SliceName = Literal["strategy", "single", "share", "together", "node", "fast"]


StopKind = Literal["narrow", "limit", "off", "most", "no_ratio"]


class Repeats(Part):
    """How many repeats of the slices were timed, and why no more.

    ``prolonged_seconds`` is the time of the repeats after the ``planned`` ones. ``half_width`` is half the width of the
    speed-up's final interval over its median. ``stopped`` is the reason for the end: the interval was ``narrow``; the
    ``limit`` of the params was spent, or the next repeat would have passed it; the params turn more repeats ``off``; or
    there was ``no_ratio`` to narrow.
    """

    planned: int
    count: int
    prolonged_seconds: float
    half_width: float | None
    stopped: StopKind


class Measurement(Part):
    """Times of each step in ms, and of the slices in seconds, by name, repeat and chunk.

    A slice has ``slice_steps`` steps in chunks of ``chunk_steps``; the last chunk may be shorter. A slice with more
    steps than the training begins it again. Without slices both are 0, and ``repeats`` is None.
    """

    step_ms: tuple[float, ...] = Field(min_length=1)
    slice_steps: NonNegativeInt
    chunk_steps: NonNegativeInt
    chunk_seconds: dict[SliceName, tuple[tuple[float, ...], ...]]
    repeats: Repeats | None = None

    @model_validator(mode="after")
    def _slices_are_whole(self) -> Self:
        if not self.chunk_seconds:
            return self
        if not (self.slice_steps and self.chunk_steps and self.chunk_seconds.get("strategy")):
            raise ValueError("chunk_seconds of slices without a step, or without the strategy's own")
        chunks = -(-self.slice_steps // self.chunk_steps)
        expected = [chunks] * len(self.chunk_seconds["strategy"])
        for name, repeats in self.chunk_seconds.items():
            if [*map(len, repeats)] != expected:
                raise ValueError(f"chunk_seconds of {name}: expected {len(expected)} repeats of {chunks} chunks each")
        return self
