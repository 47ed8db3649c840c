"""Rounding to grids of powers of two, on which sums and products of float64 numbers are exact, hence associative.

A grid is chosen by its top: values below 2**e are rounded to multiples of 2**(e - bits), which leaves integers of at
most ``bits`` bits times a power of two. Sums of such numbers are exact in float64 as long as they stay below 2**53
units, so neither order nor blocking nor fused multiply-add can change them (Ozaki, Ogita, Oishi and Rump 2012). A
matrix product rounds each line of its factors to a grid of its own, so that an element depends on its row and its
column alone, and not on what else is in the batch.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

MANTISSA = 53  # bits of a float64
FEWEST_BITS = 16
"""Fewest bits of a factor whose products are summed, at most 2^21; a window may be three bits above the largest."""
_BLOCK = 1 << 15  # elements that stay in a core's cache as float64


def bits_of_sum(terms: int) -> int:
    """Bits that each of ``terms`` terms may have if their sum is to be exact."""
    return MANTISSA - (max(terms, 1) - 1).bit_length()


def bits_of_products(terms: int) -> int:
    """Bits that both factors of ``terms`` products may have if the sum of the products is to be exact."""
    return bits_of_sum(terms) // 2


def blocks(rows: int, width: int, device: torch.device) -> Iterator[slice]:
    """Slices that cover all rows; on a CPU each has as many rows as its cache holds."""
    step = max(1, _BLOCK // max(width, 1)) if device.type == "cpu" else max(rows, 1)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def top(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """The least e with abs(x) < 2**e over ``dim``, kept as axes of size 1, as int64; read from the bits.

    Zeros and subnormal numbers count as the smallest normal ones; infinities and NaN give the largest e.
    """
    return top_of_magnitude(torch.amax(x.abs(), dim=dim, keepdim=True))


def top_of_magnitude(size: Tensor) -> Tensor:
    """``top`` of each non-negative float32 or float64 number."""
    if size.dtype == torch.float32:
        return (size.view(torch.int32) >> 23).to(torch.int64).sub_(126)
    return (size.view(torch.int64) >> 52).sub_(1022)


def shifter(tops: Tensor, bits: int) -> Tensor:
    """The float64 1.5 * 2**(52 + e - bits): adding and subtracting it rounds abs(x) < 2**e to the grid, ties to even.

    Grids finer than float64's own range become its finest one.
    """
    exponents = (tops + (1023 + 52 - bits)).clamp_(1, 2046)
    return ((exponents << 52) | (1 << 51)).view(torch.float64)


def shift_of(top: int, bits: int) -> float:
    """``shifter`` of one top that the host knows, as a Python number, which costs a GPU no transfer."""
    return math.ldexp(1.5, min(max(top + 1023 + 52 - bits, 1), 2046) - 1023)


def power_of_two(exponents: Tensor) -> Tensor:
    """2**n as float64, for integers n from -1022 to 1023."""
    return ((exponents + 1023) << 52).view(torch.float64)


def snap_(x: Tensor, shift: Tensor | float) -> Tensor:
    """Round float64 numbers in place; two kernels, so that nothing can simplify them away."""
    return x.add_(shift).sub_(shift)


def snap(x: Tensor, dim: int, bits: int) -> Tensor:
    """``x`` as float64, each line along ``dim`` rounded to ``bits`` bits of its own largest magnitude.

    The relative error of a line is at most 2**-bits of its largest element.
    """
    if x.numel() == 0:
        return x.to(torch.float64)
    return snap_(x.to(torch.float64, copy=True), shifter(top(x, dim), bits))


def snap_rows(x: Tensor, bits: int) -> Tensor:
    """``snap`` along the last axis, block by block."""
    if x.numel() == 0:
        return x.to(torch.float64)
    flat = x.reshape(-1, x.shape[-1])
    out = torch.empty(flat.shape, dtype=torch.float64, device=x.device)
    for part in blocks(flat.shape[0], flat.shape[1], x.device):
        rows = flat[part]
        snap_(out[part].copy_(rows), shifter(top(rows, -1), bits))
    return out.view(x.shape)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """(..., M, K) times (..., K, N), float32 in, float64 out, without negative zeros.

    With b = floor((53 - ceil(log2 K)) / 2) bits the error of an element is at most K * 2**-b * (1 + 2**-b / 2) times
    the largest magnitudes in its row of ``a`` and its column of ``b``, where subnormal numbers count as normal.
    """
    bits = bits_of_products(a.shape[-1])
    left = snap_rows(a, bits) if a.is_contiguous() else snap(a, -1, bits)
    right = snap_rows(b.mT, bits).mT if b.mT.is_contiguous() else snap(b, -2, bits)
    return exact_matmul(left, right)


def matmul_along(x: Tensor, axis: int, matrix: Tensor) -> Tensor:
    """``matmul`` of each line along an axis and a matrix (size, new size)."""
    return matmul(x.movedim(axis, -1).contiguous(), matrix).movedim(-1, axis)


def exact_matmul(a: Tensor, b: Tensor) -> Tensor:
    """The product of factors on grids, without negative zeros: a kernel's sum may start from either zero."""
    return torch.matmul(a, b).add_(0.0)


def fixed_order_sum(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Sum float64 numbers over ``dims``, which become axes of size 1, always in the same order: by halving.

    Neighbouring axes count as one, so that a sum over samples and positions is that over the rows of both. Each halving
    is one elementwise addition. The error is that of a pairwise sum, log2(n) roundings of float64.
    """
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
