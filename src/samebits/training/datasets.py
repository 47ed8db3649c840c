"""Datasets of the user's own: their samples, the random numbers of each, and batches by PyTorch's DataLoader."""

from __future__ import annotations

import hashlib
import random
import signal
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from samebits.errors import UserError, first_line, place_of
from samebits.models.nested import Nested, leaves_of, mapped, refilled
from samebits.numerics.interface import MicroBatch
from samebits.training.batches import Data, Pair, order_of
from samebits.training.sample_draws import portable_draws

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from samebits.batch_split import BatchSplit, Rows
    from samebits.params.schema import Loader
    from samebits.records.card import Card

Key = tuple[int, int]
"""The numbers of an epoch and of a sample."""


class Samples:
    """``count`` samples of a map-style dataset; ``name`` is that of the experiment's field.

    Each sample is made with random numbers of its own, those of Python, NumPy and PyTorch: a function of seed, epoch
    and number of the sample, whatever loads it. More samples than the dataset has repeat it. ``targets`` is the type of
    the second of two, None for what the dataset gives.

    Raises:
        UserError: the dataset has no samples by number, or has none at all.
    """

    def __init__(self, name: str, dataset: Any, count: int, seed: int, targets: torch.dtype | None = None) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            hint = "give a dataset with __len__ and __getitem__, or write the samples to files: data.task: file"
            raise UserError(f"{name}: {type(dataset).__name__} has no samples by number", hint=hint)
        self.name, self._dataset, self._count, self._seed, self._targets = name, dataset, count, seed, targets
        self.has = _length(name, dataset)

    def __len__(self) -> int:
        """The number of samples that are used."""
        return self._count

    def up_to(self, at_least: int) -> Samples:
        """These samples, repeated up to so many."""
        return Samples(self.name, self._dataset, max(at_least, self._count), self._seed, self._targets)

    def with_targets(self, kind: torch.dtype) -> Samples:
        """These samples with targets of another type."""
        return Samples(self.name, self._dataset, self._count, self._seed, kind)

    def several(self, keys: Iterable[Key]) -> list[Nested]:
        """Samples as tensors.

        Raises:
            UserError: the dataset raised an error, or gives what is no tensor, array or number.
        """
        with _random_states_kept(), portable_draws():
            return [self._made(*key) for key in keys]

    def _made(self, epoch: int, number: int) -> Nested:
        where = f"{self.name}: sample {number}"
        _seed(f"{self._seed} {self.name} {epoch} {number}")
        try:
            found = self._dataset[number % self.has]
        except Exception as error:
            what = f"{where}: {type(error).__name__}: {first_line(str(error))}"
            raise UserError(what, hint=f"see {place_of(error) or 'the dataset'}") from error
        for leaf, value in leaves_of(found):
            if not isinstance(value, Tensor | np.ndarray | np.generic | bool | int | float):
                field = f", its part {leaf}" if leaf else ""
                what = f"{where}{field}: it is {type(value).__name__}, expected a tensor, an array or a number"
                raise UserError(what, hint="convert it in the dataset, or leave it out of the sample")
        sample = mapped(torch.as_tensor, found)
        if self._targets is None:
            return sample
        inputs, targets = apart(sample)
        if not isinstance(targets, Tensor) or targets.is_floating_point() != self._targets.is_floating_point:
            return sample  # unlike the first one, which a batch of both says
        return inputs, targets.to(self._targets)


AnyData = Data | Samples
"""Arrays in memory, or samples that are made when they are needed."""


def _length(name: str, dataset: Any) -> int:
    try:
        count = len(dataset)
    except TypeError:
        count = 0
    if not count:
        raise UserError(f"{name}: it has no samples", hint="give it a length, by __len__")
    return count


def _seed(what: str) -> None:
    """Seed the random numbers of Python, NumPy and PyTorch on the CPU."""
    seed = int.from_bytes(hashlib.blake2b(what.encode(), digest_size=8).digest())
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the generator that transforms use
    torch.default_generator.manual_seed(seed)


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """Put these random numbers back after the block, unless this process does nothing but load samples."""
    if get_worker_info() is not None:
        yield
        return
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.default_generator.set_state(states[2])


def apart(sample: Nested) -> Pair:
    """A plain tuple or list of two is inputs and targets; any other sample is given whole."""
    if type(sample) in (tuple, list) and len(sample) == 2:
        return Pair(*sample)
    return Pair(sample, None)


TARGETS = {"cross_entropy": torch.int64, "mse": torch.float32}
"""Types that the built-in losses take; a dataset may give other integers and floats."""


def described(card: Card, samples: Samples) -> Card:
    """The card with what the first sample shows: the loss that fits its targets, and their shape.

    Integer targets are classes, others are values to predict; of targets that are nested the loss is the user's own.
    """
    _, targets = apart(*samples.several([(0, 0)]))
    if not isinstance(targets, Tensor):
        return card
    classes = not targets.is_floating_point()
    shape = tuple(targets.shape)
    return card.model_copy(update={"loss": "cross_entropy" if classes else "mse", "target_shape": shape})


def collate(name: str, keys: Sequence[Key], samples: Sequence[Nested]) -> Nested:
    """Samples as one, with a first axis that counts them. Raises UserError: they are not of one form."""
    first = [*leaves_of(samples[0])]
    columns: list[list[Tensor]] = [[] for _ in first]
    for key, sample in zip(keys, samples, strict=True):
        leaves = [*leaves_of(sample)]
        for column, (leaf, value), (expected, other) in zip(columns, leaves, first, strict=False):
            if leaf != expected or value.shape != other.shape or value.dtype != other.dtype:
                break
            column.append(value)
        else:
            if len(leaves) == len(first):
                continue
        forms = [", ".join(f"{leaf or 'it'}: {_form(value)}" for leaf, value in found) for found in (leaves, first)]
        what = f"{name}: sample {key[1]} has {forms[0]}, and sample {keys[0][1]} has {forms[1]}"
        raise UserError(what, hint="pad, crop or convert them in the dataset: a batch has one shape")
    return refilled(samples[0], map(torch.stack, columns))


def _form(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def digest(sample: Nested) -> int:
    """32 bits that two samples share if their names, types, shapes and bytes are the same."""
    found = hashlib.blake2b(digest_size=4)
    for leaf, value in leaves_of(sample):
        found.update(f"{leaf} {_form(value)} ".encode())
        found.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return int.from_bytes(found.digest(), "little")


class _Batch(NamedTuple):
    """Samples as one, and the digest of each, int64; none without ``digests``."""

    samples: Nested
    digests: Tensor


class _Problem(NamedTuple):
    """An error of a loading process, which PyTorch would raise as another one."""

    message: str
    hint: str


class _Rows(Dataset[Any]):
    """The samples as a DataLoader asks for them, a batch at a time."""

    def __init__(self, samples: Samples, *, digests: bool) -> None:
        self._samples, self._digests = samples, digests

    def __getitem__(self, keys: Sequence[Key]) -> _Batch | _Problem:
        try:
            found = self._samples.several(keys)
            digests = torch.tensor([digest(one) for one in found] if self._digests else (), dtype=torch.int64)
            return _Batch(collate(self._samples.name, keys, found), digests)
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
) -> Iterator[_Batch]:
    """Batches of these samples on the device, loaded by processes of their own while it computes.

    Raises UserError: see ``Samples.several`` and ``collate``.
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
        yield _Batch(found, batch.digests)


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
        self._batches: Iterator[_Batch] = iter(())
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
