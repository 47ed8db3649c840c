"""Random numbers of a model's forward pass: functions of seed, step, shard and the draw's number within the pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from samebits.numerics.initialization import answer, bernoulli
from samebits.numerics.random import Stream

if TYPE_CHECKING:
    from torch import Tensor


class Draws:
    """The draws of one forward pass over some shards, whose samples lie behind each other on the first axis.

    They are made on the CPU, because a GPU's depend on its number of multiprocessors.
    """

    def __init__(self, seed: int, step: int, shards: list[int]) -> None:
        self._seed, self._step, self._shards = seed, step, shards
        self._count = 0

    def _streams(self) -> list[Stream]:
        self._count += 1
        return [Stream(self._seed, "forward draws", self._step, shard, self._count) for shard in self._shards]

    def _filled(self, tensor: Tensor, fill: Any) -> Tensor:
        streams = self._streams()
        parts = tensor.chunk(len(streams)) if len(streams) > 1 else (tensor,)
        for stream, part in zip(streams, parts, strict=True):
            fill(stream, part)
        return tensor

    def bernoulli(self, tensor: Tensor, p: float) -> Tensor:
        """Fill with ones, with probability ``p``, and zeros."""
        return self._filled(tensor, lambda stream, part: bernoulli(stream, part, p))

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Do what a random operation does, with these draws."""
        return answer(func, args, kwargs, self._filled)
