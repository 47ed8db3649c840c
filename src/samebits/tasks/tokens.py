"""``tokens``: next-token prediction on a Markov source."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from samebits.section import Section
from samebits.tasks.interface import DataSection, TaskSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from samebits.portable.random import Stream
    from samebits.tasks.teacher import Samples, Teacher


class TokensKwargs(Section):
    """Vocabulary and sequence length of the ``tokens`` task."""

    vocab_size: int = Field(32, ge=2, le=256)
    """Tokens there are."""
    seq_len: int = Field(32, ge=2, le=1024)
    """Tokens of an input."""


class TokensData(DataSection):
    """Next-token prediction on a Markov source."""

    task: Literal["tokens"]
    """Which synthetic task."""
    kwargs: TokensKwargs = TokensKwargs()
    """Widths of the task."""


def _teacher(seed: int, kwargs: TokensKwargs) -> Teacher:
    """A Markov source over a small vocabulary; the floor is its entropy rate over the sequence."""
    import numpy as np

    from samebits.portable.random import Stream
    from samebits.tasks.teacher import Samples, Teacher

    size, length = kwargs.vocab_size, kwargs.seq_len
    exponents = Stream(seed, "tokens", "teacher").below(8, size * size)
    weights = np.left_shift(1, exponents).reshape(size, size)
    totals = weights.sum(axis=1)
    starts = np.cumsum(totals) - totals
    cumulative = np.cumsum(weights.ravel())
    logs = [Decimal(int(total)).ln() for total in totals]
    ln2 = Decimal(2).ln()
    # A transition's loss is ln(total / weight), and a weight is a power of two.
    losses = np.array(
        [[float(logs[i] - int(k) * ln2) for k in row] for i, row in enumerate(exponents.reshape(size, size))]
    )
    floor = _entropy_rate(np.divide(weights, totals[:, None]), losses, length)

    def draw(stream: Stream, count: int) -> Samples:
        """Draw ``length`` + 1 tokens; inputs are the first of them, targets the last."""
        tokens = np.empty((count, length + 1), dtype=np.int64)
        tokens[:, 0] = stream.below(size, count)
        realised = np.zeros(count)
        for k in range(length):
            state = tokens[:, k]
            high = stream.raw(count) >> np.uint64(32)
            points = ((high * totals[state].astype(np.uint64)) >> np.uint64(32)).astype(np.int64)
            flat = np.searchsorted(cumulative, starts[state] + points, side="right")
            tokens[:, k + 1] = flat - state * size
            realised = np.add(realised, losses[state, tokens[:, k + 1]])
        return Samples(
            inputs=np.ascontiguousarray(tokens[:, :-1]),
            targets=np.ascontiguousarray(tokens[:, 1:]),
            floor=np.full(count, floor),
            teacher_loss=np.divide(realised, length),
        )

    return Teacher(draw=draw, num_classes=size)


def _entropy_rate(shares: NDArray[np.float64], losses: NDArray[np.float64], length: int) -> float:
    """Mean over the positions of the expected loss there; the first token is uniform.

    Shapes: the shares of transitions and their losses (size, size).
    """
    import numpy as np

    entropies = [math.fsum(np.multiply(row, loss)) for row, loss in zip(shares, losses, strict=True)]
    state = np.full(len(shares), 1.0 / len(shares))
    rates = []
    for _ in range(length):
        rates.append(math.fsum(np.multiply(state, entropies)))
        following = np.zeros(len(shares))
        for i in range(len(shares)):
            following = np.add(following, np.multiply(state[i], shares[i]))
        state = following
    return math.fsum(rates) / length


TOKENS = TaskSpec(section=TokensData, teacher=_teacher)
