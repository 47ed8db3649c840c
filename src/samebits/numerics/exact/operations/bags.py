"""Sums, means and maxima of the rows of an embedding in bags, and their gradients."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from samebits.numerics.exact.operations.indexing import index_add, index_reduce, scatter_add
from samebits.numerics.exact.operations.registry import NotExactError, exact, wide
from samebits.numerics.exact.sums import fixed_order_sum

if TYPE_CHECKING:
    from torch import Tensor

aten = torch.ops.aten
_SUM, _MEAN, _MAX = range(3)


@exact(aten._embedding_bag, aten._embedding_bag_forward_only)
def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,  # noqa: ARG001
    mode: int = _SUM,
    sparse: bool = False,  # noqa: ARG001
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A row for each bag; also the bag of each index, the sizes of bags, and in mode max the indices of the maxima."""
    starts = offsets[:-1] if include_last_offset else offsets
    bags = len(starts)
    places = torch.arange(len(indices), device=indices.device, dtype=starts.dtype)
    bag = torch.searchsorted(starts.contiguous(), places, right=True) - 1
    counts = (indices != padding_idx).unsqueeze(1)
    sizes = torch.zeros(bags, dtype=torch.int64, device=indices.device).scatter_add(0, bag, counts.squeeze(1).long())
    rows = weight[indices]
    start = rows.new_zeros((bags, weight.shape[1]))
    if mode == _MAX:
        rows = torch.where(counts, rows, -math.inf)
        out = index_reduce(start, 0, bag, rows, "amax", include_self=False)
        out = torch.where((sizes == 0).unsqueeze(1), 0.0, out)
        found = _first_of_each((rows == out[bag]) & counts, bag, bags)
        rows_and_none = torch.cat([indices.to(torch.int64), indices.new_full((1,), -1, dtype=torch.int64)])
        return out, bag, sizes, rows_and_none[found]
    if per_sample_weights is not None:
        rows = rows.mul(per_sample_weights.unsqueeze(1))
    out = index_add(start, 0, bag, torch.where(counts, rows, 0.0))
    if mode == _MEAN:
        out = out.div(sizes.clamp(min=1).unsqueeze(1).to(out.dtype))
    return out, bag, sizes, sizes.new_zeros(0)


def _first_of_each(equal: Tensor, bag: Tensor, bags: int) -> Tensor:
    """For each bag and column the first row where ``equal``, (rows, columns); the number of rows if there is none."""
    rows = torch.arange(len(equal), device=equal.device).unsqueeze(1)
    start = torch.full((bags, equal.shape[1]), len(equal), device=equal.device)
    return start.scatter_reduce(0, bag.unsqueeze(1).expand_as(equal), torch.where(equal, rows, len(equal)), "amin")


@exact(aten._embedding_bag_backward)
def embedding_bag_backward(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,  # noqa: ARG001
    bag: Tensor,
    sizes: Tensor,
    maxima: Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Tensor | None = None,
    padding_idx: int = -1,
) -> Tensor:
    """The gradient of the weight: for each row the sum of the gradients of the bags that it is in.

    Raises:
        NotExactError: gradients are to be sparse, or to be divided by how often a row was looked up.
    """
    if sparse:
        raise NotExactError("sparse gradients have no exact version")
    if scale_grad_by_freq:
        raise NotExactError("an embedding with scale_grad_by_freq has no exact version")
    start = grad.new_zeros((num_weights, grad.shape[1]))
    if mode == _MAX:
        return scatter_add(start, 0, maxima.clamp(min=0), torch.where(maxima < 0, 0.0, grad))
    terms = grad[bag]
    if mode == _MEAN:
        terms = terms.div(sizes[bag].clamp(min=1).unsqueeze(1).to(terms.dtype))
    if per_sample_weights is not None:
        terms = terms.mul(per_sample_weights.unsqueeze(1))
    return index_add(start, 0, indices, torch.where((indices != padding_idx).unsqueeze(1), terms, 0.0))


@exact(aten._embedding_bag_per_sample_weights_backward)
def embedding_bag_weights_backward(
    grad: Tensor,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,  # noqa: ARG001
    bag: Tensor,
    mode: int,  # noqa: ARG001
    padding_idx: int = -1,
) -> Tensor:
    """The gradient of the weights of samples, which mode sum alone has: products of rows and their bags' gradients."""
    products = wide(weight[indices]).mul_(grad[bag])
    total = fixed_order_sum(products, (1,)).squeeze(1).to(grad.dtype)
    return torch.where(indices == padding_idx, 0.0, total)
