"""Common parts of the synthetic tasks' teachers: their samples, and a fixed linear map."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from samebits.portable.random import Stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

CHUNK = 8192  # samples drawn at a time, which bounds memory; part of the data's definition


class Samples(NamedTuple):
    """Samples with the teacher's expected (``floor``) and realised loss on each, in nats or squares."""

    inputs: NDArray[np.generic]
    targets: NDArray[np.generic]
    floor: NDArray[np.float64]
    teacher_loss: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """Draws samples of one task, with ``num_classes`` (None for real numbers) and a ``loss`` whose floor is known.

    ``draw(stream, count)`` returns the next samples of a stream. 8-bit inputs are scaled as ``Card`` describes, by
    ``input_scale`` and ``input_offset``.
    """

    draw: Callable[[Stream, int], Samples]
    num_classes: int | None
    loss: Literal["cross_entropy", "mse"] = "cross_entropy"
    input_scale: float = 1.0
    input_offset: float = 0.0


_SUM_STD = math.sqrt(4 * (256**2 - 1) / 12)  # standard deviation of the sum of four octets


def bell(stream: Stream, rows: int, width: int) -> NDArray[np.float64]:
    """Integers of mean 0 and standard deviation 147.8, near normal: sums of four octets."""
    octets = stream.octets(rows * width * 4).reshape(rows, width, 4)
    total = octets[..., 0].astype(np.float64)
    for k in (1, 2, 3):
        total += octets[..., k]
    return total - 510.0


class LinearMap:
    """A fixed linear teacher, scaled so that its outputs have unit variance."""

    def __init__(self, seed: int, task: str, *, features: int, outputs: int) -> None:
        self._features = features
        draws = Stream(seed, task, "teacher").below(255, features * outputs)
        self._weights = (draws - 127).astype(np.float64).reshape(features, outputs)
        self._scale = 1.0 / (_SUM_STD * math.sqrt((255**2 - 1) / 12) * math.sqrt(features))

    def draw(self, stream: Stream, count: int) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        """Inputs (count, features) of standard deviation 1.15, and outputs (count, outputs) of about 1."""
        integers = bell(stream, count, self._features)
        outputs = np.multiply(integers @ self._weights, self._scale)  # exact integers: any order of summation
        return (integers / 128.0).astype(np.float32), outputs
