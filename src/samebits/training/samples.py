"""Samples of a dataset of the user's own, and several of them as one batch."""

from __future__ import annotations

import hashlib
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from samebits.errors import UserError, first_line, place_of
from samebits.models.nested import Nested, form_of, leaves_of, refilled
from samebits.training.batches import Pair
from samebits.training.sample_draws import portable_draws
from samebits.training.sample_seeds import Key, SampleSeeds, random_states_kept

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_TAKEN = Tensor | np.ndarray | np.generic | bool | int | float
_NUMBERS: tuple[set[type], ...] = ({bool}, {int}, {float})
_DTYPE, _SHAPE = attrgetter("dtype"), attrgetter("shape")


class Batch(NamedTuple):
    """Samples as one, with a first axis that counts them, and the digest of each, int64, if they are asked for."""

    samples: Nested
    digests: Tensor


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
        self._seeds = SampleSeeds(f"{seed} {name}")
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

    def batch(self, keys: Sequence[Key], *, digests: bool = False) -> Batch:
        """Samples as one.

        Raises:
            UserError: the dataset raised an error, or gives what is no tensor, array or number, or samples of several
                forms.
        """
        with random_states_kept(), portable_draws():
            made = self._seeds.samples(self._made, keys)
        if (joined := _joined(made, self._targets)) is None:
            raise self._refusal(keys, made)
        names = (leaf for leaf, _ in leaves_of(made[0]))
        found = _digests(names, joined) if digests else torch.empty(0, dtype=torch.int64)
        return Batch(refilled(made[0], joined), found)

    def _made(self, number: int) -> Nested:
        try:
            return self._dataset[number % self.has]
        except Exception as error:
            what = f"{self.name}: sample {number}: {type(error).__name__}: {first_line(str(error))}"
            raise UserError(what, hint=f"see {place_of(error) or 'the dataset'}") from error

    def _refusal(self, keys: Sequence[Key], made: Sequence[Nested]) -> UserError:
        """What is wrong with samples that are no batch."""
        forms: list[list[str]] = []
        for (_, number), sample in zip(keys, made, strict=True):
            forms.append([])
            for leaf, value in leaves_of(sample):
                where = f"{self.name}: sample {number}" + (f", its part {leaf}" if leaf else "")
                if not isinstance(value, _TAKEN):
                    what = f"{where}: it is {type(value).__name__}, expected a tensor, an array or a number"
                    return UserError(what, hint="convert it in the dataset, or leave it out of the sample")
                try:
                    tensor = torch.as_tensor(value)
                except (TypeError, ValueError) as error:
                    return UserError(f"{where}: {first_line(str(error))}", hint="convert it in the dataset")
                is_target = value is apart(sample).targets
                forms[-1].append(f"{leaf or 'it'}: {_form(_of_type(tensor, self._targets if is_target else None))}")
            if not forms[-1]:
                what = f"{self.name}: sample {number}: it is empty, expected a tensor, an array or a number"
                return UserError(what, hint="check the dataset")
        other = next(index for index, form in enumerate(forms) if form != forms[0])
        has = [f"sample {keys[index][1]} has {', '.join(forms[index])}" for index in (other, 0)]
        hint = "pad, crop or convert them in the dataset: a batch has one shape"
        return UserError(f"{self.name}: {', and '.join(has)}", hint=hint)


def _length(name: str, dataset: Any) -> int:
    try:
        count = len(dataset)
    except TypeError:
        count = 0
    if not count:
        raise UserError(f"{name}: it has no samples", hint="give it a length, by __len__")
    return count


def apart(sample: Nested) -> Pair:
    """A plain tuple or list of two is inputs and targets; any other sample is given whole."""
    if type(sample) in (tuple, list) and len(sample) == 2:
        return Pair(*sample)
    return Pair(sample, None)


def _joined(samples: Sequence[Nested], targets: torch.dtype | None) -> list[Tensor] | None:
    """Each leaf of all samples as one tensor; None if there is no such tensor of one of them."""
    forms, leaves = zip(*map(form_of, samples), strict=True)
    if forms.count(forms[0]) < len(forms) and len({tuple(leaf for leaf, _ in leaves_of(one)) for one in samples}) > 1:
        return None
    if not leaves[0]:
        return None
    last = len(leaves[0]) - 1 if isinstance(apart(samples[0]).targets, _TAKEN) else None
    joined = []
    for index, column in enumerate(zip(*leaves, strict=True)):
        if (tensor := _column(column, targets if index == last else None)) is None:
            return None
        joined.append(tensor)
    return joined


def _column(values: Sequence[Any], kind: torch.dtype | None) -> Tensor | None:
    """Values as one tensor, of this type if it fits; None if some are no tensors, or of several types or shapes."""
    if not all(isinstance(value, _TAKEN) for value in values):
        return None
    try:
        if {*map(type, values)} in _NUMBERS:
            return _of_type(torch.tensor(values), kind)
        tensors = [_of_type(torch.as_tensor(value), kind) for value in values]
    except (TypeError, ValueError):
        return None
    alike = len({*map(_DTYPE, tensors)}) == len({*map(_SHAPE, tensors)}) == 1
    return torch.stack(tensors) if alike else None


def _of_type(tensor: Tensor, kind: torch.dtype | None) -> Tensor:
    """The tensor with another type, unless one is of integers and the other of floats."""
    if kind is None or tensor.is_floating_point() != kind.is_floating_point:
        return tensor
    return tensor.to(kind)


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _digests(names: Iterable[str], columns: Sequence[Tensor]) -> Tensor:
    """32 bits of each sample that two share if their names, types, shapes and bytes are the same."""
    texts, bytes_of = [], []
    for name, column in zip(names, columns, strict=True):
        texts.append(f"{name} {_form(column[0])} ".encode())
        bytes_of.append(column.reshape(len(column), column[0].numel()).view(torch.uint8).numpy())
    found = []
    for index in range(len(columns[0])):
        of_sample = hashlib.blake2b(digest_size=4)
        for text, of_column in zip(texts, bytes_of, strict=True):
            of_sample.update(text)
            of_sample.update(of_column[index].data)
        found.append(int.from_bytes(of_sample.digest(), "little"))
    return torch.tensor(found, dtype=torch.int64)
