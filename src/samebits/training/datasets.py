"""Datasets of the user's own in batches, by PyTorch's DataLoader."""

from __future__ import annotations

import signal
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from samebits.errors import UserError
from samebits.models.nested import Nested, mapped
from samebits.numerics.interface import MicroBatch
from samebits.training.batches import Data, Pair, order_of
from samebits.training.samples import Batch, Samples, apart

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from samebits.batch_split import BatchSplit, Rows
    from samebits.params.schema import Loader
    from samebits.records.card import Card
    from samebits.training.sample_seeds import Key

AnyData = Data | Samples
"""Arrays in memory, or samples that are made when they are needed."""

TARGETS = {"cross_entropy": torch.int64, "mse": torch.float32}
"""Types that the built-in losses take; a dataset may give other integers and floats."""


def described(card: Card, samples: Samples) -> Card:
    """The card with what the first sample shows: the loss that fits its targets, and their shape.

    Integer targets are classes, others are values to predict; of targets that are nested the loss is the user's own.
    """
    _, targets = apart(samples.batch([(0, 0)]).samples)
    if not isinstance(targets, Tensor):
        return card
    classes = not targets.is_floating_point()
    shape = tuple(targets.shape[1:])
    return card.model_copy(update={"loss": "cross_entropy" if classes else "mse", "target_shape": shape})


class _Problem(NamedTuple):
    """An error of a loading process, which PyTorch would raise as another one."""

    message: str
    hint: str


class _Rows(Dataset[Any]):
    """The samples as a DataLoader asks for them, a batch at a time."""

    def __init__(self, samples: Samples, *, digests: bool) -> None:
        self._samples, self._digests = samples, digests

    def __getitem__(self, keys: Sequence[Key]) -> Batch | _Problem:
        try:
            return self._samples.batch(keys, digests=self._digests)
        except UserError as error:
            return _Problem(error.message, error.hint)


def _as_it_is(batch: Any) -> Any:
    return batch


def _begin(_: int) -> None:
    """End a loading process by the signals that its rank blocks or has handlers for; Ctrl-C is the rank's."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def loaded(
    samples: Samples, order: Iterator[list[Key]], loader: Loader, device: torch.device, *, digests: bool = False
) -> Iterator[Batch]:
    """Batches of these samples on the device, loaded by processes of their own while it computes.

    Raises UserError: see ``Samples.batch``.
    """
    pinned = device.type == "cuda"
    several: dict[str, Any] = {"prefetch_factor": loader.prefetch_factor, "multiprocessing_context": "fork"}
    with warnings.catch_warnings(action="ignore"):  # of more processes than cores, at each start
        batches = iter(
            DataLoader(
                _Rows(samples, digests=digests),
                batch_size=None,
                sampler=order,
                collate_fn=_as_it_is,
                num_workers=loader.num_workers,
                worker_init_fn=_begin,
                pin_memory=pinned,
                generator=torch.Generator(),  # else it would draw from the training's
                **(several if loader.num_workers else {}),
            )
        )
    while (batch := next(batches, None)) is not None:
        if isinstance(batch, _Problem):
            del batches  # else its processes would live as long as the traceback
            raise UserError(batch.message, hint=batch.hint)
        found = mapped(lambda tensor: tensor.to(device, non_blocking=pinned), batch.samples)
        yield Batch(found, batch.digests)


class LoadedBatches:
    """Micro-batches of one rank out of a dataset: the samples, and the order, that ``Batches`` would give.

    With ``groups``, as in ``exact``, those of a step stay until the next one begins, since a step may be made again,
    and each step has so many digests: see ``records.batches``.
    """

    def __init__(
        self,
        samples: Samples,
        split: BatchSplit,
        loader: Loader,
        *,
        rank: int,
        seed: int,
        device: torch.device,
        groups: int = 0,
    ) -> None:
        self._samples, self._split, self._loader = samples, split, loader
        self._seed, self._device, self._groups = seed, device, groups
        self._parts = split.micro_batches(rank)
        self.micro_batches = len(self._parts)
        self.steps_per_epoch = split.batches_of(len(samples))
        self._next = -1, 0
        self._batches: Iterator[Batch] = iter(())
        self._digests: dict[tuple[int, int], Tensor] = {}
        self._held: dict[tuple[int, int], Nested] = {}

    def ready(self, step: int) -> None:
        """Load the first micro-batch of a step, so that the step does not wait for processes to start."""
        self._batch(step, 0)

    def micro_batch(self, step: int, index: int) -> MicroBatch:
        """Micro-batch ``index`` of ``step``, on the device; steps count from 0."""
        part = self._parts[index]
        inputs, targets = apart(self._batch(step, index))
        return MicroBatch(inputs, targets, step, part.shards, part.start)

    def digests(self, start: int, stop: int) -> Tensor | None:
        """This rank's part of the digests of steps that it has loaded, (steps, groups); None without ``groups``."""
        if not self._groups:
            return None
        steps = [[self._digests[step, i] for i in range(self.micro_batches)] for step in range(start, stop)]
        return torch.stack([torch.stack(parts).sum(0) for parts in steps])

    def _batch(self, step: int, index: int) -> Nested:
        if any(held != step for held, _ in self._held):
            self._held.clear()
        while (step, index) not in self._held:
            if self._next not in ((step, i) for i in range(index + 1)):
                order = _from(step, self._seed, self._split, self._parts, len(self._samples))
                self._batches = loaded(self._samples, order, self._loader, self._device, digests=self._groups > 0)
                self._next = step, 0
            if not self._groups:
                self._held.clear()
            batch = next(self._batches)
            self._held[self._next] = batch.samples
            if self._groups:
                self._digests[self._next] = self._in_groups(batch.digests, self._parts[self._next[1]].start)
            number = self._next[1] + 1
            self._next = (step, number) if number < self.micro_batches else (step + 1, 0)
        return self._held[step, index]

    def _in_groups(self, digests: Tensor, start: int) -> Tensor:
        """The sums of the samples' digests in each group of the batch; ``start`` is the first one's place in it."""
        places = torch.arange(start, start + len(digests)) * self._groups // self._split.samples
        return torch.zeros(self._groups, dtype=torch.int64).index_add_(0, places, digests)


def _from(step: int, seed: int, split: BatchSplit, parts: Sequence[Rows], count: int) -> Iterator[list[Key]]:
    """The samples of each micro-batch from a step on, without an end.

    It holds no ``LoadedBatches``, whose processes end with the last reference.
    """
    epoch, order = -1, torch.empty(0, dtype=torch.int64)
    while True:
        now, position = divmod(step, split.batches_of(count))
        if now != epoch:
            epoch, order = now, order_of(seed, now, count)
        start = position * split.samples
        for part in parts:
            yield [(epoch, number) for number in order[start + part.start : start + part.stop].tolist()]
        step += 1


def in_order(samples: Samples, rows: int, loader: Loader, device: torch.device) -> Iterator[Pair]:
    """All samples once, ``rows`` at a time; the last batch may be short."""
    order = ([(0, i) for i in range(start, min(start + rows, len(samples)))] for start in range(0, len(samples), rows))
    return (apart(batch.samples) for batch in loaded(samples, order, loader, device))
