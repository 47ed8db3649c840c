"""The synthetic tasks: each draws samples from a teacher whose own loss, the floor, is known.

Integer draws from Philox, exact integer products in float64, and elementary functions from
``numerics.portable``: the bytes are a function of seed and parameters alone.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from samebits.numerics.portable import elementary
from samebits.numerics.portable.random import Stream

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from samebits.params.sections import ImagesKwargs, RegressionKwargs, TokensKwargs, VectorsKwargs

CHUNK = 8192  # samples drawn at a time, which bounds memory; part of the data's definition
Loss = Literal["cross_entropy", "mse"]


class Samples(NamedTuple):
    """Samples, and the teacher's expected (``floor``) and realised loss on each, in nats or squares."""

    inputs: NDArray[np.generic]
    targets: NDArray[np.generic]
    floor: NDArray[np.float64]
    teacher_loss: NDArray[np.float64]


class Teacher(ABC):
    """Draws samples of one task: with ``num_classes``, None for real numbers, and a ``loss`` whose floor is known.

    A model is fed 8-bit inputs as ``Card`` says, by ``input_scale`` and ``input_offset``.
    """

    loss: Loss = "cross_entropy"
    num_classes: int | None
    input_scale, input_offset = 1.0, 0.0

    @abstractmethod
    def draw(self, stream: Stream, count: int) -> Samples:
        """The next ``count`` samples of ``stream``."""


_SUM_STD = math.sqrt(4 * (256**2 - 1) / 12)  # of the sum of four octets


def _bell(stream: Stream, rows: int, width: int) -> NDArray[np.float64]:
    """Integers of mean 0 and standard deviation 147.8, near normal: sums of four octets."""
    octets = stream.octets(rows * width * 4).reshape(rows, width, 4)
    total = octets[..., 0].astype(np.float64)
    for k in (1, 2, 3):
        total += octets[..., k]
    return total - 510.0


class _Linear(Teacher):
    """Inputs and the products of a fixed linear teacher, scaled to unit variance."""

    def __init__(self, seed: int, task: str, *, features: int, outputs: int) -> None:
        self.features = features
        draws = Stream(seed, task, "teacher").below(255, features * outputs)
        self.weights = (draws - 127).astype(np.float64).reshape(features, outputs)
        self.scale = 1.0 / (_SUM_STD * math.sqrt((255**2 - 1) / 12) * math.sqrt(features))

    def products(self, stream: Stream, count: int) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        """Inputs (count, features) of standard deviation 1.15, and outputs (count, outputs) of about 1."""
        integers = _bell(stream, count, self.features)
        outputs = np.multiply(integers @ self.weights, self.scale)  # exact integers: any order of summation
        return (integers / 128.0).astype(np.float32), outputs


class VectorsTeacher(_Linear):
    """Labels sampled from the softmax of a linear teacher; the floor is that softmax's entropy."""

    num_classes: int

    def __init__(self, seed: int, kwargs: VectorsKwargs) -> None:
        super().__init__(seed, "vectors", features=kwargs.features, outputs=kwargs.classes)
        self.num_classes = kwargs.classes

    def draw(self, stream: Stream, count: int) -> Samples:
        """Draw inputs, then one label each by inverting the cumulative softmax."""
        inputs, logits = self.products(stream, count)
        logits = np.subtract(logits, logits.max(axis=1, keepdims=True))
        weights = elementary.exp(logits)
        cumulative = weights.copy()
        expected = np.multiply(weights[:, 0], logits[:, 0])
        for k in range(1, self.num_classes):
            cumulative[:, k] = np.add(cumulative[:, k - 1], weights[:, k])
            expected = np.add(expected, np.multiply(weights[:, k], logits[:, k]))
        total = cumulative[:, -1]
        points = np.multiply(stream.uniform(count), total)
        labels = np.minimum((cumulative <= points[:, None]).sum(axis=1), self.num_classes - 1)
        log_total = elementary.log(total)
        chosen = np.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
        floor = np.subtract(log_total, np.divide(expected, total))
        teacher_loss = np.subtract(log_total, chosen)
        return Samples(inputs=inputs, targets=labels.astype(np.int64), floor=floor, teacher_loss=teacher_loss)


class RegressionTeacher(_Linear):
    """A linear teacher plus noise of known variance; the floor is that variance."""

    loss = "mse"
    num_classes = None
    noise_scale = 2.0**-8

    def __init__(self, seed: int, kwargs: RegressionKwargs) -> None:
        super().__init__(seed, "regression", features=kwargs.features, outputs=kwargs.outputs)
        self.outputs = kwargs.outputs
        self.variance = float(Fraction(4 * (256**2 - 1), 12) * Fraction(self.noise_scale) ** 2)

    def draw(self, stream: Stream, count: int) -> Samples:
        """Draw inputs, then noise on each output."""
        inputs, outputs = self.products(stream, count)
        noise = np.multiply(_bell(stream, count, self.outputs), self.noise_scale)
        squares = np.multiply(noise, noise)
        realised = squares[:, 0].copy()
        for k in range(1, self.outputs):
            realised = np.add(realised, squares[:, k])
        return Samples(
            inputs=inputs,
            targets=np.add(outputs, noise).astype(np.float32),
            floor=np.full(count, self.variance),
            teacher_loss=np.divide(realised, self.outputs),
        )


class ImagesTeacher(Teacher):
    """Blocky class patterns plus noise as 8-bit pixels, some labels flipped; the floor is the flips' entropy."""

    num_classes: int
    input_scale, input_offset = 2.0**-6, 128.0
    contrast = 24

    def __init__(self, seed: int, kwargs: ImagesKwargs) -> None:
        self.num_classes = kwargs.classes
        self.flip_percent = kwargs.flip_percent
        blocks = Stream(seed, "images", "teacher").below(2, kwargs.classes * 48).reshape(-1, 3, 4, 4)
        pattern = blocks.repeat(8, axis=2).repeat(8, axis=3).astype(np.int16)
        self.patterns = 128 + self.contrast * (2 * pattern - 1)
        flipped = Decimal(kwargs.flip_percent) / 100
        kept = 1 - flipped
        self.loss_kept = float(-kept.ln())
        self.loss_flipped = float(-(flipped / (kwargs.classes - 1)).ln())
        self.floor = float(-kept * kept.ln() - flipped * (flipped / (kwargs.classes - 1)).ln())

    def draw(self, stream: Stream, count: int) -> Samples:
        """Draw a class, its noisy pattern, and perhaps another label."""
        classes = stream.below(self.num_classes, count)
        octets = stream.octets(count * 3072 * 2).reshape(count, 3, 32, 32, 2)
        noise = (octets[..., 0].astype(np.int16) + octets[..., 1] - 255) >> 2
        inputs = np.clip(self.patterns[classes] + noise, 0, 255).astype(np.uint8)
        flip = stream.below(100, count) < self.flip_percent
        replacement = (classes + 1 + stream.below(self.num_classes - 1, count)) % self.num_classes
        return Samples(
            inputs=inputs,
            targets=np.where(flip, replacement, classes),
            floor=np.full(count, self.floor),
            teacher_loss=np.where(flip, self.loss_flipped, self.loss_kept),
        )


class TokensTeacher(Teacher):
    """A Markov source over a small vocabulary; the floor is its entropy rate over the sequence."""

    num_classes: int

    def __init__(self, seed: int, kwargs: TokensKwargs) -> None:
        size, self.length = kwargs.vocab_size, kwargs.seq_len
        self.num_classes = size
        exponents = Stream(seed, "tokens", "teacher").below(8, size * size)
        self.weights = np.left_shift(1, exponents).reshape(size, size)
        self.totals = self.weights.sum(axis=1)
        self.starts = np.cumsum(self.totals) - self.totals
        self.cumulative = np.cumsum(self.weights.ravel())
        logs = [Decimal(int(total)).ln() for total in self.totals]
        ln2 = Decimal(2).ln()
        # A transition's loss is ln(total / weight), and a weight is a power of two.
        self.losses = np.array(
            [[float(logs[i] - int(k) * ln2) for k in row] for i, row in enumerate(exponents.reshape(size, size))]
        )
        self.floor = self._entropy_rate()

    def _entropy_rate(self) -> float:
        """Mean over the positions of the expected loss there; the first token is uniform."""
        shares = np.divide(self.weights, self.totals[:, None])
        entropies = [math.fsum(np.multiply(row, loss)) for row, loss in zip(shares, self.losses, strict=True)]
        state = np.full(self.num_classes, 1.0 / self.num_classes)
        rates = []
        for _ in range(self.length):
            rates.append(math.fsum(np.multiply(state, entropies)))
            following = np.zeros(self.num_classes)
            for i in range(self.num_classes):
                following = np.add(following, np.multiply(state[i], shares[i]))
            state = following
        return math.fsum(rates) / self.length

    def draw(self, stream: Stream, count: int) -> Samples:
        """Draw ``length`` + 1 tokens; inputs are the first of them, targets the last."""
        tokens = np.empty((count, self.length + 1), dtype=np.int64)
        tokens[:, 0] = stream.below(self.num_classes, count)
        realised = np.zeros(count)
        for k in range(self.length):
            state = tokens[:, k]
            high = stream.raw(count) >> np.uint64(32)
            points = ((high * self.totals[state].astype(np.uint64)) >> np.uint64(32)).astype(np.int64)
            flat = np.searchsorted(self.cumulative, self.starts[state] + points, side="right")
            tokens[:, k + 1] = flat - state * self.num_classes
            realised = np.add(realised, self.losses[state, tokens[:, k + 1]])
        return Samples(
            inputs=np.ascontiguousarray(tokens[:, :-1]),
            targets=np.ascontiguousarray(tokens[:, 1:]),
            floor=np.full(count, self.floor),
            teacher_loss=np.divide(realised, self.length),
        )
