"""Distances between points, by differences in float64: PyTorch's kernels use products where points are many."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from samebits.numerics.exact.grid import blocks
from samebits.numerics.exact.operations.indexing import index_add
from samebits.numerics.exact.operations.reductions import norm_of, power_of
from samebits.numerics.exact.operations.registry import exact, wide
from samebits.numerics.exact.sums import fixed_order_sum

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

aten = torch.ops.aten


def _slopes(difference: Tensor, distance: Tensor, p: float) -> Tensor:
    """The gradient of a distance of order ``p`` for each coordinate of the first point; zero where both are one."""
    if p == 0:
        return torch.zeros_like(difference)
    sign = torch.sgn(difference)
    if p == 1:
        return sign
    if p == math.inf:
        return sign.mul_(difference.abs().to(torch.float32) == distance)
    safe = torch.where(distance == 0, 1.0, distance)
    if p == 2:
        return torch.where(distance == 0, 0.0, difference.div(safe))
    powers = power_of(difference.abs().div_(safe), p - 1.0)
    return torch.where((distance == 0) | (difference == 0), 0.0, sign.mul_(powers))


def _pairs(a: Tensor, b: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Differences of some points of ``a`` at once from all of ``b``: (batch, points, points, width)."""
    width = b.shape[0] * b.shape[1] * b.shape[2]
    for part in blocks(a.shape[1], width, a.device):
        yield part, a[:, part].unsqueeze(2).sub(b.unsqueeze(1))


def _batches(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, torch.Size]:
    """Both with one batch axis, in float64, and the axes in the place of that."""
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    one, other = (wide(x).expand(*batch, *x.shape[-2:]).reshape(math.prod(batch), *x.shape[-2:]) for x in (a, b))
    return one, other, batch


@exact(aten._cdist_forward)
def cdist(a: Tensor, b: Tensor, p: float, compute_mode: int | None) -> Tensor:  # noqa: ARG001
    """The distance of each point of ``a`` from each of ``b``, rounded once."""
    one, other, batch = _batches(a, b)
    out = a.new_zeros((one.shape[0], a.shape[-2], b.shape[-2]))
    for part, differences in _pairs(one, other):
        out[:, part] = norm_of(differences, p, (-1,)).squeeze(-1) if a.shape[-1] else 0.0
    return out.view(*batch, *out.shape[1:])


@exact(aten._cdist_backward)
def cdist_backward(grad: Tensor, a: Tensor, b: Tensor, p: float, distances: Tensor) -> Tensor:
    """The gradient of ``cdist`` for the points of ``a``."""
    one, other, batch = _batches(a, b)
    out = a.new_zeros(one.shape)
    shape = (one.shape[0], a.shape[-2], b.shape[-2])
    grads, known = (wide(x).reshape(shape) for x in (grad, distances))
    for part, differences in _pairs(one, other):
        slopes = _slopes(differences, known[:, part].unsqueeze(-1), p).mul_(grads[:, part].unsqueeze(-1))
        out[:, part] = fixed_order_sum(slopes, (2,)).squeeze(2)
    return out.view(*batch, *a.shape[-2:])


def _places(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    first, second = torch.triu_indices(count, count, 1, device=device).unbind()
    return first, second


@exact(aten._pdist_forward)
def pdist(x: Tensor, p: float = 2) -> Tensor:
    """The distance of each pair of points, rounded once."""
    first, second = _places(len(x), x.device)
    values = wide(x)
    return norm_of(values[first].sub_(values[second]), p, (-1,)).squeeze(-1).to(x.dtype)


@exact(aten._pdist_backward)
def pdist_backward(grad: Tensor, x: Tensor, p: float, distances: Tensor) -> Tensor:
    """The gradient of ``pdist``: for each point the sum over its pairs, whose terms are rounded first."""
    first, second = _places(len(x), x.device)
    values = wide(x)
    slopes = _slopes(values[first].sub_(values[second]), wide(distances).unsqueeze(-1), p)
    terms = slopes.mul_(grad.unsqueeze(-1)).to(x.dtype)
    return index_add(torch.zeros_like(x), 0, torch.cat([first, second]), torch.cat([terms, terms.neg()]))
