"""How a global batch is shared out: over ranks, devices and micro-batches, in samples or in whole logical shards.

All of that is decided here, before a training starts, and handed down.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple


class Rows(NamedTuple):
    """A contiguous part of a global batch, and the numbers of the logical shards that it consists of."""

    start: int
    stop: int
    shards: range = range(1)


@dataclass(frozen=True, kw_only=True)
class BatchSplit:
    """The split of a global batch of so many ``samples``.

    With ``shards``, as in the exact numerics, it consists of that many logical shards, which stay whole, so that ranks
    may have one more than others; without, samples are shared out equally. ``devices`` are those of one rank: several
    under ``dp``, among which ``nn.DataParallel`` cuts each micro-batch.
    """

    samples: int
    shards: int | None
    grad_accum_steps: int
    ranks: int = 1
    devices: int = 1

    def over(self, *, ranks: int = 1, devices: int = 1) -> BatchSplit:
        """The same batch, shared out over so many ranks with so many devices each."""
        return replace(self, ranks=ranks, devices=devices)

    @property
    def units(self) -> int:
        """What devices share among them: shards, or else the samples of one micro-batch."""
        return self.shards or self.samples // self.grad_accum_steps

    @property
    def unit(self) -> str:
        """What ``units`` counts."""
        return "shards" if self.shards else "samples"

    @property
    def has_halves(self) -> bool:
        """Whether two devices would have as much to do as each other, so that half of the batch is a batch, too."""
        return self.units % 2 == 0

    @property
    def rows_per_unit(self) -> int:
        """Samples of a unit."""
        return self.samples // self.shards if self.shards else 1

    @property
    def multiple(self) -> int:
        """Batches of multiples of so many samples are shared out as this one is."""
        return self.shards or self.grad_accum_steps * self.ranks * self.devices

    @property
    def even(self) -> bool:
        """Whether every rank gets some, and as much as the others where samples are shared out."""
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
        """Devices of a rank that get samples: ``Tensor.chunk`` may make fewer parts than were asked for."""
        return _ceil(self.units_at_a_time, _ceil(self.units_at_a_time, self.devices))

    @property
    def rows_per_device(self) -> int:
        """Samples that one device gets at most at a time."""
        return self.rows_per_unit * _ceil(self.units_at_a_time, self.devices)

    @property
    def rows_of_evaluation(self) -> int:
        """Samples that any device of a training has room for: a shard, or a micro-batch of a single device."""
        return max(1, self.rows_per_unit if self.shards else self.units)

    def rounded_down(self, samples: int) -> int:
        """The largest batch of at most so many samples that is shared out as this one is, but at least the smallest."""
        return max(1, samples // self.multiple) * self.multiple

    def batches_of(self, samples: int) -> int:
        """Whole global batches in so many samples."""
        return samples // self.samples

    def micro_batches(self, rank: int = 0) -> tuple[Rows, ...]:
        """The parts of each global batch that one rank feeds, in order.

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
        """What the busiest device does of this batch, as a batch of its own on one device."""
        if self.shards is None:
            return replace(self, samples=self.rows_per_device * self.grad_accum_steps, ranks=1, devices=1)
        shards = sum(_ceil(len(part.shards), self.devices) for part in self.micro_batches())
        return replace(self, samples=self.rows_per_unit * shards, shards=shards, ranks=1, devices=1)


def divides(parts: int, samples: int) -> bool:
    """Whether so many samples can be shared out over equal parts."""
    return samples % parts == 0


def leading(rows: int, shards: range, most: int) -> tuple[int, range]:
    """How many of the ``rows`` of these shards come first without being more than ``most``, and which shards they are.

    Several shards stay whole, and there is at least one.
    """
    if len(shards) == 1:
        return min(rows, most), shards
    size = rows // len(shards)
    first = shards[: max(1, most // size)]
    return len(first) * size, first


def chunk(numbers: range, index: int, count: int) -> range:
    """The part of a range that ``torch.chunk`` would give of a tensor of its length."""
    size = _ceil(len(numbers), count)
    return numbers[index * size : (index + 1) * size]


def _ceil(count: int, parts: int) -> int:
    return -(-count // parts)


def _cut(whole: range, count: int) -> list[range]:
    """Contiguous parts; the first ones have one more if they cannot be equal."""
    size, more = divmod(len(whole), count)
    ends = [whole.start + i * size + min(i, more) for i in range(count + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(ends)]
