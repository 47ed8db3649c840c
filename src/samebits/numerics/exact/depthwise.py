"""Kernels of depthwise convolutions on a CPU, where PyTorch's own call a product of matrices for each channel.

They take images and kernels on grids, whose sums of products are exact in float64 in any order.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from samebits.numerics.exact.compiled.library import threads

if TYPE_CHECKING:
    from torch import Tensor

    from samebits.numerics.exact.compiled.library import Kernels
    from samebits.numerics.exact.convolution import Layout


def convolved(library: Kernels, x: Tensor, weight: Tensor, layout: Layout) -> Tensor | None:
    """``convolution.convolved`` of a convolution over one or two axes; None if it is not depthwise."""
    return _answer(library, "depthwise", x, weight, (x.shape, weight.shape, layout))


def gradient_of_images(
    library: Kernels, grad: Tensor, x_shape: torch.Size, weight: Tensor, layout: Layout
) -> Tensor | None:
    """``convolution.gradient_of_images``."""
    return _answer(library, "depthwise_images", grad, weight, (x_shape, weight.shape, layout))


def gradient_of_kernels(
    library: Kernels, grad: Tensor, x: Tensor, weight_shape: torch.Size, layout: Layout
) -> Tensor | None:
    """``convolution.gradient_of_kernels``."""
    return _answer(library, "depthwise_kernels", grad, x, (x.shape, weight_shape, layout))


def _answer(
    library: Kernels, name: str, left: Tensor, right: Tensor, sizes: tuple[torch.Size, torch.Size, Layout]
) -> Tensor | None:
    x_shape, weight_shape, layout = sizes
    axes, channels = len(x_shape) - 2, x_shape[1]
    alone = layout.groups == channels > 1 and weight_shape[1] == 1 and not layout.transposed and axes in (1, 2)
    if not alone or not library.has(name) or not library.takes(left, right, dtype=torch.float64):
        return None
    moves = layout.geometry(x_shape[2:], weight_shape[2:])
    of_axes = [moves.size, moves.positions, moves.kernel, layout.stride, layout.padding, layout.dilation]
    if axes == 1:  # as over two, the first of which has one element and no padding
        of_axes = [(one, *numbers) for one, numbers in zip((1, 1, 1, 1, 0, 1), of_axes, strict=True)]
    given = torch.tensor([channels, weight_shape[0] // channels, *itertools.chain(*of_axes)])
    shape = {"depthwise": (x_shape[0], weight_shape[0], *moves.positions), "depthwise_images": x_shape}
    result = torch.empty(shape.get(name, weight_shape), dtype=torch.float64)
    library.call(name, left, right, result, given, x_shape[0], threads())
    return result
