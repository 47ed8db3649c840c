"""What one forward and backward pass is fed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class MicroBatch(NamedTuple):
    """Samples on the device, the step they belong to, and under ``exact`` the numbers of the shards that they are."""

    inputs: Tensor
    targets: Tensor
    step: int
    shards: range = range(1)
