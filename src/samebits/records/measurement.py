"""Times of a training as they were taken: of its own steps, and of the slices that were timed after it."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, NonNegativeInt, model_validator

from samebits.files import Part

SliceName = Literal["strategy", "single", "share", "together", "node", "fast"]


StopKind = Literal["narrow", "limit", "off", "most", "no_ratio"]


class Repeats(Part):
    """How many repeats of the slices were timed, and why no more.

    After those that were ``planned`` came others, in ``prolonged_seconds``. ``half_width`` is that of the speed-up's
    interval over its median, in the end. ``stopped`` says what ended it: the interval was ``narrow``; the ``limit``
    that the params set was spent, or the next repeat would have passed it; they turn it ``off``; or there is
    ``no_ratio`` to narrow.
    """

    planned: int
    count: int
    prolonged_seconds: float
    half_width: float | None
    stopped: StopKind


class Measurement(Part):
    """Times of each step in ms, and of the slices in seconds, by name, repeat and chunk.

    A slice has ``slice_steps`` in chunks of ``chunk_steps``, and a last one of what is left. Where none was timed both
    are 0, and ``repeats`` is None.
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
