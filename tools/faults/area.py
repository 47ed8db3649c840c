"""An area is one kind of fault: a numbered list of cases. The same seed and number give the same case."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Missed(Exception):  # noqa: N818 - no error
    """Every promise held, but the fault came too late: its target had already ended."""


@dataclass(frozen=True)
class Case:
    """One case: a description, and a function that tries it and raises ``Broken`` if a promise was not kept.

    It counts as ``faults`` of the area's unit, or as none if the function raises ``Missed``.
    """

    what: str
    run: Callable[[], None]
    faults: int = 1


class Area(ABC):
    """Cases of one kind. ``folder`` is empty and the area's own. ``total`` is None if there is no last case."""

    NAME: ClassVar[str]
    UNIT: ClassVar[str]
    WEIGHT: ClassVar[float] = 1.0  # share of a campaign's time
    IN_AN_HOUR: ClassVar[int]  # least number of faults in a campaign of an hour
    total: int | None = None

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self._seed = folder, seed

    @abstractmethod
    def case(self, number: int) -> Case:
        """The case with this number, from 0."""

    def final(self) -> Iterator[Case]:
        """Cases that are tried once, after all others."""
        yield from ()

    def figures(self) -> dict[str, Any]:
        """Measured figures by name, besides the counts."""
        return {}

    def random(self, number: int) -> random.Random:
        """Random generator of one case."""
        return random.Random(f"{self._seed} {self.NAME} {number}")  # noqa: S311 - no secret

    def order(self) -> Iterator[int]:
        """Case numbers in a random order, so that a short campaign meets every kind early."""
        number = 0
        if self.total is not None:
            numbers = list(range(self.total))
            random.Random(f"{self._seed} {self.NAME}").shuffle(numbers)  # noqa: S311
            yield from numbers
            return
        while True:
            yield number
            number += 1
