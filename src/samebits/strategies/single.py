"""The strategy ``single``: the plain module on one device, the baseline of every ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from samebits.strategies.interface import Strategy
from samebits.strategies.placement import Placement

if TYPE_CHECKING:
    from samebits.batch_split import BatchSplit
    from samebits.strategies.placement import Request


def _place(request: Request) -> tuple[Placement, BatchSplit]:
    whole, device_type = request.whole, request.here.device_type
    placement = Placement(strategy=request.strategy, device_type=device_type, rows_per_device=whole.rows_per_device)
    return placement, whole


SINGLE = Strategy(name="single", place=_place)
