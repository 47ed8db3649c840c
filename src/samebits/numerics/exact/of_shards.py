"""Functions of several shards at once that share a parameter: it is rounded once, and all shards' rows are one product.

They give the bits of the operations that ``torch.func.vmap`` would run, and stand in for PyTorch's functions there.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from samebits.numerics.exact.convolution import Layout
from samebits.numerics.exact.engine import below
from samebits.numerics.exact.grid import snapped
from samebits.numerics.exact.operations.convolutions import convolution, images_gradient, kernels_gradient
from samebits.numerics.exact.operations.indexing import embedding_dense_backward
from samebits.numerics.exact.operations.registry import bits_for
from samebits.numerics.exact.parameters import met, sum_at_once
from samebits.numerics.exact.products import (
    on_grids,
    product_of_lines,
    products_of_shards,
    rounded_matmul,
    sum_of_products,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

aten = torch.ops.aten
_MOST_LOOKED_UP = 2**22  # numbers of the tables of all shards whose gradients are summed at once
Function = torch.autograd.Function


def are_shared(parameter: Tensor) -> bool:
    """Whether all shards, on the first axis, have the same memory."""
    return len(parameter) == 1 or parameter.stride(0) == 0


class _Linear(Function):
    """``F.linear`` without a bias: (shards, ..., inputs) and (shards, outputs, inputs) to (shards, ..., outputs)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.use = met(weight)
        with below():
            return _times(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        with below():
            if ctx.needs_input_grad[0]:
                grad_x = _times(grad, weight.mT)
            if ctx.needs_input_grad[1]:
                grads, rows = _rows(grad), _rows(x)
                bits = bits_for(rows.shape[1])
                if ctx.use is not None:
                    sum_of = partial(sum_of_products, grads, rows, bits, ctx.use.windows.spare)
                    grad_weight = sum_at_once(ctx.use, weight.shape, sum_of)
                if grad_weight is None:
                    grad_weight = products_of_shards(grads, rows, bits)
        return grad_x, grad_weight


def _times(x: Tensor, weight: Tensor) -> Tensor:
    """Rows of ``x`` (shards, ..., terms) times a matrix (shards, outputs, terms), rounded to float32 once."""
    bits = bits_for(x.shape[-1])
    if are_shared(weight):
        y = product_of_lines(_rows(x).flatten(0, 1), weight[0], bits)
    else:
        y = rounded_matmul(*on_grids(_rows(x), weight.mT))
    return _shaped(y, *x.shape[:-1], weight.shape[1])


def _shaped(y: Tensor, *shape: int) -> Tensor:
    """A new tensor in another shape; a model could not write to a view of it."""
    shaped: Tensor = aten._unsafe_view(y, shape)
    return shaped


def _rows(x: Tensor) -> Tensor:
    """(shards, ..., width) as (shards, rows, width)."""
    return x.reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])


class _Convolution(Function):
    """A convolution without a bias: (shards, samples, channels, ...) and (shards, outputs, channels, ...)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layout: Layout) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layout = layout
        with below():
            return _by_kernels(x, weight, lambda x, weight: convolution(x, weight, None, *layout))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), layout = ctx.saved_tensors, ctx.layout
        grad_x = grad_weight = None
        with below():
            if ctx.needs_input_grad[0]:

                def of_images(grad: Tensor, weight: Tensor) -> Tensor:
                    return images_gradient(grad, torch.Size([len(grad), *x.shape[2:]]), weight, layout)

                grad_x = _by_kernels(grad, weight, of_images)
            if ctx.needs_input_grad[1]:
                grad_weight = grad.new_empty((len(grad), *weight.shape[1:]))
                for one in zip(grad, x, grad_weight, strict=True):
                    kernels_gradient(*one, layout)
        return grad_x, grad_weight, None


def _by_kernels(x: Tensor, weight: Tensor, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """A function of samples and kernels, called for all shards at once if they share the kernels."""
    if are_shared(weight):
        y = function(x.flatten(0, 1), weight[0])
        return _shaped(y, *x.shape[:2], *y.shape[1:])
    return torch.stack([function(*one) for one in zip(x, weight, strict=True)])


class _Lookup(Function):
    """Rows of an embedding: indices (shards, ...) and (shards, rows, width) to (shards, ..., width)."""

    @staticmethod
    def forward(ctx: Any, index: Tensor, weight: Tensor, padding: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape, ctx.padding, ctx.use = weight.shape, padding, met(weight)
        with below():
            if are_shared(weight):
                return torch.embedding(weight[0], index)
            return torch.stack([torch.embedding(rows, one) for one, rows in zip(index, weight, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        shards, rows, width = ctx.shape
        step = max(1, _MOST_LOOKED_UP // (rows * width))
        with below():
            index, slopes = index.flatten(1), grad.reshape(shards, -1, width)
            if ctx.padding >= 0:
                slopes = torch.where((index == ctx.padding).unsqueeze(2), 0.0, slopes)
            if index.shape[1] < rows and below.watch is None:  # how many rows are met is a number of a step
                grad_weight = sum_at_once(ctx.use, ctx.shape, partial(_sum_of_rows, index, slopes, rows))
                if grad_weight is not None:
                    return None, grad_weight, None
            found = []
            for first in range(0, shards, step):  # some shards have a table of their own each, behind each other
                part = index[first : first + step]
                tables = torch.arange(0, len(part) * rows, rows, device=part.device).unsqueeze(1)
                some = slopes[first : first + step]
                found.append(embedding_dense_backward(some, part.add(tables), len(part) * rows, -1, False))
        return None, torch.cat(found).view(ctx.shape), None


def _sum_of_rows(index: Tensor, slopes: Tensor, rows: int, shift: Tensor | float) -> tuple[Tensor, Tensor]:
    """``snapped_sum`` of tables of gradients, one for each shard; only rows that were looked up are made."""
    total, sizes = torch.zeros((rows, slopes.shape[2]), dtype=torch.float64), []
    for part, some in zip(index, slopes, strict=True):
        met_rows, places = torch.unique(part, return_inverse=True)
        values, size = snapped(embedding_dense_backward(some, places, len(met_rows), -1, False), shift)
        total.index_add_(0, met_rows, values)
        sizes.append(size)
    return total, torch.stack(sizes).amax()


class UnderVmap(Function):
    """A function that ``torch.func.vmap`` runs on the axis of shards by another; it keeps nothing of its own.

    Without an axis of shards there is no parameter, and so no gradient.
    """

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept."""


def _under_vmap(physical: type[Function], function: Callable[..., Tensor]) -> type[Function]:
    """A function of two tensors, and more, that under ``vmap`` is ``physical`` on the axis of shards."""

    class OfShards(UnderVmap):
        @staticmethod
        def forward(*args: Any) -> Tensor:
            return function(*args)

        @staticmethod
        def vmap(
            info: Any, in_dims: tuple[int | None, ...], x: Tensor, other: Tensor, *more: Any
        ) -> tuple[Tensor, int]:
            x, other = (first(t, dim, info.batch_size) for t, dim in zip((x, other), in_dims, strict=False))
            return _applied(physical, x, other, *more), 0

    return OfShards


def _applied(function: type[Function], *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return result


def first(x: Tensor, dim: int | None, shards: int) -> Tensor:
    """``x`` with the axis of shards in front."""
    if dim is None:
        return x.expand(shards, *x.shape)
    return x.movedim(dim, 0) if dim else x


_linear = _under_vmap(_Linear, F.linear)
_convolution = _under_vmap(_Convolution, lambda x, weight, layout: aten.convolution(x, weight, None, *layout))
_lookup = _under_vmap(_Lookup, lambda index, weight, padding: aten.embedding(weight, index, padding))


def _are_float32(*tensors: Tensor) -> bool:
    return all(tensor.dtype == torch.float32 for tensor in tensors)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``."""
    if not _are_float32(x, weight) or weight.dim() != 2:
        return F.linear(x, weight, bias)
    y = _applied(_linear, x, weight)
    return y if bias is None else y.add(bias)


def embedding(
    index: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """``F.embedding``."""
    if max_norm is not None or scale_grad_by_freq or sparse or not _are_float32(weight):
        return F.embedding(index, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    return _applied(_lookup, index, weight, padding)


def _convolved(function: Callable[..., Tensor], axes: int) -> Callable[..., Tensor]:
    """One of PyTorch's convolutions over so many axes."""

    def version(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: int | Sequence[int] = 1,
        padding: str | int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> Tensor:
        if isinstance(padding, str) or x.dim() != axes + 2 or not _are_float32(x, weight):
            return function(x, weight, bias, stride, padding, dilation, groups)
        stride, padding, dilation = (
            (n,) * axes if isinstance(n, int) else tuple(n) for n in (stride, padding, dilation)
        )
        y = _applied(_convolution, x, weight, Layout(stride, padding, dilation, False, (0,) * axes, groups))
        return y if bias is None else y.add(bias.view(-1, *(1,) * axes))

    return version


FORMS: dict[Any, Callable[..., Tensor]] = {
    F.linear: linear,
    F.embedding: embedding,
    F.conv1d: _convolved(F.conv1d, 1),
    F.conv2d: _convolved(F.conv2d, 2),
    F.conv3d: _convolved(F.conv3d, 3),
}
