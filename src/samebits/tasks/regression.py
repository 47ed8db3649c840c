"""``regression``: regression on a linear teacher with noise of known variance."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from samebits.section import Section
from samebits.tasks.interface import DataSection, TaskSpec

if TYPE_CHECKING:
    from samebits.portable.random import Stream
    from samebits.tasks.teacher import Samples, Teacher

_NOISE_SCALE = 2.0**-8


class RegressionKwargs(Section):
    """Widths of the ``regression`` task."""

    features: int = Field(128, ge=1, le=4096)
    """Width of an input."""
    outputs: int = Field(4, ge=1, le=64)
    """Width of a target."""


class RegressionData(DataSection):
    """Regression on a linear teacher with noise of known variance."""

    task: Literal["regression"]
    """Which synthetic task."""
    kwargs: RegressionKwargs = RegressionKwargs()
    """Widths of the task."""


def _teacher(seed: int, kwargs: RegressionKwargs) -> Teacher:
    """A linear teacher plus noise of known variance; the floor is that variance."""
    import numpy as np

    from samebits.tasks.teacher import LinearMap, Samples, Teacher, bell

    teacher = LinearMap(seed, "regression", features=kwargs.features, outputs=kwargs.outputs)
    variance = float(Fraction(4 * (256**2 - 1), 12) * Fraction(_NOISE_SCALE) ** 2)

    def draw(stream: Stream, count: int) -> Samples:
        """Draw inputs, then noise on each output."""
        inputs, outputs = teacher.draw(stream, count)
        noise = np.multiply(bell(stream, count, kwargs.outputs), _NOISE_SCALE)
        squares = np.multiply(noise, noise)
        realised = squares[:, 0].copy()
        for k in range(1, kwargs.outputs):
            realised = np.add(realised, squares[:, k])
        return Samples(
            inputs=inputs,
            targets=np.add(outputs, noise).astype(np.float32),
            floor=np.full(count, variance),
            teacher_loss=np.divide(realised, kwargs.outputs),
        )

    return Teacher(draw=draw, num_classes=None, loss="mse")


REGRESSION = TaskSpec(section=RegressionData, teacher=_teacher)
