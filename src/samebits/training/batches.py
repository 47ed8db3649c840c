"""Batches: the same global batches in the same order for every strategy."""

from __future__ import annotations

import functools
import hashlib
from contextlib import nullcontext
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from samebits.errors import UserError
from samebits.files import regular
from samebits.here import stage_command
from samebits.numerics.interface import MicroBatch
from samebits.portable.random import Stream

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from samebits.batch_split import BatchSplit
    from samebits.models.nested import Nested
    from samebits.records.card import Card

_DRAWN_BYTES = 2**24
_DEVICE_SHARE = 0.25  # of a GPU's free memory, which a data set may take
Data = tuple["Tensor", "Tensor"]
"""Inputs and targets."""


class Pair(NamedTuple):
    """What a model gets, and what the loss compares its outputs with; whole samples have no targets."""

    inputs: Nested
    targets: Nested


def load_data(folder: Path, card: Card, split: Literal["train", "test"]) -> Data:
    """Inputs and targets of ``train`` or ``test``, memory-mapped, in CPU memory.

    The file is read once for its hash, at a gigabyte a second or more. The memory map then reads it from the cache.

    Raises:
        UserError: the file is missing, or its hash is not the one in the card.
    """
    entry = card.train if split == "train" else card.test
    path = folder / entry.file
    hint = f"run `{stage_command('prepare')}` again"
    try:
        with regular(path).open("rb") as stream:  # opened once, so that the hashed file is the mapped one
            if hashlib.file_digest(stream, "sha256").hexdigest() != entry.sha256:
                raise UserError(f"{path}: not the data of its card: another SHA-256", hint=hint)
            tensors = load_file(f"/proc/self/fd/{stream.fileno()}")
        inputs, targets = tensors["inputs"], tensors["targets"]
    except FileNotFoundError:
        raise UserError(f"{path}: no such file", hint=hint) from None
    except (KeyError, OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read: {error}", hint=hint) from None
    for name, tensor, shape, dtype in (
        ("inputs", inputs, card.input_shape, card.input_dtype),
        ("targets", targets, card.target_shape, card.target_dtype),
    ):
        expected = f"{dtype} {(entry.num_samples, *shape)}"
        got = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        if got != expected:
            raise UserError(f"{path}: {name} are {got}, the card says {expected}", hint=hint)
    if card.num_classes is not None and targets.numel() and not 0 <= targets.min() <= targets.max() < card.num_classes:
        raise UserError(f"{path}: targets are not classes from 0 to {card.num_classes - 1}", hint=hint)
    return inputs, targets


def model_inputs(stored: Tensor, card: Card) -> Tensor:
    """The inputs that a model gets: 8-bit inputs become float32 exactly, others stay as they are."""
    if stored.dtype is not torch.uint8:
        return stored
    return stored.to(torch.float32).sub_(card.input_offset).mul_(card.input_scale)


def on_device(data: Data, device: torch.device) -> Data:
    """Move a data set to the device if it fits there, once for all batches; else return it unchanged."""
    if device.type != "cpu":
        free, _ = torch.cuda.mem_get_info(device)
        if sum(tensor.nbytes for tensor in data) > _DEVICE_SHARE * free:
            return data
    return data[0].to(device), data[1].to(device)


def order_of(seed: int, epoch: int, samples: int) -> Tensor:
    """The order of the samples in an epoch, as their numbers, int64."""
    return torch.from_numpy(Stream(seed, "order", epoch).permutation(samples))


@functools.lru_cache(maxsize=1)  # the references of a training feed the same
def first_orders(seed: int, samples: int, epochs: int) -> Tensor:
    """The orders of the first epochs, as many as fit into 16 MiB: (epochs, samples)."""
    count = min(epochs, _DRAWN_BYTES // (8 * samples))
    orders = [order_of(seed, epoch, samples) for epoch in range(count)]
    return torch.stack(orders) if orders else torch.empty(0, samples, dtype=torch.int64)


class Feed(Protocol):
    """Micro-batches of one rank; steps count from 0."""

    micro_batches: int
    """How many make a step."""

    def ready(self, step: int) -> None:
        """Do what can be done before a step begins, while no clock runs."""

    def micro_batch(self, step: int, index: int) -> MicroBatch:
        """Micro-batch ``index`` of ``step``, on the device."""

    def digests(self, start: int, stop: int) -> Tensor | None:
        """This rank's part of the digests of these steps, which sum up over ranks; None if none are made."""


class Batches:
    """Micro-batches of one rank, each a contiguous part of a global batch.

    An epoch's order is a permutation fixed by seed and epoch. Samples beyond the last whole global batch are left out
    of that epoch. The orders of the first ``epochs`` are drawn in advance, as far as they take little room: drawn in
    the middle of a training, they would count in the time of a step, which may be shorter.

    Data on the device (see ``on_device``) stays there. Otherwise the next micro-batch is gathered into pinned memory
    and copied on a stream of its own while the device computes the current one.
    """

    def __init__(
        self,
        data: Data,
        card: Card,
        split: BatchSplit,
        *,
        rank: int,
        seed: int,
        device: torch.device,
        epochs: int = 1,
    ) -> None:
        self._card, self._split, self._seed, self._device = card, split, seed, device
        self._parts = split.micro_batches(rank)
        self.micro_batches = len(self._parts)
        self._inputs, self._targets = data
        self._samples = self._inputs.shape[0]
        self.steps_per_epoch = split.batches_of(self._samples)
        self.resident = self._inputs.device == device
        self._order_device = device if self.resident else torch.device("cpu")
        self._drawn = first_orders(seed, self._samples, epochs).to(self._order_device)
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)
        self._staged: tuple[tuple[int, int], Data] | None = None
        self._copies: torch.cuda.Stream | None = None
        if device.type == "cuda" and not self.resident:
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def ready(self, step: int) -> None:
        """Nothing: all samples are in memory."""

    def micro_batch(self, step: int, index: int) -> MicroBatch:
        """Micro-batch ``index`` of ``step``, on the device; steps count from 0."""
        inputs, targets = self._gathered(step, index)
        part = self._parts[index]
        return MicroBatch(model_inputs(inputs, self._card), targets, step, part.shards, part.start)

    def digests(self, start: int, stop: int) -> None:
        """None: the card has the hash of the whole split."""

    def _gathered(self, step: int, index: int) -> Data:
        if self.resident:
            rows = self._rows(step, index)
            return self._inputs.index_select(0, rows), self._targets.index_select(0, rows)
        here = (step, index)
        batch = self._staged[1] if self._staged and self._staged[0] == here else self._stage(step, index)
        if self._copies is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._copies)
            for tensor in batch:
                tensor.record_stream(current)  # its memory was allocated on the other stream
        following = (step, index + 1) if index + 1 < self.micro_batches else (step + 1, 0)
        self._staged = (following, self._stage(*following))
        return batch

    def _rows(self, step: int, index: int) -> Tensor:
        epoch, position = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            drawn = epoch < len(self._drawn)
            order = self._drawn[epoch] if drawn else order_of(self._seed, epoch, self._samples)
            self._epoch, self._order = epoch, order.to(self._order_device)
        start, part = position * self._split.samples, self._parts[index]
        return self._order[start + part.start : start + part.stop]

    def _stage(self, step: int, index: int) -> Data:
        """Gather into pinned memory and start the copy; the caching allocator keeps the block until the copy ends."""
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
