"""``vectors``: classification of vectors by a noisy linear teacher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from samebits.section import Section
from samebits.tasks.interface import DataSection, TaskSpec

if TYPE_CHECKING:
    from samebits.portable.random import Stream
    from samebits.tasks.teacher import Samples, Teacher


class VectorsKwargs(Section):
    """Widths of the ``vectors`` task."""

    features: int = Field(32, ge=1, le=4096)
    """Width of an input."""
    classes: int = Field(10, ge=2, le=1024)
    """Classes of a label."""


class VectorsData(DataSection):
    """Classification of vectors by a noisy linear teacher."""

    task: Literal["vectors"] = "vectors"
    """Which synthetic task."""
    kwargs: VectorsKwargs = VectorsKwargs()
    """Widths of the task."""


def _teacher(seed: int, kwargs: VectorsKwargs) -> Teacher:
    """Labels sampled from the softmax of a linear teacher; the floor is that softmax's entropy."""
    import numpy as np

    from samebits.portable import elementary
    from samebits.tasks.teacher import LinearMap, Samples, Teacher

    teacher = LinearMap(seed, "vectors", features=kwargs.features, outputs=kwargs.classes)

    def draw(stream: Stream, count: int) -> Samples:
        """Draw inputs, then one label each by inverting the cumulative softmax."""
        inputs, logits = teacher.draw(stream, count)
        logits = np.subtract(logits, logits.max(axis=1, keepdims=True))
        weights = elementary.exp(logits)
        cumulative = weights.copy()
        expected = np.multiply(weights[:, 0], logits[:, 0])
        for k in range(1, kwargs.classes):
            cumulative[:, k] = np.add(cumulative[:, k - 1], weights[:, k])
            expected = np.add(expected, np.multiply(weights[:, k], logits[:, k]))
        total = cumulative[:, -1]
        points = np.multiply(stream.uniform(count), total)
        labels = np.minimum((cumulative <= points[:, None]).sum(axis=1), kwargs.classes - 1)
        log_total = elementary.log(total)
        chosen = np.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
        floor = np.subtract(log_total, np.divide(expected, total))
        teacher_loss = np.subtract(log_total, chosen)
        return Samples(inputs=inputs, targets=labels.astype(np.int64), floor=floor, teacher_loss=teacher_loss)

    return Teacher(draw=draw, num_classes=kwargs.classes)


VECTORS = TaskSpec(section=VectorsData, teacher=_teacher)
