"""Feeding: whole batches, the same global batches in the same order for every strategy."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file

from samebits.errors import UserError
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


class Batches:
    """Micro-batches of a training, each a contiguous part of a global batch.

    An epoch's order is a permutation fixed by seed and epoch; samples beyond the last whole global batch are
    left out of that epoch. A global batch is cut into ``accum`` micro-batches and each of these into
    ``shards`` equal parts, of which this object feeds part ``shard``. Parts are contiguous, as
    ``DataParallel`` cuts them.

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
        accum: int,
        shard: int = 0,
        shards: int = 1,
        device: torch.device,
    ) -> None:
        assert global_batch_size % (accum * shards) == 0
        self._card, self._seed, self._device = card, seed, device
        self._global, self._micro = global_batch_size, global_batch_size // accum
        self.rows = self._micro // shards
        self._offset = shard * self.rows
        self._samples = data[0].shape[0]
        self.steps_per_epoch = self._samples // global_batch_size
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)
        self._inputs, self._targets = data
        self.resident = self._inputs.device == device
        self._order_device = device if self.resident else torch.device("cpu")
        self._staged: tuple[tuple[int, int], Batch] | None = None
        self._accum = accum
        self._copies: torch.cuda.Stream | None = None
        if device.type == "cuda" and not self.resident:
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def micro_batch(self, step: int, index: int) -> Batch:
        """Inputs and targets of micro-batch ``index`` of ``step``, on the device; steps count from 0."""
        if self.resident:
            rows = self._rows(step, index)
            return model_inputs(self._inputs.index_select(0, rows), self._card), self._targets.index_select(0, rows)
        here = (step, index)
        batch = self._staged[1] if self._staged and self._staged[0] == here else self._stage(step, index)
        if self._copies is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._copies)
            for tensor in batch:
                tensor.record_stream(current)  # its memory belongs to the other stream
        following = (step, index + 1) if index + 1 < self._accum else (step + 1, 0)
        self._staged = (following, self._stage(*following))
        return model_inputs(batch[0], self._card), batch[1]

    def _rows(self, step: int, index: int) -> Tensor:
        epoch, position = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            order = Stream(self._seed, "order", epoch).permutation(self._samples)
            self._epoch, self._order = epoch, torch.from_numpy(order).to(self._order_device)
        start = position * self._global + index * self._micro + self._offset
        return self._order[start : start + self.rows]

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
