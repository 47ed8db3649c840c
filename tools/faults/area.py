"""A kind of fault, as a numbered list of cases: the same seed and number give the same case."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Missed(Exception):  # noqa: N818 - no error
    """All held, and nobody was harmed: what the fault was meant for had ended before it."""


@dataclass(frozen=True)
class Case:
    """One fault: what is done, and a function that does it, which raises ``Broken`` if a promise was not kept.

    ``faults`` is how many of the area's unit it is; none if the function raises ``Missed``.
    """

    what: str
    run: Callable[[], None]
    faults: int = 1


class Area(ABC):
    """Cases of one kind. ``folder`` is empty and the area's own; ``total`` is None where cases never end."""

    NAME: ClassVar[str]
    UNIT: ClassVar[str]
    WEIGHT: ClassVar[float] = 1.0  # its share of a campaign's time
    IN_AN_HOUR: ClassVar[int]  # faults that a campaign of an hour tries at least
    total: int | None = None

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self._seed = folder, seed

    @abstractmethod
    def case(self, number: int) -> Case:
        """The case of a number, from 0."""

    def final(self) -> Iterator[Case]:
        """What is checked once, after all cases."""
        yield from ()

    def figures(self) -> dict[str, Any]:
        """What was measured beside the count of cases, by its name."""
        return {}

    def random(self, number: int) -> random.Random:
        """The choices of one case."""
        return random.Random(f"{self._seed} {self.NAME} {number}")  # noqa: S311 - no secret

    def order(self) -> Iterator[int]:
        """The numbers in the order in which they are tried: all kinds early, so that a short campaign sees each."""
        number = 0
        if self.total is not None:
            numbers = list(range(self.total))
            random.Random(f"{self._seed} {self.NAME}").shuffle(numbers)  # noqa: S311
            yield from numbers
            return
        while True:
            yield number
            number += 1
