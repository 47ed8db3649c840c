"""Random numbers of each sample of a dataset: Python's, NumPy's and PyTorch's on the CPU."""

from __future__ import annotations

import hashlib
import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.random import mtrand
from torch.utils.data import get_worker_info

from samebits.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Key = tuple[int, int]
"""The numbers of an epoch and of a sample."""


class _Generator(NamedTuple):
    """A generator that is slow to seed."""

    seed: Callable[[int], None]
    number: Callable[[], float]

    def numbers(self) -> list[float]:
        """The next ones, of 159 bits."""
        return [self.number() for _ in range(3)]

    def follow(self, seed: int) -> list[float]:
        """Seed it. Returns the numbers that it gives next."""
        self.seed(seed)
        numbers = self.numbers()
        self.seed(seed)
        return numbers


_SLOW = (
    _Generator(random.seed, random.random),
    _Generator(lambda seed: np.random.seed(seed % 2**32), np.random.random),  # noqa: NPY002 - transforms use it
)


class SampleSeeds:
    """Makes samples with random numbers of their own: a function of ``prefix``, epoch and number of the sample.

    PyTorch's generator is seeded before each sample. Seeding Python's and NumPy's takes longer than many a sample, so
    they are seeded before each only where the dataset draws from them, which the first sample of a process mostly
    shows. Until then they are seeded once for several samples; if one of these draws, they are all made again. A
    dataset that puts a state back after it has drawn is not found out: its draws are then those of several samples.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._drawn: list[_Generator] = []
        self._begun = False

    def samples(self, make: Callable[[int], Any], keys: Sequence[Key]) -> list[Any]:
        """What ``make`` returns for the number of each sample. Raises UserError: ``make`` has raised it."""
        found = []
        seeds = [self._seed(key) for key in keys]  # at once: between samples, code is out of the processor's cache
        for part in (slice(None),) if self._begun else (slice(1), slice(1, None)):
            found += self._seeded(make, [number for _, number in keys[part]], seeds[part])
        self._begun = True
        return found

    def _seeded(self, make: Callable[[int], Any], numbers: Sequence[int], seeds: Sequence[int]) -> list[Any]:
        idle = {one: one.follow(seeds[0]) for one in _SLOW if one not in self._drawn} if seeds else {}
        seed_of_torch, drawn, made = torch.default_generator.manual_seed, tuple(self._drawn), []
        try:
            for number, seed in zip(numbers, seeds, strict=True):
                seed_of_torch(seed)
                for generator in drawn:
                    generator.seed(seed)
                made.append(make(number))
        except UserError:
            if not self._drew(idle) or len(seeds) == 1:
                raise
        else:
            if not self._drew(idle) or len(seeds) == 1:
                return made
        return self._seeded(make, numbers, seeds)

    def _seed(self, key: Key) -> int:
        text = f"{self._prefix} {key[0]} {key[1]}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())

    def _drew(self, idle: dict[_Generator, list[float]]) -> bool:
        """Whether samples have drawn from generators that were seeded once for all of them."""
        drawn = [generator for generator, numbers in idle.items() if generator.numbers() != numbers]
        self._drawn += drawn
        return bool(drawn)


_OWN = np.random.MT19937(0)


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Put these random numbers back after the block, unless this process does nothing but load samples."""
    if get_worker_info() is not None:
        yield
        return
    python, numpy, of_torch = random.getstate(), np.random.get_state(legacy=False), torch.default_generator.get_state()  # noqa: NPY002
    theirs = mtrand.get_bit_generator()
    mtrand.set_bit_generator(_OWN)  # quicker than a state that is set
    try:
        yield
    finally:
        random.setstate(python)
        mtrand.set_bit_generator(theirs)
        if numpy["has_gauss"]:
            np.random.set_state(numpy)  # noqa: NPY002
        torch.default_generator.set_state(of_torch)
