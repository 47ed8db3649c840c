"""Convolutions: a grid for each group of a sample, and of kernels; sums of products are rounded to float32 once.

A bias is added after that, as PyTorch does it for several shards at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from samebits.numerics.exact.convolution import (
    Layout,
    channels_on_grids,
    convolved,
    gradient_of_images,
    gradient_of_kernels,
    samples_on_grids,
    snap_groups,
    terms_of_kernels,
)
from samebits.numerics.exact.operations.registry import NotExactError, bits_for, check_float32, exact, summed

if TYPE_CHECKING:
    from torch import Tensor

aten = torch.ops.aten


def _bits(terms: int, *tensors: Tensor) -> int:
    """Bits of so many products. Raises NotExactError: they are too few, or a tensor is not float32."""
    for tensor in tensors:
        check_float32(tensor)
    return bits_for(terms)


def _layout_of(x: Tensor, weight: Tensor, settings: tuple[Any, ...]) -> Layout:
    layout = Layout(*settings)
    try:
        layout.geometry(x.shape[2:], weight.shape[2:])
    except ValueError as error:
        raise NotExactError(str(error)) from None
    return layout


def _kernels_on_grids(weight: Tensor, groups: int, bits: int) -> Tensor:
    """Kernels with a grid for each group."""
    return snap_groups(weight.contiguous(), 1, groups, bits)


@exact(aten.convolution)
def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    """A convolution over one, two or three axes.

    ``settings`` are stride, padding, dilation, transposed, output_padding and groups.

    Raises:
        NotExactError: a transposed convolution has an output_padding of at least the stride.
    """
    layout = _layout_of(x, weight, settings)
    bits = _bits(layout.terms(weight), x, weight)
    y = convolved(samples_on_grids(x, layout.groups, bits), _kernels_on_grids(weight, layout.groups, bits), layout)
    y = y.to(x.dtype).contiguous()
    return y if bias is None else y.add_(bias.view(-1, *(1 for _ in x.shape[2:])))


@exact(aten.convolution_backward)
def convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    _: list[int] | None,  # the bias's sizes, which are those of the weight's outputs
    *settings: Any,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of input, weight and bias; the last of ``settings`` is the mask of those to compute."""
    *forward_settings, wanted = settings
    layout, grad_bias = _layout_of(x, weight, tuple(forward_settings)), None
    if wanted[2]:
        dims = (0, *range(2, grad.dim()))
        grad_bias = summed(grad, dims).squeeze(dims).to(grad.dtype)
    return (
        images_gradient(grad, x.shape, weight, layout) if wanted[0] else None,
        kernels_gradient(grad, x, grad.new_empty(weight.shape), layout) if wanted[1] else None,
        grad_bias,
    )


def images_gradient(grad: Tensor, shape: torch.Size, weight: Tensor, layout: Layout) -> Tensor:
    """The gradient of images of a shape, in float32."""
    bits = _bits(layout.terms(weight), grad, weight)
    kernels = _kernels_on_grids(weight, layout.groups, bits)
    images = gradient_of_images(samples_on_grids(grad, layout.groups, bits), shape, kernels, layout)
    return images.to(grad.dtype).contiguous()


def kernels_gradient(grad: Tensor, x: Tensor, out: Tensor, layout: Layout) -> Tensor:
    """The gradient of kernels, in float32, written to ``out``, which has their shape."""
    bits = _bits(terms_of_kernels(grad, x, layout), grad, x)
    return out.copy_(gradient_of_kernels(channels_on_grids(grad, bits), channels_on_grids(x, bits), out.shape, layout))
