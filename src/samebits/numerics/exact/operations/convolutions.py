"""Convolutions: each sample has a grid, and so have the kernels; sums of products are rounded to float32 once."""

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
from samebits.numerics.exact.grid import fixed_order_sum
from samebits.numerics.exact.operations.registry import NotExactError, bits_for, check_float32, exact, wide

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


def _on_one_grid(weight: Tensor, bits: int) -> Tensor:
    return snap_groups(weight.contiguous(), 1, 1, bits)


@exact(aten.convolution)
def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    """A convolution over one, two or three axes.

    ``settings`` are stride, padding, dilation, transposed, output_padding and groups.

    Raises:
        NotExactError: a transposed convolution has an output_padding of at least the stride.
    """
    layout = _layout_of(x, weight, settings)
    bits = _bits(layout.terms(weight), x, weight)
    y = convolved(samples_on_grids(x, bits), _on_one_grid(weight, bits), layout)
    if bias is not None:
        y = y.add_(wide(bias).view(-1, *(1 for _ in x.shape[2:])))
    return y.to(x.dtype).contiguous()


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
    layout = _layout_of(x, weight, tuple(forward_settings))
    grad_x = grad_weight = grad_bias = None
    if wanted[0]:
        bits = _bits(layout.terms(weight), grad, weight)
        images = gradient_of_images(samples_on_grids(grad, bits), x.shape, _on_one_grid(weight, bits), layout)
        grad_x = images.to(x.dtype).contiguous()
    if wanted[1]:
        bits = _bits(terms_of_kernels(grad, x, layout), grad, x)
        kernels = gradient_of_kernels(channels_on_grids(grad, bits), channels_on_grids(x, bits), weight.shape, layout)
        grad_weight = kernels.to(weight.dtype)
    if wanted[2]:
        dims = (0, *range(2, grad.dim()))
        grad_bias = fixed_order_sum(wide(grad), dims).squeeze(dims).to(grad.dtype)
    return grad_x, grad_weight, grad_bias
