"""Kernels of convolutions on a CPU, over up to three axes; of depthwise ones over one or two, they have others.

PyTorch's own float64 kernels write each image's windows side by side first, and go image by image. These take images
and kernels on grids, whose sums of products are exact in any order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from samebits.numerics.exact.compiled.library import sizes, threads
from samebits.numerics.exact.unfolding import MOST_AXES

if TYPE_CHECKING:
    from torch import Tensor

    from samebits.numerics.exact.compiled.library import Kernels
    from samebits.numerics.exact.convolution import Layout
    from samebits.numerics.exact.unfolding import Geometry


def convolved(library: Kernels, x: Tensor, weight: Tensor, layout: Layout) -> Tensor | None:
    """``convolution.convolved``; None if no kernel takes it."""
    moves = layout.geometry(x.shape[2:], weight.shape[2:])
    return (_to_large if layout.transposed else _to_small)(library, x, weight, layout, moves)


def gradient_of_images(
    library: Kernels, grad: Tensor, x_shape: torch.Size, weight: Tensor, layout: Layout
) -> Tensor | None:
    """``convolution.gradient_of_images``."""
    moves = layout.geometry(x_shape[2:], weight.shape[2:])
    return (_to_small if layout.transposed else _to_large)(library, grad, weight, layout, moves)


def gradient_of_kernels(
    library: Kernels, grad: Tensor, x: Tensor, weight_shape: torch.Size, layout: Layout
) -> Tensor | None:
    """``convolution.gradient_of_kernels``."""
    moves = layout.geometry(x.shape[2:], weight_shape[2:])
    small, large = (x, grad) if layout.transposed else (grad, x)
    return _answer(library, "_kernels_gradient", small, large, weight_shape, weight_shape, layout, moves)


def _to_small(library: Kernels, x: Tensor, weight: Tensor, layout: Layout, moves: Geometry) -> Tensor | None:
    shape = torch.Size((x.shape[0], weight.shape[0], *moves.positions))
    return _answer(library, "", x, weight, weight.shape, shape, layout, moves)


def _to_large(library: Kernels, x: Tensor, weight: Tensor, layout: Layout, moves: Geometry) -> Tensor | None:
    shape = torch.Size((x.shape[0], layout.groups * weight.shape[1], *moves.size))
    return _answer(library, "_images_gradient", x, weight, weight.shape, shape, layout, moves)


def _answer(
    library: Kernels, what: str, left: Tensor, right: Tensor, kernels: torch.Size, shape: torch.Size, layout: Layout,
    moves: Geometry,
) -> Tensor | None:  # fmt: skip
    """What a kernel makes, of this shape; ``kernels`` is that of the convolution's."""
    along = moves.along(MOST_AXES)
    if along is None or not library.is_host or not library.takes(left, right, dtype=torch.float64) or 0 in shape:
        return None
    outputs, images = kernels[0] // layout.groups, left.shape[0]
    result = torch.empty(shape, dtype=torch.float64)
    if kernels[1] == 1 < layout.groups and (along_two := moves.along(2)):
        numbers = sizes(layout.groups, outputs, *along_two)
        library.call(f"depthwise{what}", left, right, result, numbers, images, threads())
        return result
    numbers = sizes(images, layout.groups, kernels[1], outputs, *along)
    done = library.answer(f"convolved{what}", left, right, result, numbers, threads())
    return result if done else None
