"""Sums in float64 in a fixed order, by halving."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch

from samebits.numerics.exact.compiled.library import SUFFIXES, compiled, threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from samebits.numerics.exact.compiled.library import Kernels


def _fixed_order_sum(library: Kernels, x: Tensor, dims: tuple[int, ...]) -> Tensor | None:
    x = x.contiguous()
    if not x.dim() or x.dtype not in SUFFIXES or not library.takes(x, dtype=x.dtype):
        return None
    for first, count in _runs(sorted(d % x.dim() for d in dims)):
        shape = (*x.shape[:first], *(1,) * count, *x.shape[first + count :])
        outer, terms = math.prod(x.shape[:first]), math.prod(x.shape[first : first + count])
        if not library.has("sum" + SUFFIXES[x.dtype], terms // 2):
            return None
        out = torch.empty(shape, dtype=torch.float64, device=x.device)
        inner = math.prod(x.shape[first + count :])
        library.call("sum" + SUFFIXES[x.dtype], x, out, outer, terms, inner, threads())
        x = out
    return x.to(torch.float64)


@compiled(_fixed_order_sum)
def fixed_order_sum(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Sum numbers in float64 over ``dims``, which become axes of size 1, always in the same order: by halving.

    Neighbouring axes count as one, so that a sum over samples and positions is that over the rows of both. Each halving
    is one elementwise addition. The error is that of a pairwise sum, log2(n) roundings of float64.
    """
    x = x.to(torch.float64)
    for first, count in _runs(sorted(d % x.dim() for d in dims) if x.dim() else []):
        line = x.flatten(first, first + count - 1) if count > 1 else x
        x = halved(line, first, torch.add, empty=0.0)
        x = x.view(*x.shape[:first], *(1,) * count, *x.shape[first + 1 :])
    return x


def _runs(axes: list[int]) -> Iterator[tuple[int, int]]:
    """First axis and length of each run of neighbours among sorted axes."""
    for _, run in itertools.groupby(enumerate(axes), key=lambda pair: pair[1] - pair[0]):
        members = [axis for _, axis in run]
        yield members[0], len(members)


def halved(x: Tensor, dim: int, join: Callable[..., Tensor], *, empty: float) -> Tensor:
    """Join the first half of an axis with the second until one element is left; ``empty`` if there is none."""
    count = x.shape[dim]
    if count == 0:
        shape = list(x.shape)
        shape[dim] = 1
        return x.new_full(shape, empty)
    while count > 1:
        half = count // 2
        joined = join(x.narrow(dim, 0, half), x.narrow(dim, half, half))
        if count % 2:
            first = joined.narrow(dim, 0, 1)
            join(first, x.narrow(dim, 2 * half, 1), out=first)
        x, count = joined, half
    return x
