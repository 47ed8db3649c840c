"""``images``: classification of 3x32x32 images with flipped labels."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from samebits.section import Section
from samebits.tasks.interface import DataSection, TaskSpec

if TYPE_CHECKING:
    from samebits.portable.random import Stream
    from samebits.tasks.teacher import Samples, Teacher

_CONTRAST = 24


class ImagesKwargs(Section):
    """Classes of the ``images`` task and how many labels of a hundred are flipped."""

    classes: int = Field(10, ge=2, le=256)
    """Classes of a label."""
    flip_percent: int = Field(10, ge=1, le=50)
    """Labels of a hundred that are replaced by another class."""


class ImagesData(DataSection):
    """Classification of 3x32x32 images with flipped labels."""

    task: Literal["images"]
    """Which synthetic task."""
    kwargs: ImagesKwargs = ImagesKwargs()
    """Widths of the task."""


def _teacher(seed: int, kwargs: ImagesKwargs) -> Teacher:
    """Blocky class patterns plus noise as 8-bit pixels, some labels flipped; the floor is the flips' entropy."""
    import numpy as np

    from samebits.portable.random import Stream
    from samebits.tasks.teacher import Samples, Teacher

    classes = kwargs.classes
    blocks = Stream(seed, "images", "teacher").below(2, classes * 48).reshape(-1, 3, 4, 4)
    pattern = blocks.repeat(8, axis=2).repeat(8, axis=3).astype(np.int16)
    patterns = 128 + _CONTRAST * (2 * pattern - 1)
    flipped = Decimal(kwargs.flip_percent) / 100
    kept = 1 - flipped
    loss_kept, loss_flipped = float(-kept.ln()), float(-(flipped / (classes - 1)).ln())
    floor = float(-kept * kept.ln() - flipped * (flipped / (classes - 1)).ln())

    def draw(stream: Stream, count: int) -> Samples:
        """Draw a class, its noisy pattern, and perhaps another label."""
        drawn = stream.below(classes, count)
        octets = stream.octets(count * 3072 * 2).reshape(count, 3, 32, 32, 2)
        noise = (octets[..., 0].astype(np.int16) + octets[..., 1] - 255) >> 2
        inputs = np.clip(patterns[drawn] + noise, 0, 255).astype(np.uint8)
        flip = stream.below(100, count) < kwargs.flip_percent
        replacement = (drawn + 1 + stream.below(classes - 1, count)) % classes
        return Samples(
            inputs=inputs,
            targets=np.where(flip, replacement, drawn),
            floor=np.full(count, floor),
            teacher_loss=np.where(flip, loss_flipped, loss_kept),
        )

    return Teacher(draw=draw, num_classes=classes, input_scale=2.0**-6, input_offset=128.0)


IMAGES = TaskSpec(section=ImagesData, teacher=_teacher)
