"""Sums into places that are given by indices, on a grid, so that their order does not matter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from samebits.numerics.exact.grid import bits_of_sum, shifter, snap_, top
from samebits.numerics.exact.operations.registry import NotExactError, exact, wide

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

aten = torch.ops.aten


def _summands(*tensors: Tensor) -> list[Tensor]:
    """float64 copies on one grid, on which the sum of all of their elements is exact."""
    values = [wide(tensor) for tensor in tensors]
    flat = [value.reshape(-1) for value in values if value.numel()]
    if not flat:
        return values
    tops = torch.stack([top(value, 0).reshape(()) for value in flat]).amax().reshape(1)
    shift = shifter(tops, bits_of_sum(sum(value.numel() for value in flat)))
    return [snap_(value, shift.view((1,) * value.dim())) if value.dim() else snap_(value, shift[0]) for value in values]


def _accumulated(x: Tensor, source: Tensor, put: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """``put`` adds the second into the first; integers need no grid."""
    if not x.is_floating_point() and not x.is_complex():
        return put(x.clone(), source)
    total, values = _summands(x, source)
    return put(total, values).to(x.dtype)


@exact(aten.embedding_dense_backward)
def embedding_dense_backward(
    grad: Tensor,
    indices: Tensor,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> Tensor:
    """Sum of the gradients of each row."""
    if scale_grad_by_freq:
        raise NotExactError("an embedding with scale_grad_by_freq has no exact version")
    flat, rows = indices.reshape(-1), grad.reshape(-1, grad.shape[-1])
    if padding_idx >= 0:
        rows = torch.where((flat == padding_idx).unsqueeze(1), 0.0, rows)
    (values,) = _summands(rows)
    total = torch.zeros((num_weights, rows.shape[1]), dtype=torch.float64, device=grad.device)
    return total.index_add_(0, flat, values).to(grad.dtype)


@exact(aten.index_add)
def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    """Sum."""
    return _accumulated(x, source if alpha == 1 else source.mul(alpha), lambda a, b: a.index_add_(dim, index, b))


@exact(aten.scatter_add)
def scatter_add(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """Sum."""
    part = source[tuple(slice(n) for n in index.shape)]
    return _accumulated(x, part, lambda a, b: a.scatter_add_(dim, index, b))


@exact(aten.index_put, aten._index_put_impl, aten._unsafe_index_put)
def index_put(
    x: Tensor,
    indices: list[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
    unsafe: bool = False,  # noqa: ARG001
) -> Tensor:
    """A sum, or values put into places that are all different."""
    places = tuple(slice(None) if index is None else index for index in indices)
    if accumulate:
        like = values.expand(x[places].shape)
        return _accumulated(x, like, lambda a, b: aten.index_put_(a, indices, b, True))
    result: Tensor = aten.index_put(x, indices, values)
    _check_written(result[places], values)
    return result


def _check_written(read: Tensor, values: Tensor) -> None:
    if not bool(((read == values) | (read.isnan() & values.isnan())).all()):
        raise NotExactError("values are put into one place twice, and which one stays is not fixed")


@exact(aten.scatter)
def scatter(x: Tensor, dim: int, index: Tensor, value: Tensor | float, *, reduce: str | None = None) -> Tensor:
    """Values put into places that are all different."""
    if reduce is not None:
        raise NotExactError("scatter with reduce has no exact version; use scatter_add")
    result = x.scatter(dim, index, value)
    if isinstance(value, torch.Tensor):
        _check_written(result.gather(dim, index), value[tuple(slice(n) for n in index.shape)])
    return result


@exact(aten.unfold_backward)
def unfold_backward(grad: Tensor, input_sizes: list[int], dim: int, size: int, step: int) -> Tensor:
    """Overlapping windows are summed in their order."""
    if not input_sizes:
        return grad.sum().reshape(())
    total = torch.zeros(input_sizes, dtype=torch.float64, device=grad.device)
    for offset in range(size):
        part = grad.select(-1, offset)
        count = part.shape[dim]
        places = torch.arange(offset, offset + (count - 1) * step + 1, step, device=grad.device)
        total.index_copy_(dim, places, total.index_select(dim, places).add_(part))
    return total.to(grad.dtype)
