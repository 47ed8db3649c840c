"""Feeding: whole batches, the same global batches in the same order for every strategy."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors.torch import load_file

from samebits.errors import UserError
from samebits.numerics.batch import MicroBatch
from samebits.numerics.random import Stream

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from samebits.data.card import Card

_DEVICE_SHARE = 0.25  # of a GPU's free memory that data may take
Batch = tuple["Tensor", "Tensor"]


def load_split(folder: Path, card: Card, split: str) -> Batch:
    """Inputs and targets of ``train`` or ``test``, memory-mapped, in CPU memory.

    Raises:
        UserError: the file is missing or does not hold what the card says.
    """
    entry = card.train if split == "train" else card.test
    path = folder / entry.file
    hint = "run `python pipeline/prepare.py` again"
    if not path.exists():
        raise UserError(f"{path}: no such file", hint=hint)
    try:
        tensors = load_file(path)
        inputs, targets = tensors["inputs"], tensors["targets"]
    except (KeyError, OSError, ValueError) as error:
        raise UserError(f"{path}: not the data of its card: {error}", hint=hint) from None
    expected = ((entry.num_samples, *card.input_shape), (entry.num_samples, *card.target_shape))
    if (tuple(inputs.shape), tuple(targets.shape)) != expected:
        got = f"{tuple(inputs.shape)} and {tuple(targets.shape)}"
        raise UserError(f"{path}: shapes are {got}, the card says {expected[0]} and {expected[1]}", hint=hint)
    return inputs, targets


def model_inputs(stored: Tensor, card: Card) -> Tensor:
    """What a model is fed: 8-bit inputs become float32, exactly; others pass."""
    if stored.dtype is not torch.uint8:
        return stored
    return stored.to(torch.float32).sub_(card.input_offset).mul_(card.input_scale)


def on_device(data: Batch, device: torch.device) -> Batch:
    """Move a data set that fits to the device, once for all that feed from it; else leave it where it is."""
    if device.type != "cpu":
        free, _ = torch.cuda.mem_get_info(device)
        if sum(tensor.nbytes for tensor in data) > _DEVICE_SHARE * free:
            return data
    return data[0].to(device), data[1].to(device)


class Part(NamedTuple):
    """A contiguous part of a global batch, and the numbers of the logical shards that it consists of."""

    start: int
    stop: int
    shards: range = range(1)


def equal_parts(samples: int, *, accum: int = 1, rank: int = 0, ranks: int = 1) -> list[Part]:
    """Cut a global batch into ``accum`` micro-batches, and each of these equally over ranks; the parts of one rank."""
    assert samples % (accum * ranks) == 0
    micro, rows = samples // accum, samples // (accum * ranks)
    return [Part(index * micro + rank * rows, index * micro + (rank + 1) * rows) for index in range(accum)]


def shard_parts(samples: int, shards: int, *, accum: int = 1, rank: int = 0, ranks: int = 1) -> list[Part]:
    """Cut a global batch into logical shards, share these out over ranks, and cut a rank's into micro-batches.

    Shards stay whole: ranks may have one more than others, and a rank with fewer shards than ``accum`` makes as many
    micro-batches as it has shards.
    """
    assert samples % shards == 0
    assert ranks <= shards
    rows = samples // shards
    own = _split(range(shards), ranks)[rank]
    return [Part(part.start * rows, part.stop * rows, part) for part in _split(own, min(accum, len(own)))]


def rank_parts(samples: int, shards: int | None, *, accum: int, rank: int = 0, ranks: int = 1) -> list[Part]:
    """The parts of one rank: of whole logical shards where there are ``shards``, else equal ones."""
    if shards is None:
        return equal_parts(samples, accum=accum, rank=rank, ranks=ranks)
    return shard_parts(samples, shards, accum=accum, rank=rank, ranks=ranks)


def _split(whole: range, count: int) -> list[range]:
    """Contiguous parts; the first ones have one more if they cannot be equal."""
    size, more = divmod(len(whole), count)
    ends = [whole.start + i * size + min(i, more) for i in range(count + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(ends)]


class Batches:
    """Micro-batches of a training, each a contiguous part of a global batch.

    An epoch's order is a permutation fixed by seed and epoch; samples beyond the last whole global batch are
    left out of that epoch. ``layout`` holds the parts of each global batch that this object feeds, in order.

    Data that is on the device (see ``on_device``) stays there. Otherwise the next micro-batch is gathered into
    pinned memory and copied on a stream of its own while the device works on the one before.
    """

    def __init__(
        self,
        data: Batch,
        card: Card,
        *,
        seed: int,
        global_batch_size: int,
        layout: list[Part],
        device: torch.device,
    ) -> None:
        self._card, self._seed, self._device = card, seed, device
        self._global, self._layout = global_batch_size, layout
        self.parts = len(self._layout)
        self.rows = self._layout[0].stop - self._layout[0].start
        self._samples = data[0].shape[0]
        self.steps_per_epoch = self._samples // global_batch_size
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)
        self._inputs, self._targets = data
        self.resident = self._inputs.device == device
        self._order_device = device if self.resident else torch.device("cpu")
        self._staged: tuple[tuple[int, int], Batch] | None = None
        self._copies: torch.cuda.Stream | None = None
        if device.type == "cuda" and not self.resident:
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def micro_batch(self, step: int, index: int) -> MicroBatch:
        """Micro-batch ``index`` of ``step``, on the device; steps count from 0."""
        inputs, targets = self._gathered(step, index)
        return MicroBatch(model_inputs(inputs, self._card), targets, step, self._layout[index].shards)

    def _gathered(self, step: int, index: int) -> Batch:
        if self.resident:
            rows = self._rows(step, index)
            return self._inputs.index_select(0, rows), self._targets.index_select(0, rows)
        here = (step, index)
        batch = self._staged[1] if self._staged and self._staged[0] == here else self._stage(step, index)
        if self._copies is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._copies)
            for tensor in batch:
                tensor.record_stream(current)  # its memory belongs to the other stream
        following = (step, index + 1) if index + 1 < self.parts else (step + 1, 0)
        self._staged = (following, self._stage(*following))
        return batch

    def _rows(self, step: int, index: int) -> Tensor:
        epoch, position = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            order = Stream(self._seed, "order", epoch).permutation(self._samples)
            self._epoch, self._order = epoch, torch.from_numpy(order).to(self._order_device)
        start, part = position * self._global, self._layout[index]
        return self._order[start + part.start : start + part.stop]

    def _stage(self, step: int, index: int) -> Batch:
        """Gather into pinned memory and start the copy; the caching allocator keeps the block until it is done."""
        context = torch.cuda.stream(self._copies) if self._copies is not None else nullcontext()
        rows = self._rows(step, index)
        pin = self._device.type == "cuda"
        staged = []
        for tensor in (self._inputs, self._targets):
            host = torch.empty((len(rows), *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=pin)
            torch.index_select(tensor, 0, rows, out=host)
            with context:
                staged.append(host.to(self._device, non_blocking=True))
        return staged[0], staged[1]
