"""Softmax and the norms over features, row by row."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from samebits.numerics.exact import elementary
from samebits.numerics.exact.compiled.library import compiled, threads
from samebits.numerics.exact.operations.reductions import divided, moments, norm_of
from samebits.numerics.exact.operations.registry import exact, summed, wide
from samebits.numerics.exact.sums import fixed_order_sum

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from samebits.numerics.exact.compiled.library import Kernels

aten = torch.ops.aten
V = TypeVar("V", bound="Callable[..., Any]")


def exponentials(values: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Float64 ``values`` less their largest along ``dim``, in place, the exponentials of that, and their sum."""
    values.sub_(values.amax(dim, keepdim=True))
    powers = elementary.exp(values)
    return values, powers, fixed_order_sum(powers, (dim,))


def _by_rows(name: str) -> Callable[[V], V]:
    """Let a kernel answer for rows: of one tensor, or of a gradient and a tensor."""

    def kernel(library: Kernels, x: Tensor, *more: Any) -> Tensor | None:
        other = more[0] if isinstance(more[0], torch.Tensor) else None
        dim = more[0] if other is None else more[1]
        if x.dim() == 0 or dim % x.dim() != x.dim() - 1 or not library.takes(x, other):
            return None
        if not library.has(name, 2 * x.shape[-1]):
            return None
        out = torch.empty_like(x)
        library.call(name, x, other, out, x.numel() // x.shape[-1], x.shape[-1], threads())
        return out

    return compiled(kernel)


@exact(aten._softmax)
@_by_rows("softmax")
def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:  # noqa: ARG001
    """Exponentials along ``dim`` over their sum, rounded once."""
    if x.dim() == 0 or x.numel() == 0:
        return torch.ones_like(x)
    _, powers, total = exponentials(wide(x), dim)
    return powers.div_(total).to(x.dtype)


@exact(aten._softmax_backward_data)
@_by_rows("softmax_backward")
def softmax_backward(grad: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """``y * grad - y * sum(grad * y)`` with y the softmax, rounded once."""
    if y.dim() == 0:
        return torch.zeros_like(grad)
    product = wide(grad).mul_(y)
    return product.sub_(fixed_order_sum(product, (dim,)).mul(y)).to(input_dtype)


@exact(aten._log_softmax)
@_by_rows("log_softmax")
def log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:  # noqa: ARG001
    """The logarithm of ``softmax``, rounded once."""
    if x.dim() == 0 or x.numel() == 0:
        return torch.zeros_like(x)
    values, _, total = exponentials(wide(x), dim)
    return values.sub_(elementary.log(total)).to(x.dtype)


@exact(aten._log_softmax_backward_data)
@_by_rows("log_softmax_backward")
def log_softmax_backward(grad: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """``grad - exp(y) * sum(grad)`` with y the logarithms, rounded once."""
    if y.dim() == 0:
        return torch.zeros_like(grad)
    values = wide(grad)
    total = fixed_order_sum(values, (dim,))
    return values.sub_(elementary.exp(wide(y)).mul_(total)).to(input_dtype)


def affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, axes: int = 0) -> Tensor:
    """``x * weight + bias``, where ``x`` has ``axes`` more axes behind those of the parameters; two roundings.

    It follows a norm without parameters, as PyTorch does it for several shards at once.
    """
    around = (1,) * axes
    x = x if weight is None else x.mul(weight.view(*weight.shape, *around))
    return x if bias is None else x.add(bias.view(*bias.shape, *around))


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x.mul_(wide(weight))
    return x if bias is None else x.add_(wide(bias))


def _standardised(x: Tensor, dims: tuple[int, ...], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Float64 values of mean 0 and variance 1 over ``dims``, their mean and the reciprocal of their deviation."""
    middle, deviation, squares = moments(x, dims)
    count = math.prod(x.shape[d] for d in dims)
    scale = elementary.rsqrt(divided(squares, count).add_(eps))
    return deviation.mul_(scale), middle, scale


def _standardised_backward(grad: Tensor, y: Tensor, scale: Tensor, dims: tuple[int, ...]) -> Tensor:
    """``scale * (grad - mean(grad) - y * mean(grad * y))``, in float64."""
    count = math.prod(grad.shape[d] for d in dims)
    along = divided(fixed_order_sum(grad.mul(y), dims), count)
    level = divided(fixed_order_sum(grad, dims), count)
    return grad.sub(level).sub_(y.mul(along)).mul_(scale)


def _sum_of(x: Tensor, dims: tuple[int, ...], like: Tensor) -> Tensor:
    return fixed_order_sum(x, dims).reshape(like.shape).to(like.dtype)


Rows = tuple[int, int, int, int]
"""Number and width of rows, groups of channels, and positions of a channel, of which layer norm has none."""


def _normed(
    library: Kernels,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rows: Rows,
    moments: tuple[int, ...],
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Layer norm or group norm by the kernel of both, with mean and reciprocal deviation in the shape ``moments``."""
    if not library.has("layer_norm", 2 * rows[1]) or not library.takes(x, weight, bias):
        return None
    out, middle, scale = torch.empty_like(x), x.new_empty(moments), x.new_empty(moments)
    library.call("layer_norm", x, weight, bias, out, middle, scale, *rows, float(eps), threads())
    return out, middle, scale


def _normed_backward(
    library: Kernels, grad: Tensor, x: Tensor, weight: Tensor | None, moments: tuple[Tensor, Tensor], rows: Rows
) -> Tensor | None:
    """The gradient of the input of ``_normed``."""
    if not library.has("layer_norm_backward", 2 * rows[1]) or not library.takes(grad, x, weight, *moments):
        return None
    out = torch.empty_like(x)
    library.call("layer_norm_backward", grad, x, weight, *moments, out, *rows, threads())
    return out


def _layer_norm(
    library: Kernels, x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    outer = x.shape[: x.dim() - len(shape)]
    rows = math.prod(outer), math.prod(shape), 1, 0
    return _normed(library, x, weight, bias, eps, rows, (*outer, *(1,) * len(shape)))


@exact(aten.native_layer_norm)
@compiled(_layer_norm)
def layer_norm(
    x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm over the last axes (Ba, Kiros and Hinton 2016); also the mean and the reciprocal deviation."""
    dims = tuple(range(x.dim() - len(shape), x.dim()))
    y, middle, scale = _standardised(wide(x), dims, eps)
    return _affine(y, weight, bias).to(x.dtype), middle.to(x.dtype), scale.to(x.dtype)


def _input_gradient(
    library: Kernels,
    grad: Tensor,
    x: Tensor,
    dims: tuple[int, ...],
    weight: Tensor | None,
    moments: tuple[Tensor, Tensor],
    _: Tensor | None,
) -> Tensor | None:
    rows = math.prod(x.shape[: dims[0]]), math.prod(x.shape[dims[0] :]), 1, 0
    return _normed_backward(library, grad, x, weight, moments, rows)


@compiled(_input_gradient)
def _layer_norm_input_gradient(
    grad: Tensor,
    x: Tensor,
    dims: tuple[int, ...],
    weight: Tensor | None,
    moments: tuple[Tensor, Tensor],
    y: Tensor | None,
) -> Tensor:
    """The gradient of the input; ``y`` are the standardised values, if they are there already."""
    mean, rstd = moments
    y = wide(x).sub_(mean).mul_(rstd) if y is None else y
    inner = wide(grad)
    if weight is not None:
        inner.mul_(weight)
    return _standardised_backward(inner, y, rstd, dims).to(x.dtype)


@exact(aten.native_layer_norm_backward)
def layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    shape: list[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the input, the weight and the bias of ``layer_norm``, each None unless it is wanted."""
    dims = tuple(range(x.dim() - len(shape), x.dim()))
    outer = tuple(range(x.dim() - len(shape)))
    grad_x = grad_weight = grad_bias = None
    y = wide(x).sub_(mean).mul_(rstd) if output_mask[1] and weight is not None else None
    if output_mask[0]:
        grad_x = _layer_norm_input_gradient(grad, x, dims, weight, (mean, rstd), y)
    if y is not None and weight is not None:
        grad_weight = _sum_of(y.mul_(grad), outer, weight)
    if output_mask[2] and bias is not None:
        grad_bias = _sum_of(wide(grad), outer, bias)
    return grad_x, grad_weight, grad_bias


def _rows_of_groups(batch: int, channels: int, positions: int, groups: int) -> Rows:
    return batch * groups, channels // groups * positions, groups, positions


def _group_norm(
    library: Kernels, x: Tensor, weight: Tensor | None, bias: Tensor | None, batch: int, *sizes_and_eps: Any
) -> tuple[Tensor, Tensor, Tensor] | None:
    channels, positions, groups, eps = sizes_and_eps
    rows = _rows_of_groups(batch, channels, positions, groups)
    return _normed(library, x, weight, bias, eps, rows, (batch, groups))


@exact(aten.native_group_norm)
@compiled(_group_norm)
def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    batch: int,
    channels: int,
    positions: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """GroupNorm over groups of channels and all positions (Wu and He 2018); also mean and reciprocal deviation."""
    y, middle, scale = _standardised(wide(x).reshape(batch, groups, channels // groups * positions), (2,), eps)
    y = _affine(y.view(batch, channels, positions), _column(weight), _column(bias))
    return y.view(x.shape).to(x.dtype), middle.view(batch, groups).to(x.dtype), scale.view(batch, groups).to(x.dtype)


def _column(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.view(-1, 1)


@exact(aten.native_group_norm_backward)
def group_norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    batch: int,
    channels: int,
    positions: int,
    groups: int,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the input, the weight and the bias of ``group_norm``, each None unless it is wanted."""
    sizes, flat = (batch, channels, positions, groups), (batch, channels, positions)
    grad_x = grad_weight = grad_bias = None
    y = _of_groups(x, mean, rstd, sizes) if output_mask[1] else None
    if output_mask[0]:
        grad_x = _group_norm_input_gradient(grad, x, weight, (mean, rstd), sizes, y)
    if y is not None:
        products = wide(grad).reshape(flat).mul_(y.view(flat))
        grad_weight = fixed_order_sum(products, (0, 2)).reshape(channels).to(x.dtype)
    if output_mask[2]:
        grad_bias = summed(grad.reshape(flat), (0, 2)).reshape(channels).to(x.dtype)
    return grad_x, grad_weight, grad_bias


def _of_groups(x: Tensor, mean: Tensor, rstd: Tensor, sizes: tuple[int, int, int, int]) -> Tensor:
    """The standardised values, (batch, groups, channels of a group * positions)."""
    batch, channels, positions, groups = sizes
    grouped = wide(x).reshape(batch, groups, channels // groups * positions)
    return grouped.sub_(mean.view(batch, groups, 1)).mul_(rstd.view(batch, groups, 1))


def _group_input_gradient(
    library: Kernels,
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    moments: tuple[Tensor, Tensor],
    sizes: tuple[int, int, int, int],
    _: Tensor | None,
) -> Tensor | None:
    return _normed_backward(library, grad, x, weight, moments, _rows_of_groups(*sizes))


@compiled(_group_input_gradient)
def _group_norm_input_gradient(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    moments: tuple[Tensor, Tensor],
    sizes: tuple[int, int, int, int],
    y: Tensor | None,
) -> Tensor:
    """The gradient of the input; ``y`` are the standardised values, if they are there already."""
    batch, channels, positions, groups = sizes
    y = _of_groups(x, *moments, sizes) if y is None else y
    inner = wide(grad).reshape(batch, channels, positions)
    if weight is not None:
        inner = inner.mul_(weight.view(-1, 1))
    scale = moments[1].view(batch, groups, 1).to(torch.float64)
    return _standardised_backward(inner.reshape(y.shape), y, scale, (2,)).view(x.shape).to(x.dtype)


def _all_but(x: Tensor, dim: int) -> tuple[int, ...]:
    return tuple(axis for axis in range(x.dim()) if axis != dim % x.dim())


@exact(aten._weight_norm_interface)
def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    """``v * g / norm`` with the norm of each slice along ``dim`` (Salimans and Kingma 2016), and the norms."""
    values = wide(v)
    norms = norm_of(values, 2, _all_but(v, dim))
    return values.mul_(wide(g).div(norms)).to(v.dtype), norms.to(v.dtype)


@exact(aten._weight_norm_interface_backward)
def weight_norm_backward(grad: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Gradients of ``weight_norm`` for ``v`` and ``g``."""
    grads, unit, size = wide(grad), wide(v).div_(wide(norms)), wide(norms)
    along = fixed_order_sum(grads.mul(unit), _all_but(v, dim))
    return grads.sub_(unit.mul(along)).mul_(wide(g).div(size)).to(v.dtype), along.to(g.dtype)
