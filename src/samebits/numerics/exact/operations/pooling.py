"""Maxima and means over windows of an image, and their gradients."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from samebits.numerics.exact.grid import fixed_order_sum
from samebits.numerics.exact.operations.indexing import scatter_add
from samebits.numerics.exact.operations.reductions import divided, first_equal
from samebits.numerics.exact.operations.registry import EXACT, NotExactError, check_float32, exact, wide
from samebits.numerics.exact.unfolding import Geometry, fold, windows_of

if TYPE_CHECKING:
    from torch import Tensor

aten = torch.ops.aten


def _batched(x: Tensor, axes: int) -> Tensor:
    return x if x.dim() == axes + 2 else x.unsqueeze(0)


@exact(aten.max_pool2d_with_indices)
def max_pool2d(
    x: Tensor,
    kernel: list[int],
    stride: list[int] = (),  # type: ignore[assignment]
    padding: list[int] = (0,),  # type: ignore[assignment]
    dilation: list[int] = (1,),  # type: ignore[assignment]
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    """The largest number of each window and its index in the image, that of the first of equal ones."""
    check_float32(x)
    moves = {"kernel": kernel, "stride": stride or kernel, "padding": padding, "dilation": dilation}
    geometry = Geometry.of(x.shape[-2:], ceil=ceil_mode, **moves)
    windows = windows_of(_batched(x, 2), geometry, -math.inf).flatten(-2)
    value = windows.amax(-1, keepdim=True)
    inside = windows_of(torch.ones((1, 1, *geometry.size), device=x.device), geometry).flatten(-2) > 0
    place = first_equal(windows, value, -1, inside)
    rows, columns = (torch.arange(n, device=x.device) for n in geometry.positions)
    (_kh, kw), (sh, sw), (ph, pw), (dh, dw) = geometry.kernel, geometry.stride, geometry.padding, geometry.dilation
    place = place.squeeze(-1)
    row = rows.view(-1, 1) * sh - ph + place.div(kw, rounding_mode="floor") * dh
    column = columns * sw - pw + place.remainder(kw) * dw
    index = row * geometry.size[1] + column
    shape = (*x.shape[:-2], *geometry.positions)
    return value.squeeze(-1).add_(0.0).view(shape), index.view(shape)


@exact(aten.max_pool2d_with_indices_backward)
def max_pool2d_backward(grad: Tensor, x: Tensor, *settings: Any) -> Tensor:
    """The gradient of ``max_pool2d``: for each element the sum over the windows whose largest it was.

    The indices are the last of ``settings``.
    """
    indices: Tensor = settings[-1]
    start = torch.zeros_like(x.flatten(-2))
    return scatter_add(start, -1, indices.flatten(-2), grad.flatten(-2)).view(x.shape)


def _average(
    axes: int,
    x: Tensor,
    kernel: list[int],
    stride: list[int] = (),  # type: ignore[assignment]
    padding: list[int] = (0,),  # type: ignore[assignment]
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> tuple[Geometry, Tensor]:
    """Windows of average pooling over so many ``axes``, and the float64 number that each window's sum is divided by.

    Raises:
        NotExactError: windows may hang over the edge.
    """
    if ceil_mode:
        raise NotExactError("average pooling with ceil_mode has no exact version; pad the input")
    geometry = Geometry.of(x.shape[-axes:], kernel=kernel, stride=stride or kernel, padding=padding, dilation=1)
    if divisor_override is not None or count_include_pad or not any(geometry.padding):
        count = float(divisor_override or math.prod(geometry.kernel))
        return geometry, torch.full((1,), count, dtype=torch.float64, device=x.device)
    inside = torch.ones((1, 1, *geometry.size), dtype=torch.float64, device=x.device)
    return geometry, fixed_order_sum(windows_of(inside, geometry).flatten(-axes), (-1,)).squeeze(-1)


def avg_pool(axes: int, x: Tensor, *settings: Any, **named: Any) -> Tensor:
    """The sum of each window of so many ``axes`` over its size, or over ``divisor_override``; rounded once.

    ``settings`` are those of ``_average``.
    """
    geometry, divisor = _average(axes, x, *settings, **named)
    windows = windows_of(_batched(wide(x), axes), geometry).flatten(-axes)
    total = fixed_order_sum(windows, (-1,)).squeeze(-1)
    return total.div(divisor).to(x.dtype).view(*x.shape[:-axes], *geometry.positions)


def avg_pool_backward(axes: int, grad: Tensor, x: Tensor, *settings: Any) -> Tensor:
    """The gradient of ``avg_pool``: for each element the sum over the windows that hold it."""
    geometry, divisor = _average(axes, x, *settings)
    share = _batched(wide(grad), axes).div(divisor)
    spread = share.view(*share.shape, *(1,) * axes).expand(*share.shape, *geometry.kernel)
    return fold(spread, geometry).to(x.dtype).reshape(x.shape)


# A kernel given as one number does not tell the number of axes, so the operation does.
EXACT[aten.avg_pool2d], EXACT[aten.avg_pool3d] = partial(avg_pool, 2), partial(avg_pool, 3)
EXACT[aten.avg_pool2d_backward] = partial(avg_pool_backward, 2)
EXACT[aten.avg_pool3d_backward] = partial(avg_pool_backward, 3)


@exact(aten._adaptive_avg_pool2d)
def adaptive_avg_pool2d(x: Tensor, output_size: list[int]) -> Tensor:
    """Means over ``output_size`` windows, whose sizes may differ by one; axis by axis."""
    means = wide(x)
    for axis, count in zip((-2, -1), output_size, strict=True):
        parts = []
        for low, high in _adaptive_windows(means.shape[axis], count):
            parts.append(divided(fixed_order_sum(means.narrow(axis, low, high - low), (axis,)), high - low))
        means = torch.cat(parts, axis)
    return means.to(x.dtype)


def _adaptive_windows(size: int, count: int) -> list[tuple[int, int]]:
    return [(i * size // count, -((i + 1) * size // -count)) for i in range(count)]


@exact(aten._adaptive_avg_pool2d_backward)
def adaptive_avg_pool2d_backward(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of ``adaptive_avg_pool2d``: for each element the sum over the windows that hold it."""
    grads = wide(grad)
    for axis in (-1, -2):
        size, count = x.shape[axis], grads.shape[axis]
        shape = list(grads.shape)
        shape[axis] = size
        total = torch.zeros(shape, dtype=torch.float64, device=grad.device)
        for i, (low, high) in enumerate(_adaptive_windows(size, count)):
            total.narrow(axis, low, high - low).add_(divided(grads.narrow(axis, i, 1), high - low))
        grads = total
    return grads.to(x.dtype)
