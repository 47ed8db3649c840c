"""Kernels of depthwise convolutions on a CPU, where PyTorch's own call a product of matrices for each channel.

They take images and kernels on grids, whose sums of products are exact in float64 in any order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from samebits.numerics.exact.compiled.library import takes, threads

if TYPE_CHECKING:
    from torch import Tensor

    from samebits.numerics.exact.compiled.library import Library
    from samebits.numerics.exact.convolution import Layout


def convolved(library: Library, x: Tensor, weight: Tensor, layout: Layout) -> Tensor | None:
    """``convolution.convolved`` of a convolution over one or two axes; None if it is not depthwise."""
    return _answer(library, "depthwise", x, weight, (x.shape, weight.shape, layout))


def gradient_of_images(
    library: Library, grad: Tensor, x_shape: torch.Size, weight: Tensor, layout: Layout
) -> Tensor | None:
    """``convolution.gradient_of_images``."""
    return _answer(library, "depthwise_images", grad, weight, (x_shape, weight.shape, layout))


def gradient_of_kernels(
    library: Library, grad: Tensor, x: Tensor, weight_shape: torch.Size, layout: Layout
) -> Tensor | None:
    """``convolution.gradient_of_kernels``."""
    return _answer(library, "depthwise_kernels", grad, x, (x.shape, weight_shape, layout))


def _answer(
    library: Library, name: str, one: Tensor, other: Tensor, sizes: tuple[torch.Size, torch.Size, Layout]
) -> Tensor | None:
    x_shape, weight_shape, layout = sizes
    axes, channels = len(x_shape) - 2, x_shape[1]
    alone = layout.groups == channels > 1 and weight_shape[1] == 1 and not layout.transposed and axes in (1, 2)
    if not alone or not takes(one, other, dtype=torch.float64):
        return None
    moved = zip(x_shape[2:], weight_shape[2:], layout.stride, layout.padding, layout.dilation, strict=True)
    out = [(size + 2 * pad - step * (kernel - 1) - 1) // stride + 1 for size, kernel, stride, pad, step in moved]
    alone_axis = (1,) * (2 - axes)
    pairs = [(*alone_axis, *n) for n in (x_shape[2:], out, weight_shape[2:], layout.stride)]
    pairs += [((0,) * (2 - axes)) + tuple(layout.padding), (*alone_axis, *layout.dilation)]
    moves = torch.tensor([channels, weight_shape[0] // channels, *(n for pair in pairs for n in pair)])
    shape = {"depthwise": (x_shape[0], weight_shape[0], *out), "depthwise_images": x_shape}.get(name, weight_shape)
    result = torch.empty(shape, dtype=torch.float64)
    library.call(name, one, other, result, moves, x_shape[0], threads())
    return result
