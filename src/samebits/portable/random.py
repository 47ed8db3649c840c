"""Random numbers that are the same on every host: Philox counters, then arithmetic that cannot differ.

NumPy guarantees the raw output of its bit generators, but not that of ``Generator``'s distributions (NEP 19).
PyTorch's draws change with the instruction set and the chip. Only raw integers are used here.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from samebits.portable import elementary

if TYPE_CHECKING:
    from numpy.typing import NDArray


MOST = 2**31
"""Size of the largest range that integers are drawn from."""


def derive(seed: int, *purpose: str | int) -> int:
    """A 128-bit key for one purpose under one seed; different purposes give independent streams."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big")


class Stream:
    """A sequence of draws, determined by ``seed`` and ``purpose``."""

    period: int | None = None
    """Number of draws after which those of a tensor repeat; None if they never do."""

    def __init__(self, seed: int, *purpose: str | int) -> None:
        self._bits = np.random.Philox(key=derive(seed, *purpose))

    def raw(self, count: int) -> NDArray[np.uint64]:
        """``count`` words of 64 random bits."""
        return np.asarray(self._bits.random_raw(count), dtype=np.uint64)

    def octets(self, count: int) -> NDArray[np.uint8]:
        """``count`` random bytes; their order within a word does not depend on the host's endianness."""
        words = self.raw(-(-count // 8)).astype("<u8", copy=False)
        return words.view(np.uint8)[:count]

    def below(self, bound: int, count: int) -> NDArray[np.int64]:
        """``count`` integers from 0 to ``bound`` - 1, by multiply and shift; ``bound`` is at most ``MOST``."""
        assert bound <= MOST
        high = self.raw(count) >> np.uint64(32)
        return ((high * np.uint64(bound)) >> np.uint64(32)).astype(np.int64)

    def uniform(self, count: int) -> NDArray[np.float64]:
        """``count`` multiples of 2**-53, uniform in [0, 1)."""
        return np.multiply((self.raw(count) >> np.uint64(11)).astype(np.float64), 2.0**-53)

    def normal(self, count: int) -> NDArray[np.float64]:
        """``count`` standard normal numbers, by inverting the distribution function at the middle of 2**-52 cells."""
        cells = (self.raw(count) >> np.uint64(12)).astype(np.float64)
        return elementary.normal_quantile(np.multiply(np.add(cells, 0.5), 2.0**-52))

    def permutation(self, count: int) -> NDArray[np.int64]:
        """0 to ``count`` - 1 in random order."""
        return np.argsort(self.raw(count), kind="stable").astype(np.int64, copy=False)


class RepeatedStream(Stream):
    """A few draws repeated: as quick as a copy, for checks of what a model does, whatever its weights."""

    period = 65537  # a prime, so that no two rows of a matrix are the same

    def __init__(self, seed: int, *purpose: str | int) -> None:
        super().__init__(seed, *purpose)
        self._uniform, self._normal = super().uniform(self.period), super().normal(self.period)

    def uniform(self, count: int) -> NDArray[np.float64]:
        """See ``Stream``; ``count`` is at most ``period``."""
        return self._uniform[:count]

    def normal(self, count: int) -> NDArray[np.float64]:
        """See ``Stream``; ``count`` is at most ``period``."""
        return self._normal[:count]
