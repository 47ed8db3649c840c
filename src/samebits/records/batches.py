"""Digests of the samples that a training was given, by which two trainings' data are told apart from their results."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Self

import numpy as np
from pydantic import PositiveInt, model_validator

from samebits.files import Part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

MOST = 2**18
"""The most digests of a training. Of more samples, neighbours in a batch share one."""


def groups_of(samples: int, steps: int) -> int:
    """The number of digests of a batch with so many samples."""
    return min(samples, max(1, MOST // steps))


class BatchDigests(Part):
    """Digests of a training's batches of ``samples``: for each step ``groups``, each of as many neighbours.

    ``digests`` is base64 of little-endian 32-bit numbers, by step and then by group.
    """

    samples: PositiveInt
    groups: PositiveInt
    digests: str

    @model_validator(mode="after")
    def _require_whole_steps(self) -> Self:
        """Refuse what somebody else's record may hold: no base64, or no whole number of steps."""
        size = len(base64.b64decode(self.digests, validate=True))
        if not size or size % (4 * self.groups):
            raise ValueError(f"digests of {size} bytes, expected whole steps of {self.groups} digests")
        return self

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], samples: int) -> Self | None:
        """The digests by step and group; None if there are none."""
        if not rows:
            return None
        array = np.array(rows, dtype="<u4")
        return cls(samples=samples, groups=array.shape[1], digests=base64.b64encode(array.tobytes()).decode())

    def first_difference(self, other: BatchDigests) -> tuple[int, int, int] | None:
        """Step, first and last sample, each from 1, of the first digest that differs; of the steps that both have."""
        mine, theirs = (one._by_step() for one in (self, other))
        steps = min(len(mine), len(theirs))
        places = np.argwhere(mine[:steps] != theirs[:steps])
        if not len(places):
            return None
        step, group = map(int, places[0])
        first, stop = (-(-one * self.samples // self.groups) for one in (group, group + 1))
        return step + 1, first + 1, stop

    def _by_step(self) -> NDArray[np.uint32]:
        return np.frombuffer(base64.b64decode(self.digests), "<u4").reshape(-1, self.groups)
