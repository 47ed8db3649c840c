"""How a global batch is divided among ranks, devices and micro-batches, in samples or in whole logical shards.

The split is decided here, before a training starts, and passed down.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple


class Rows(NamedTuple):
    """A contiguous part of a global batch, and the numbers of its logical shards."""

    start: int
    stop: int
    shards: range = range(1)


@dataclass(frozen=True, kw_only=True)
class BatchSplit:
    """The split of a global batch of ``samples`` samples.

    With ``shards``, as in the exact numerics, the batch consists of that many logical shards. They stay whole, so that
    some ranks may have one more than others. Without ``shards``, samples are divided equally. ``devices`` are those of
    one rank: ``dp`` has several, among which ``nn.DataParallel`` cuts each micro-batch.
    """

    samples: int
    shards: int | None
    grad_accum_steps: int
    ranks: int = 1
    devices: int = 1

    def over(self, *, ranks: int = 1, devices: int = 1) -> BatchSplit:
        """The same batch divided among so many ranks with so many devices each."""
        return replace(self, ranks=ranks, devices=devices)

    @property
    def units(self) -> int:
        """Number of units that devices share: shards, or else samples of one micro-batch."""
        return self.shards or self.samples // self.grad_accum_steps

    @property
    def unit(self) -> str:
        """The name of a unit in messages: shards or samples."""
        return "shards" if self.shards else "samples"

    @property
    def has_halves(self) -> bool:
        """Whether the units divide equally between two devices, so that half of the batch is a batch too."""
        return self.units % 2 == 0

    @property
    def rows_per_unit(self) -> int:
        """Samples of a unit."""
        return self.samples // self.shards if self.shards else 1

    @property
    def multiple(self) -> int:
        """Any multiple of this number of samples is a batch that can be divided as this one is."""
        return self.shards or self.grad_accum_steps * self.ranks * self.devices

    @property
    def even(self) -> bool:
        """Whether every rank gets a unit, and without shards all ranks get equally many."""
        return self.ranks <= self.units and (self.shards is not None or self.units % self.ranks == 0)

    @property
    def units_at_a_time(self) -> int:
        """Units of the largest micro-batch of a rank."""
        if self.shards is None:
            return self.units // self.ranks
        most = _ceil(self.shards, self.ranks)
        return _ceil(most, min(self.grad_accum_steps, most))

    @property
    def busy_devices(self) -> int:
        """Devices of a rank that get samples. ``Tensor.chunk`` may make fewer chunks than requested."""
        return _ceil(self.units_at_a_time, _ceil(self.units_at_a_time, self.devices))

    @property
    def rows_per_device(self) -> int:
        """The most samples that one device gets at a time."""
        return self.rows_per_unit * _ceil(self.units_at_a_time, self.devices)

    @property
    def rows_of_evaluation(self) -> int:
        """Samples that fit on any device of a training: a shard, or a micro-batch of a single device."""
        return max(1, self.rows_per_unit if self.shards else self.units)

    def rounded_down(self, samples: int) -> int:
        """The largest batch of at most so many samples that divides as this one does; at least the smallest such."""
        return max(1, samples // self.multiple) * self.multiple

    def batches_of(self, samples: int) -> int:
        """Whole global batches in so many samples."""
        return samples // self.samples

    def micro_batches(self, rank: int = 0) -> tuple[Rows, ...]:
        """The parts of each global batch that one rank processes, in order.

        A rank with fewer shards than gradient accumulation steps makes as many micro-batches as it has shards.
        """
        assert self.even, "the batch cannot be shared out like this"
        if self.shards is None:
            rows = self.units // self.ranks
            starts = [step * self.units + rank * rows for step in range(self.grad_accum_steps)]
            return tuple(Rows(start, start + rows) for start in starts)
        shards = _cut(range(self.shards), self.ranks)[rank]
        size = self.rows_per_unit
        parts = _cut(shards, min(self.grad_accum_steps, len(shards)))
        return tuple(Rows(part.start * size, part.stop * size, part) for part in parts)

    def share(self) -> BatchSplit:
        """The busiest device's part of this batch, as a batch for one device."""
        if self.shards is None:
            return replace(self, samples=self.rows_per_device * self.grad_accum_steps, ranks=1, devices=1)
        shards = sum(_ceil(len(part.shards), self.devices) for part in self.micro_batches())
        return replace(self, samples=self.rows_per_unit * shards, shards=shards, ranks=1, devices=1)


def leading(rows: int, shards: range, most: int) -> tuple[int, range]:
    """The number of leading rows of these shards, at most ``most``, and the shards that they belong to.

    Of several shards, only whole ones count, and at least one. ``rows`` is the number of rows of all ``shards``.
    """
    if len(shards) == 1:
        return min(rows, most), shards
    size = rows // len(shards)
    first = shards[: max(1, most // size)]
    return len(first) * size, first


def chunk(numbers: range, index: int, count: int) -> range:
    """The part of a range that ``torch.chunk`` gives for a tensor of its length."""
    size = _ceil(len(numbers), count)
    return numbers[index * size : (index + 1) * size]


def _ceil(count: int, parts: int) -> int:
    return -(-count // parts)


def _cut(whole: range, count: int) -> list[range]:
    """Contiguous parts. The first ones are longer by one if they cannot be equal."""
    size, more = divmod(len(whole), count)
    ends = [whole.start + i * size + min(i, more) for i in range(count + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(ends)]
