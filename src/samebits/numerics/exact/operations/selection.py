"""Elements that are chosen by their order: medians, the k-th smallest, running maxima and minima, counts in bins."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from samebits.numerics.exact.operations.pointwise import positive_zero
from samebits.numerics.exact.operations.registry import EXACT, exact, wide

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

aten = torch.ops.aten


def _chosen(x: Tensor, dim: int, keepdim: bool, place_of: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Of each line along ``dim`` the element at a place in a stable sort, and its index.

    ``place_of`` takes the number of elements that are NaN, which come last.
    """
    if not x.dim():
        return x.clone(), torch.zeros((), dtype=torch.int64, device=x.device)
    values, order = torch.sort(x, dim=dim, stable=True)
    place = place_of(x.isnan().sum(dim, keepdim=True))
    value, index = values.gather(dim, place), order.gather(dim, place)
    return (value, index) if keepdim else (value.squeeze(dim), index.squeeze(dim))


def _median(packet: Any, *, without_nan: bool) -> None:
    """Enter the lower of two middle elements: NaN if there is one, or else of the other elements."""

    def version(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is None and not x.numel():
            return x.new_full((), math.nan)
        axis = 0 if dim is None else dim
        count = x.numel() if dim is None else x.shape[axis] if x.dim() else 1

        def place_of(missing: Tensor) -> Tensor:
            if without_nan:
                return (count - 1 - missing).clamp(min=0).div(2, rounding_mode="floor")
            return torch.where(missing > 0, count - missing, (count - 1) // 2)

        chosen = _chosen(x.reshape(-1) if dim is None else x, axis, keepdim, place_of)
        return chosen[0] if dim is None else chosen

    EXACT[packet] = version


_median(aten.median, without_nan=False)
_median(aten.nanmedian, without_nan=True)


@exact(aten.kthvalue)
def kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The k-th smallest element along ``dim``, the first of equal ones counted first, and its index."""
    return _chosen(x, dim, keepdim, lambda missing: torch.full_like(missing, k - 1))


def _running(packet: Any) -> None:
    """Enter a running maximum or minimum with the index of the last element that is equal to it."""

    def version(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        if not x.dim() or not x.numel():
            value, index = packet(x, dim)
            return positive_zero(value), index
        value = positive_zero(packet(x, dim)[0])
        shape = [-1 if axis == dim % x.dim() else 1 for axis in range(x.dim())]
        places = torch.arange(x.shape[dim], device=x.device).view(shape)
        equal = (x == value) | (x.isnan() & value.isnan())
        return value, torch.cummax(torch.where(equal, places, -1), dim)[0]

    EXACT[packet] = version


_running(aten.cummax)
_running(aten.cummin)


@exact(aten.histc)
def histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:  # noqa: A002 - as PyTorch calls them
    """How many elements are in each of so many bins from ``min`` to ``max``, of which the last has both its ends."""
    values = wide(x).reshape(-1)
    low, high = values.new_tensor(float(min)), values.new_tensor(float(max))
    if min == max and values.numel():
        low, high = values.amin(), values.amax()
    level = low == high
    low, high = torch.where(level, low.sub(1.0), low), torch.where(level, high.add(1.0), high)
    place = values.sub(low).mul_(bins).div_(high.sub(low)).floor_()
    inside = (values >= low) & (values <= high)
    place = torch.where(inside, place.clamp(0, bins - 1).nan_to_num_(), bins).to(torch.int64)
    return torch.bincount(place, minlength=bins + 1)[:bins].to(x.dtype)
