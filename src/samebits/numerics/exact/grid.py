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

from samebits.numerics.exact.compiled.library import compiled, takes, threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from samebits.numerics.exact.compiled.library import Library

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
    return _slices(rows, max(1, _BLOCK // max(width, 1)) if device.type == "cpu" else max(rows, 1))


def _slices(rows: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


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


def largest(x: Tensor) -> Tensor:
    """The largest magnitude, in the type of ``x``; NaN if ``x`` has one."""
    if x.numel() == 0:
        return x.new_zeros(())
    least, most = torch.aminmax(x)
    return torch.maximum(most.abs(), least.abs())


def _snapped(library: Library, x: Tensor, shift: float) -> tuple[Tensor, Tensor] | None:
    if not takes(x):
        return None
    out, size = torch.empty(x.shape, dtype=torch.float64), torch.empty((), dtype=torch.float32)
    library.call("snap_to", x, out, size, x.numel(), shift, threads())
    return out, size


@compiled(_snapped)
def snapped(x: Tensor, shift: float) -> tuple[Tensor, Tensor]:
    """``x`` rounded as by ``snap_``, as new float64 numbers, and its largest magnitude."""
    return snap_(x.to(torch.float64, copy=True), shift), largest(x)


def _snap(library: Library, x: Tensor, dim: int, bits: int) -> Tensor | None:
    if x.dim() < 2 or dim % x.dim() != x.dim() - 2 or not takes(x):
        return None
    out = torch.empty(x.shape, dtype=torch.float64)
    library.call("snap_columns", x, out, math.prod(x.shape[:-2]), *x.shape[-2:], bits, threads())
    return out


@compiled(_snap)
def snap(x: Tensor, dim: int, bits: int) -> Tensor:
    """``x`` as float64, each line along ``dim`` rounded to ``bits`` bits of its own largest magnitude.

    The relative error of a line is at most 2**-bits of its largest element.
    """
    if x.numel() == 0:
        return x.to(torch.float64)
    return snap_(x.to(torch.float64, copy=True), shifter(top(x, dim), bits))


def _snap_rows(library: Library, x: Tensor, bits: int) -> Tensor | None:
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x
    if not takes(rows):
        return None
    out = torch.empty(x.shape, dtype=torch.float64)
    library.call("snap_rows", rows, out, *rows.shape, bits, threads())
    return out


@compiled(_snap_rows)
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


def on_grids(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The factors of ``matmul``, rounded, as float64."""
    bits = bits_of_products(a.shape[-1])
    left = snap(a.mT, -2, bits).mT if a.dim() > 1 and a.mT.is_contiguous() else snap_rows(a, bits)
    return left, snap_rows(b.mT, bits).mT if b.mT.is_contiguous() else snap(b, -2, bits)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """(..., M, K) times (..., K, N), float32 in, float64 out, without negative zeros.

    With b = floor((53 - ceil(log2 K)) / 2) bits the error of an element is at most K * 2**-b * (1 + 2**-b / 2) times
    the largest magnitudes in its row of ``a`` and its column of ``b``, where subnormal numbers count as normal.
    """
    return exact_matmul(*on_grids(a, b))


def matmul_along(x: Tensor, axis: int, matrix: Tensor) -> Tensor:
    """``matmul`` of each line along an axis and a matrix (size, new size)."""
    return matmul(x.movedim(axis, -1).contiguous(), matrix).movedim(-1, axis)


def _finished(library: Library, product: Tensor, bias: Tensor | None) -> Tensor | None:
    if not takes(product, bias, dtype=torch.float64):
        return None
    out = torch.empty(product.shape, dtype=torch.float32)
    width = product.shape[-1] if product.dim() else 1
    library.call("finish", product, bias, out, product.numel() // width, width, threads())
    return out


@compiled(_finished)
def _finish(product: Tensor, bias: Tensor | None) -> Tensor:
    product.add_(0.0)
    return (product if bias is None else product.add_(bias)).to(torch.float32)


def rounded_matmul(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """``exact_matmul``, plus a float64 bias for each column, rounded to float32 once."""
    return _finish(torch.matmul(a, b), bias)


_BUFFER = 1 << 17  # float64 numbers of a block of rows and its products, which stay in a core's cache
_FEWEST_ROWS = 256  # of a block: a product of fewer is slower


def row_blocks(rows: int, width: int) -> Iterator[slice]:
    """Slices that cover all rows, for products of blocks; ``width`` float64 numbers belong to a row."""
    return _slices(rows, threads() * max(_FEWEST_ROWS, _BUFFER // max(width, 1)))


def _blockwise_product(
    library: Library, x: Tensor, bits: int, factor: Tensor, bias: Tensor | None = None
) -> Tensor | None:
    if not takes(x) or not takes(bias, dtype=torch.float64):
        return None
    (rows, terms), width = x.shape, factor.shape[1]
    out = torch.empty((rows, width), dtype=torch.float32)
    source, target, team = x.data_ptr(), out.data_ptr(), threads()
    parts = list(row_blocks(rows, terms + width))
    snapped_rows = torch.empty((parts[0].stop, terms), dtype=torch.float64)
    products = torch.empty((parts[0].stop, width), dtype=torch.float64)
    for part in parts:
        count = part.stop - part.start
        library.call("snap_rows", source + 4 * terms * part.start, snapped_rows, count, terms, bits, team)
        torch.mm(snapped_rows[:count], factor, out=products[:count])
        library.call("finish", products, bias, target + 4 * width * part.start, count, width, team)
    return out


@compiled(_blockwise_product)
def product_of_rows(x: Tensor, bits: int, factor: Tensor, bias: Tensor | None = None) -> Tensor:
    """Float32 rows, each on its own grid, times a float64 factor on one, plus a bias; rounded to float32 once.

    Shapes: (rows, terms) and (terms, width) to (rows, width).
    """
    return rounded_matmul(snap_rows(x, bits), factor, bias)


def _blockwise_sums(
    library: Library, left: Tensor, right: Tensor, left_shift: float, right_shift: float
) -> tuple[Tensor, ...] | None:
    if not takes(left, right):
        return None
    given = (left, left_shift), (right, right_shift)
    widths = left.shape[1], right.shape[1]
    product, total = torch.zeros(widths, dtype=torch.float64), torch.zeros(widths[0], dtype=torch.float64)
    parts = list(row_blocks(left.shape[0], sum(widths)))
    values = [torch.empty((parts[0].stop, width), dtype=torch.float64) for width in widths]
    sizes = torch.zeros((2, len(parts)), dtype=torch.float32)
    for number, part in enumerate(parts):
        count = part.stop - part.start
        for (x, shift), out, size in zip(given, values, sizes, strict=True):
            rows = x.data_ptr() + 4 * x.shape[1] * part.start
            library.call("snap_to", rows, out, size.data_ptr() + 4 * number, count * x.shape[1], shift, threads())
        one, other = (out[:count] for out in values)
        product.addmm_(one.T, other)
        total.add_(one.sum(0))
    return product, total, *sizes.amax(1)


@compiled(_blockwise_sums)
def products_of_columns(left: Tensor, right: Tensor, left_shift: float, right_shift: float) -> tuple[Tensor, ...]:
    """``left.T @ right`` and ``left.sum(0)`` of float32 numbers rounded as by ``snap_``, and the largest of each.

    Grids have to leave room for all rows, so that the float64 sums are exact.
    """
    (one, size), (other, other_size) = snapped(left, left_shift), snapped(right, right_shift)
    return one.T @ other, one.sum(0), size, other_size


def exact_matmul(a: Tensor, b: Tensor) -> Tensor:
    """The product of factors on grids, without negative zeros: a kernel's sum may start from either zero."""
    return torch.matmul(a, b).add_(0.0)


def _fixed_order_sum(library: Library, x: Tensor, dims: tuple[int, ...]) -> Tensor | None:
    x = x.contiguous()
    if not x.dim() or not takes(x, dtype=torch.float64):
        return None
    for first, count in _runs(sorted(d % x.dim() for d in dims)):
        shape = (*x.shape[:first], *(1,) * count, *x.shape[first + count :])
        outer, terms = math.prod(x.shape[:first]), math.prod(x.shape[first : first + count])
        out = torch.empty(shape, dtype=torch.float64)
        library.call("sum", x, out, outer, terms, math.prod(x.shape[first + count :]), threads())
        x = out
    return x


@compiled(_fixed_order_sum)
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
