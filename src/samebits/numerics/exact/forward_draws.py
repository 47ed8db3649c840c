"""Random numbers of a forward pass, which are functions of seed, step, shard and the draw's number within the pass."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import torch

from samebits.numerics.exact.ambient import unguarded
from samebits.numerics.exact.compiled.library import compiled, threads
from samebits.numerics.initialization import bernoulli
from samebits.portable.random import Stream, derive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from samebits.numerics.exact.compiled.library import Kernels

_WORD = 64  # bits


class Draws:
    """Random numbers of one forward pass over some shards, whose samples follow each other on the first axis.

    Streams are made on the CPU, because a GPU's draws depend on its number of multiprocessors.
    """

    def __init__(
        self, seed: int, step: int, shards: Sequence[int], *, recorded: RecordedDraws | None = None, count: int = 0
    ) -> None:
        self._seed, self._step, self._shards = seed, step, shards
        self.recorded = recorded
        """Takes the keys of a pass that is recorded."""
        self.count = count
        """Number of draws so far."""

    def one_by_one(self) -> Iterator[None]:
        """Shard after shard, of which each draws by itself. Raises RuntimeError: not all of them draw equally often."""
        shards, before, counts = self._shards, self.count, set()
        try:
            for shard in shards:
                self._shards, self.count = [shard], before
                yield
                counts.add(self.count)
        finally:
            self._shards = shards
        if len(counts) > 1:
            raise RuntimeError("vmap: shards draw different numbers of random numbers")

    def fill(self, tensor: Tensor, fill: Callable[[Stream, Tensor], object]) -> Tensor:
        """Call ``fill`` on each shard's part of a tensor with the stream of this draw."""
        self.count += 1
        return self._fill(tensor, fill)

    def bernoulli(self, tensor: Tensor, p: float = 0.5) -> Tensor:
        """Fill a tensor with ones, with probability ``p``, and zeros."""
        self.count += 1
        return _fill_with_ones(tensor, self, p)

    def keys(self, tensor: Tensor) -> list[int] | None:
        """The key of each shard's stream of this draw; None if a tensor has no equal parts for them."""
        if len(self._shards) > 1 and (not tensor.dim() or tensor.shape[0] % len(self._shards)):
            return None
        return self.keys_of_shards()

    def keys_of_shards(self) -> list[int]:
        """The key of each shard's stream of this draw."""
        return [derive(self._seed, *self._purpose(shard)) for shard in self._shards]

    @property
    def purpose(self) -> tuple[tuple[int, ...], int]:
        """What tells this draw from the others of its step."""
        return tuple(self._shards), self.count

    def _fill(self, tensor: Tensor, fill: Callable[[Stream, Tensor], object]) -> Tensor:
        if self.recorded is not None:
            raise RuntimeError("forward draws random numbers on the host")
        parts = tensor.chunk(len(self._shards)) if len(self._shards) > 1 else (tensor,)
        with unguarded():  # NumPy's generators ask the system for entropy even if they are seeded
            for shard, part in zip(self._shards, parts, strict=True):
                fill(Stream(self._seed, *self._purpose(shard)), part)
        return tensor

    def _purpose(self, shard: int) -> tuple[str | int, ...]:
        return "forward draws", self._step, shard, self.count


class RecordedDraws:
    """The keys of the draws of recorded passes, in the device's memory, where each step writes its own."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._words: dict[tuple[tuple[int, ...], int], Tensor] = {}

    def words(self, draws: Draws, like: Tensor) -> Tensor:
        """The place of the words of a draw's keys."""
        place = self._words.get(draws.purpose)
        if place is None:
            place = torch.empty(2 * len(draws.purpose[0]), dtype=torch.int64, device=like.device)
            self._words[draws.purpose] = place
        return place

    def renew(self, step: int) -> None:
        """Write the keys of a step."""
        for (shards, count), place in self._words.items():
            keys = Draws(self._seed, step, shards, count=count).keys_of_shards()
            place.copy_(torch.from_numpy(np.array(_words_of(keys), dtype=np.uint64).view(np.int64)))


def _words_of(keys: Sequence[int]) -> list[int]:
    return [word for key in keys for word in (key % 2**_WORD, key >> _WORD)]


class _Keys(ctypes.Structure):
    """Shards, numbers of each, the probability of a one, and the two words of each shard's key, there or elsewhere."""

    MOST = 128
    _fields_ = (
        ("shards", ctypes.c_int64),
        ("each", ctypes.c_int64),
        ("p", ctypes.c_double),
        ("elsewhere", ctypes.c_void_p),
        ("keys", ctypes.c_uint64 * (2 * MOST)),
    )


def _filled_with_ones(library: Kernels, tensor: Tensor, draws: Draws, p: float) -> Tensor | None:
    keys = draws.keys(tensor) if library.takes(tensor) else None
    if keys is None or len(keys) > _Keys.MOST:
        return None
    given = _Keys(shards=len(keys), each=tensor.numel() // len(keys), p=p)
    if draws.recorded is None:
        given.keys[: 2 * len(keys)] = _words_of(keys)
    else:
        given.elsewhere = draws.recorded.words(draws, tensor).data_ptr()
    library.call("bernoulli", tensor, given, *([threads()] if library.is_host else []))
    return tensor


@compiled(_filled_with_ones)
def _fill_with_ones(tensor: Tensor, draws: Draws, p: float) -> Tensor:
    return draws._fill(tensor, lambda stream, part: bernoulli(stream, part, p))
