"""Maxima and means over windows of an image, and their gradients."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from samebits.numerics.exact.compiled.library import compiled, sizes, threads
from samebits.numerics.exact.operations.indexing import scatter_add
from samebits.numerics.exact.operations.reductions import divided, first_equal
from samebits.numerics.exact.operations.registry import EXACT, check_float32, wide
from samebits.numerics.exact.sums import fixed_order_sum
from samebits.numerics.exact.unfolding import MOST_AXES, Geometry, fold, windows_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from samebits.numerics.exact.compiled.library import Kernels

aten = torch.ops.aten


def _batched(x: Tensor, axes: int) -> Tensor:
    return x if x.dim() == axes + 2 else x.unsqueeze(0)


Settings = tuple[list[int], list[int], list[int], list[int], bool]
"""Kernel, strides, padding, dilation and ``ceil_mode`` of a maximum; no strides are the kernel's sizes."""


def _geometry(axes: int, x: Tensor, settings: Settings) -> Geometry:
    kernel, stride, padding, dilation, ceil = settings
    moves = {"kernel": kernel, "stride": stride or kernel, "padding": padding, "dilation": dilation}
    return Geometry.of(x.shape[-axes:], ceil=ceil, **moves)


def _moves(library: Kernels, x: Tensor, geometry: Geometry) -> list[Any]:
    """Last arguments of kernels; none if they take no such windows, of which one may hold nothing of the image."""
    along = geometry.along(MOST_AXES)
    if along is None or max(geometry.dilation) > 1:
        return []
    return [sizes(x.numel() // math.prod(geometry.size), *along), *([threads()] if library.is_host else [])]


def _largest(library: Kernels, x: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor] | None:
    if not library.takes(x) or not (moves := _moves(library, x, geometry)):
        return None
    out = x.new_empty((*x.shape[: x.dim() - len(geometry.size)], *geometry.positions))
    places = torch.empty_like(out, dtype=torch.int64)
    library.call("max_pool", out, x, places, *moves)
    return out, places


@compiled(_largest)
def _largest_of_windows(x: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    axes = len(geometry.size)
    windows = windows_of(_batched(x, axes), geometry, -math.inf).flatten(-axes)
    value = windows.amax(-1, keepdim=True)
    inside = windows_of(torch.ones((1, 1, *geometry.size), device=x.device), geometry).flatten(-axes) > 0
    place = first_equal(windows, value, -1, inside).squeeze(-1)
    index, elements = torch.zeros_like(place), 1
    for axis in reversed(range(axes)):
        within, place = place.remainder(geometry.kernel[axis]), place.div(geometry.kernel[axis], rounding_mode="floor")
        window = torch.arange(geometry.positions[axis], device=x.device).view(-1, *(1,) * (axes - 1 - axis))
        at = window * geometry.stride[axis] - geometry.padding[axis] + within * geometry.dilation[axis]
        index.add_(at * elements)
        elements *= geometry.size[axis]
    shape = (*x.shape[:-axes], *geometry.positions)
    return value.squeeze(-1).add_(0.0).view(shape), index.view(shape)


def max_pool(
    axes: int,
    x: Tensor,
    kernel: list[int],
    stride: list[int] = (),  # type: ignore[assignment]
    padding: list[int] = (0,),  # type: ignore[assignment]
    dilation: list[int] = (1,),  # type: ignore[assignment]
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    """The largest number of each window over so many ``axes``, and the index in the image of the first equal to it."""
    check_float32(x)
    return _largest_of_windows(x.contiguous(), _geometry(axes, x, (kernel, stride, padding, dilation, ceil_mode)))


def _from_largest(library: Kernels, grad: Tensor, x: Tensor, indices: Tensor, geometry: Geometry) -> Tensor | None:
    if not library.takes(grad) or not (moves := _moves(library, x, geometry)):
        return None
    out = grad.new_empty(x.shape)
    library.call("max_pool_backward", out, grad, indices.contiguous(), *moves)
    return out


@compiled(_from_largest)
def _gradient_of_largest(grad: Tensor, x: Tensor, indices: Tensor, geometry: Geometry) -> Tensor:
    return adaptive_max_pool_backward(len(geometry.size), grad, x, indices)


def max_pool_backward(axes: int, grad: Tensor, x: Tensor, *settings: Any) -> Tensor:
    """The gradient of ``max_pool``: sums over the windows whose largest an element was.

    The indices are the last of ``settings``.
    """
    *moves, indices = settings
    return _gradient_of_largest(grad.contiguous(), x, indices, _geometry(axes, x, tuple(moves)))


def adaptive_max_pool_backward(axes: int, grad: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    """The gradient of ``adaptive_max_pool``."""
    start = torch.zeros_like(x.flatten(-axes))
    return scatter_add(start, -1, indices.flatten(-axes), grad.flatten(-axes)).view(x.shape)


def adaptive_max_pool(axes: int, x: Tensor, output_size: list[int]) -> tuple[Tensor, Tensor]:
    """As ``max_pool``, over ``output_size`` windows, whose sizes may differ by one."""
    check_float32(x)
    windows, index, elements = x, torch.zeros((), dtype=torch.int64, device=x.device), 1
    for axis, count in zip(reversed(range(axes)), reversed(output_size), strict=True):
        size, behind = x.shape[axis - axes], 2 * (axes - 1 - axis)  # axes that come from those behind this one
        dim = -1 - behind
        rows = _adaptive_windows(size, count)
        longest = max(high - low for low, high in rows)
        # A shorter window has its last element again, which is never the first of equal ones.
        among = torch.tensor([[min(low + i, high - 1) for i in range(longest)] for low, high in rows], device=x.device)
        windows = windows.index_select(dim, among.flatten()).unflatten(dim, among.shape)  # type: ignore[no-untyped-call]
        index = among.view(*among.shape, *(1,) * behind).mul(elements).add(index)
        elements *= size
    order = [*range(-2 * axes, 0, 2), *range(1 - 2 * axes, 0, 2)]
    windows = windows.movedim(order, [*range(-2 * axes, 0)]).flatten(-axes)
    index = index.movedim(order, [*range(-2 * axes, 0)]).flatten(-axes).expand_as(windows)
    value = windows.amax(-1, keepdim=True)
    place = index.gather(-1, first_equal(windows, value, -1))
    return value.squeeze(-1).add_(0.0), place.squeeze(-1)


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

    What hangs over the padding, as in ``ceil_mode``, counts in no window.
    """
    moves = {"kernel": kernel, "stride": stride or kernel, "padding": padding}
    geometry = Geometry.of(x.shape[-axes:], ceil=ceil_mode, dilation=1, **moves)
    if divisor_override is not None:
        return geometry, torch.full((1,), float(divisor_override), dtype=torch.float64, device=x.device)
    divisor = torch.ones((1,) * axes, dtype=torch.float64, device=x.device)
    for axis in range(axes):
        around = geometry.padding[axis] if count_include_pad else 0
        first, last = -around, geometry.size[axis] + around
        starts = [n * geometry.stride[axis] - geometry.padding[axis] for n in range(geometry.positions[axis])]
        counts = [min(start + geometry.kernel[axis], last) - max(start, first) for start in starts]
        divisor = divisor * divisor.new_tensor(counts).view(-1, *(1,) * (axes - 1 - axis))
    return geometry, divisor


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


def adaptive_avg_pool(axes: int, x: Tensor, output_size: list[int]) -> Tensor:
    """Means over ``output_size`` windows, whose sizes may differ by one; axis by axis."""
    means = wide(x)
    for axis, count in zip(range(-axes, 0), output_size, strict=True):
        parts = []
        for low, high in _adaptive_windows(means.shape[axis], count):
            parts.append(divided(fixed_order_sum(means.narrow(axis, low, high - low), (axis,)), high - low))
        means = torch.cat(parts, axis)
    return means.to(x.dtype)


def _adaptive_windows(size: int, count: int) -> list[tuple[int, int]]:
    return [(i * size // count, -((i + 1) * size // -count)) for i in range(count)]


def adaptive_avg_pool_backward(axes: int, grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of ``adaptive_avg_pool``: for each element the sum over the windows that hold it."""
    grads = wide(grad)
    for axis in range(-1, -1 - axes, -1):
        size, count = x.shape[axis], grads.shape[axis]
        shape = list(grads.shape)
        shape[axis] = size
        total = torch.zeros(shape, dtype=torch.float64, device=grad.device)
        for i, (low, high) in enumerate(_adaptive_windows(size, count)):
            total.narrow(axis, low, high - low).add_(divided(grads.narrow(axis, i, 1), high - low))
        grads = total
    return grads.to(x.dtype)


# A kernel given as one number does not tell the number of axes, so the operation does.
for _axes in (2, 3):
    _versions: dict[str, Callable[..., Any]] = {
        f"max_pool{_axes}d_with_indices": max_pool,
        f"max_pool{_axes}d_with_indices_backward": max_pool_backward,
        f"adaptive_max_pool{_axes}d": adaptive_max_pool,
        f"adaptive_max_pool{_axes}d_backward": adaptive_max_pool_backward,
        f"avg_pool{_axes}d": avg_pool,
        f"avg_pool{_axes}d_backward": avg_pool_backward,
        f"_adaptive_avg_pool{_axes}d": adaptive_avg_pool,
        f"_adaptive_avg_pool{_axes}d_backward": adaptive_avg_pool_backward,
    }
    for _name, _version in _versions.items():
        EXACT[getattr(aten, _name)] = partial(_version, _axes)
