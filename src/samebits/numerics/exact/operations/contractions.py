"""Matrix products and convolutions: sums of products, rounded to float32 once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from samebits.numerics.exact.grid import (
    FEWEST_BITS,
    bits_of_products,
    fixed_order_sum,
    matmul,
    on_grids,
    rounded_matmul,
)
from samebits.numerics.exact.operations import complex_numbers
from samebits.numerics.exact.operations.registry import NotExactError, check_float32, exact, wide
from samebits.numerics.exact.unfolding import Geometry, fold, windows_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

aten = torch.ops.aten
Number = float | int


def _product(a: Tensor, b: Tensor, product: Callable[..., Tensor] = matmul) -> Tensor:
    """Float64 product of float32 factors; of integers, whose products are exact, in their own type."""
    if not a.is_floating_point() and not a.is_complex():
        return a.unsqueeze(-1).mul(b.unsqueeze(-3)).sum(-2, dtype=a.dtype)  # CUDA has no matrix product of integers
    check_float32(a)
    check_float32(b)
    if bits_of_products(a.shape[-1]) < FEWEST_BITS:
        why = f"sums of {a.shape[-1]:,} products would keep fewer than {FEWEST_BITS} bits of a factor"
        raise NotExactError(f"{why}; more exact.shards, or smaller samples, make shorter sums")
    return product(a, b)


def _rounded(a: Tensor, b: Tensor) -> Tensor:
    """``_product``, rounded to float32 once."""
    return _product(a, b, lambda a, b: rounded_matmul(*on_grids(a, b)))


@exact(aten.mm, aten.bmm)
def mm(a: Tensor, b: Tensor) -> Tensor:
    """The product of two matrices, or of each pair in a batch."""
    if complex_numbers.is_complex(a, b):
        return complex_numbers.product(a, b)
    return _rounded(a, b)


@exact(aten._grouped_mm)
def grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Products of the groups that end at ``offs``, along whichever axis has no group of its own; zeros behind the last.

    Raises:
        NotExactError: the result is to have a bias or another type.
    """
    if bias is not None or out_dtype not in (None, a.dtype):
        raise NotExactError("with a bias or another type of the result it has no exact version")
    if offs is None:
        return mm(a, b)
    ends = offs.tolist()
    groups = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    if a.dim() == b.dim():
        return torch.stack([mm(a[:, part], b[part]) for part in groups])
    out = a.new_zeros((a.shape[-2], b.shape[-1]))
    for number, part in enumerate(groups):
        if a.dim() == 2:
            out[part] = mm(a[part], b[number])
        else:
            out[:, part] = mm(a[number], b[:, part])
    return out


@exact(aten.mv)
def mv(a: Tensor, x: Tensor) -> Tensor:
    """The product of a matrix and a vector."""
    return _rounded(a, x.unsqueeze(1)).squeeze(1)


@exact(aten.dot, aten.vdot)
def dot(x: Tensor, y: Tensor) -> Tensor:
    """The inner product of two vectors."""
    return _rounded(x.unsqueeze(0), y.unsqueeze(1)).reshape(())


@exact(aten.addmm, aten.baddbmm)
def addmm(c: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
    """``beta * c + alpha * (a @ b)``: the product is rounded to float32, and then the sum.

    For other layouts of its arguments PyTorch runs two operations, whose result is the same.
    """
    if alpha == 1 and a.is_floating_point():
        return _plus(_rounded(a, b), c, beta)
    return _added(_product(a, b), c, beta, alpha)


def _plus(product: Tensor, c: Tensor, beta: Number) -> Tensor:
    check_float32(c)
    return product.add(c if beta == 1 else c.mul(beta)) if beta else product


def _added(product: Tensor, c: Tensor, beta: Number, alpha: Number) -> Tensor:
    if not product.is_floating_point():
        return product.mul_(int(alpha)).add_(c.mul(int(beta)))
    return _plus((product if alpha == 1 else product.mul_(alpha)).to(torch.float32), c, beta)


@exact(aten.addmv)
def addmv(c: Tensor, a: Tensor, x: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
    """``beta * c + alpha * (a @ x)``, rounded as in ``addmm``."""
    return addmm(c.unsqueeze(-1) if c.dim() else c, a, x.unsqueeze(1), beta=beta, alpha=alpha).squeeze(1)


@exact(aten.addbmm)
def addbmm(c: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
    """``beta * c + alpha * (a @ b).sum(0)``, rounded as in ``addmm``."""
    return _added(fixed_order_sum(_product(a, b), (0,)).squeeze(0), c, beta, alpha)


@exact(aten.addr)
def addr(c: Tensor, x: Tensor, y: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
    """``beta * c + alpha * outer(x, y)``, rounded as in ``addmm``."""
    return addmm(c, x.unsqueeze(1), y.unsqueeze(0), beta=beta, alpha=alpha)


def _layout(
    x: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> tuple[Geometry, Tensor]:
    """Moves of a kernel over the larger image, and the kernels as (groups, outputs, inputs * kernel) of one group.

    A transposed convolution is the gradient of a convolution: its output is the larger image.
    """
    kernels = weight.reshape(groups, weight.shape[0] // groups, -1)
    geometry = Geometry.of(x.shape[2:], kernel=weight.shape[2:], stride=stride, padding=padding, dilation=dilation)
    if transposed:
        geometry = geometry.transposed(output_padding)
        if geometry.positions != tuple(x.shape[2:]):
            raise NotExactError("an output_padding from the stride on has no exact version")
    return geometry, kernels


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


def from_rows(rows: Tensor, batch: int, geometry: Geometry) -> Tensor:
    """Products of rows as an image: (groups, batch * positions, outputs / groups) to (batch, outputs, *positions)."""
    groups, _, outputs = rows.shape
    spread = rows.view(groups, batch, math.prod(geometry.positions), outputs)
    return spread.permute(1, 0, 3, 2).reshape(batch, groups * outputs, *geometry.positions)


def to_rows(x: Tensor, groups: int) -> Tensor:
    """The inverse of ``from_rows``: (batch, outputs, *positions) to (groups, batch * positions, outputs / groups)."""
    batch, outputs = x.shape[:2]
    positions = math.prod(x.shape[2:])
    spread = x.reshape(batch, groups, outputs // groups, positions)  # an empty batch leaves the size of -1 open
    return spread.permute(1, 0, 3, 2).reshape(groups, batch * positions, outputs // groups)


def folded(rows: Tensor, x_shape: Sequence[int], geometry: Geometry) -> Tensor:
    """The transpose of ``rows_of``: float64 sums over all windows of an element, (batch, channels, *size)."""
    groups = rows.shape[0]
    batch, channels = x_shape[:2]
    axes = len(geometry.size)
    spread = rows.view(groups, batch, *geometry.positions, channels // groups, *geometry.kernel)
    order = (1, 0, 2 + axes, *range(2, 2 + axes), *range(3 + axes, 3 + 2 * axes))
    return fold(spread.permute(order).flatten(1, 2), geometry)


@exact(aten.convolution)
def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    """A convolution as a product of unfolded windows, over one, two or three axes.

    ``settings`` are stride, padding, dilation, transposed, output_padding and groups.

    Raises:
        NotExactError: a transposed convolution has an output_padding of at least the stride.
    """
    geometry, kernels = _layout(x, weight, *settings)
    transposed, _output_padding, groups = settings[3:]
    if transposed:
        shape = (x.shape[0], groups * weight.shape[1], *geometry.size)
        y = folded(_product(to_rows(x, groups), kernels), shape, geometry)
    else:
        y = from_rows(_product(rows_of(x, geometry, groups), kernels.mT), x.shape[0], geometry)
    if bias is not None:
        y = y.add_(wide(bias).view(-1, *(1 for _ in geometry.size)))
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
    geometry, kernels = _layout(x, weight, *forward_settings)
    transposed, _output_padding, groups = forward_settings[3:]
    grad_x = grad_weight = grad_bias = None
    if wanted[0] and transposed:
        grad_x = from_rows(_product(rows_of(grad, geometry, groups), kernels.mT), x.shape[0], geometry)
    elif wanted[0]:
        grad_x = folded(_product(to_rows(grad, groups), kernels), x.shape, geometry)
    if wanted[1]:
        small, large = (x, grad) if transposed else (grad, x)
        terms = _product(to_rows(small, groups).mT, rows_of(large, geometry, groups))
        grad_weight = terms.reshape(weight.shape).to(weight.dtype)
    if wanted[2]:
        dims = (0, *range(2, grad.dim()))
        grad_bias = fixed_order_sum(wide(grad), dims).squeeze(dims).to(grad.dtype)
    return grad_x if grad_x is None else grad_x.to(x.dtype).contiguous(), grad_weight, grad_bias
