"""Convolutions of numbers on grids, whose sums of products are exact in float64: over one, two or three axes.

A CPU's kernels add products in some order, which cannot matter. A GPU's may transform their factors first
(Winograd, Fourier), which rounds; there a convolution is a matrix product of unfolded windows, with the same result.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from samebits.numerics.exact import convolution_kernels
from samebits.numerics.exact.compiled.library import compiled, sizes, threads
from samebits.numerics.exact.grid import shifter, snap_, top
from samebits.numerics.exact.integer_products import multiply
from samebits.numerics.exact.unfolding import MOST_AXES, Geometry, fold, windows_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from samebits.numerics.exact.compiled.library import Kernels

aten = torch.ops.aten


class Layout(NamedTuple):
    """How kernels move over images, as ``aten.convolution`` has it."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int

    def geometry(self, size: Sequence[int], kernel: Sequence[int]) -> Geometry:
        """Moves of a kernel over the larger image. Raises ValueError: some of the image has no window.

        A transposed convolution is the gradient of a convolution: its output is the larger image.
        """
        geometry = Geometry.of(size, kernel=kernel, stride=self.stride, padding=self.padding, dilation=self.dilation)
        if self.transposed:
            geometry = geometry.transposed(self.output_padding)
            if geometry.positions != tuple(size):
                raise ValueError("an output_padding from the stride on has no exact version")
        return geometry

    def terms(self, weight: Tensor) -> int:
        """The most products that a number of a convolution, or of its gradient for the images, is the sum of."""
        return max(weight.shape[0] // self.groups, weight.shape[1]) * math.prod(weight.shape[2:])


def _snapped_groups(library: Kernels, x: Tensor, outer: int, groups: int, bits: int) -> Tensor | None:
    if not library.takes(x):
        return None
    out = x.new_empty(x.shape, dtype=torch.float64)
    library.call("snap_groups", x, out, outer, groups, x.numel() // (outer * groups), bits, threads())
    return out


@compiled(_snapped_groups)
def snap_groups(x: Tensor, outer: int, groups: int, bits: int) -> Tensor:
    """``x`` as float64, seen as (outer, groups, ...) with a grid of its own for each group."""
    if x.numel() == 0:
        return x.to(torch.float64)
    wide = x.to(torch.float64, copy=True).reshape(outer, groups, -1)
    return snap_(wide, shifter(top(x.reshape(outer, groups, -1), (0, 2)), bits)).view(x.shape)


def samples_on_grids(x: Tensor, groups: int, bits: int) -> Tensor:
    """Images with a grid for each group of channels of each sample."""
    return snap_groups(x.contiguous(), 1, max(x.shape[0], 1) * groups, bits)


def channels_on_grids(x: Tensor, bits: int) -> Tensor:
    """Images with a grid for each channel of all samples."""
    return snap_groups(x.contiguous(), max(x.shape[0], 1), x.shape[1], bits)


@compiled(convolution_kernels.convolved)
def convolved(x: Tensor, weight: Tensor, layout: Layout) -> Tensor:
    """The convolution of images and kernels on grids, without negative zeros.

    Shapes: (batch, channels, *size) and (outputs, channels / groups, *kernel), as in PyTorch.
    """
    if _is_native(x):
        return aten.convolution(x, weight, None, *layout).add_(0.0)  # type: ignore[no-any-return]
    geometry, kernels = layout.geometry(x.shape[2:], weight.shape[2:]), _kernels(weight, layout.groups)
    if layout.transposed:
        shape = (x.shape[0], layout.groups * weight.shape[1], *geometry.size)
        return folded(multiply(to_rows(x, layout.groups), kernels), shape, geometry)
    return _from_windows(x, kernels, geometry, layout.groups)


@compiled(convolution_kernels.gradient_of_images)
def gradient_of_images(grad: Tensor, x_shape: torch.Size, weight: Tensor, layout: Layout) -> Tensor:
    """The gradient of ``convolved`` for the images, of gradients and kernels on grids, without negative zeros."""
    if _is_native(grad):
        like = grad.new_empty(x_shape)
        return aten.convolution_backward(grad, like, weight, None, *layout, [True, False, False])[0].add_(0.0)  # type: ignore[no-any-return]
    geometry, kernels = layout.geometry(x_shape[2:], weight.shape[2:]), _kernels(weight, layout.groups)
    if layout.transposed:
        return _from_windows(grad, kernels, geometry, layout.groups)
    return folded(multiply(to_rows(grad, layout.groups), kernels), x_shape, geometry)


@compiled(convolution_kernels.gradient_of_kernels)
def gradient_of_kernels(grad: Tensor, x: Tensor, weight_shape: torch.Size, layout: Layout) -> Tensor:
    """The gradient of ``convolved`` for the kernels, of gradients and images on grids, without negative zeros."""
    if _is_native(grad):
        like = grad.new_empty(weight_shape)
        return aten.convolution_backward(grad, x, like, None, *layout, [False, True, False])[1].add_(0.0)  # type: ignore[no-any-return]
    geometry = layout.geometry(x.shape[2:], weight_shape[2:])
    small, large = (x, grad) if layout.transposed else (grad, x)
    rows = rows_of(large, geometry, layout.groups)
    return multiply(to_rows(small, layout.groups).mT, rows).reshape(weight_shape).add_(0.0)


def terms_of_kernels(grad: Tensor, x: Tensor, layout: Layout) -> int:
    """Number of products of which an element of ``gradient_of_kernels`` is the sum."""
    small = x if layout.transposed else grad
    return small.shape[0] * math.prod(small.shape[2:])


def _is_native(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.numel() > 0


def _kernels(weight: Tensor, groups: int) -> Tensor:
    """(groups, outputs, inputs * kernel) of one group."""
    return weight.reshape(groups, weight.shape[0] // groups, -1)


def _from_windows(x: Tensor, kernels: Tensor, geometry: Geometry, groups: int) -> Tensor:
    y = multiply(rows_of(x, geometry, groups), kernels.mT).add_(0.0)
    spread = y.view(groups, x.shape[0], math.prod(geometry.positions), y.shape[-1])
    return spread.permute(1, 0, 3, 2).reshape(x.shape[0], groups * y.shape[-1], *geometry.positions)


def rows_of(x: Tensor, geometry: Geometry, groups: int) -> Tensor:
    """Windows as rows.

    Shapes: (batch, channels, *size) to (groups, batch * positions, channels / groups * kernel).
    """
    axes, (batch, channels) = len(geometry.size), x.shape[:2]
    windows = windows_of(x, geometry)
    windows = windows.view(batch, groups, channels // groups, *windows.shape[2:])
    order = (1, 0, *range(3, 3 + axes), 2, *range(3 + axes, 3 + 2 * axes))
    rows = batch * math.prod(geometry.positions)
    return windows.permute(order).reshape(groups, rows, channels // groups * math.prod(geometry.kernel))


def to_rows(x: Tensor, groups: int) -> Tensor:
    """Positions as rows: (batch, outputs, *positions) to (groups, batch * positions, outputs / groups)."""
    batch, outputs = x.shape[:2]
    positions = math.prod(x.shape[2:])
    spread = x.reshape(batch, groups, outputs // groups, positions)  # an empty batch leaves the size of -1 open
    return spread.permute(1, 0, 3, 2).reshape(groups, batch * positions, outputs // groups)


def _compiled_folded(library: Kernels, rows: Tensor, x_shape: Sequence[int], geometry: Geometry) -> Tensor | None:
    along = geometry.along(MOST_AXES)
    if library.is_host or along is None or not library.takes(rows, dtype=torch.float64):
        return None
    out = rows.new_empty(x_shape)
    library.call("folded", rows, out, sizes(rows.shape[0], x_shape[0], x_shape[1] // rows.shape[0], *along))
    return out


@compiled(_compiled_folded)
def folded(rows: Tensor, x_shape: Sequence[int], geometry: Geometry) -> Tensor:
    """The transpose of ``rows_of``: float64 sums over all windows of an element, (batch, channels, *size).

    They start from positive zeros, and so have no negative ones.
    """
    groups = rows.shape[0]
    batch, channels = x_shape[:2]
    axes = len(geometry.size)
    spread = rows.view(groups, batch, *geometry.positions, channels // groups, *geometry.kernel)
    order = (1, 0, 2 + axes, *range(2, 2 + axes), *range(3 + axes, 3 + 2 * axes))
    return fold(spread.permute(order).flatten(1, 2), geometry)
