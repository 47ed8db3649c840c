"""Matrix products of numbers on grids: exact in float64, and rounded to float32 once.

Each line of a factor is rounded to a grid of its own, so that an element of the product depends on its row and its
column alone, and not on what else is in the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from samebits.numerics.exact.compiled.library import compiled, threads
from samebits.numerics.exact.grid import bits_of_products, slices, snap, snap_columns, snap_rows, snapped, snapped_sum
from samebits.numerics.exact.integer_products import multiply

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from samebits.numerics.exact.compiled.library import Kernels


def on_grids(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The factors of ``matmul``, rounded, as float64."""
    bits = bits_of_products(a.shape[-1])
    left = snap(a.mT, -2, bits).mT if a.dim() > 1 and a.mT.is_contiguous() else snap_rows(a, bits)
    return left, snap_rows(b.mT, bits).mT if b.mT.is_contiguous() else snap(b, -2, bits)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """(..., M, K) times (..., K, N), float32 in, float64 out, without negative zeros.

    With b = floor((53 - ceil(log2 K)) / 2) bits the error of an element is at most K * 2**-b * (2 + 2**-b) times the
    largest magnitudes in its row of ``a`` and its column of ``b``, where subnormal numbers count as normal.
    """
    return exact_matmul(*on_grids(a, b))


def matmul_along(x: Tensor, axis: int, matrix: Tensor) -> Tensor:
    """``matmul`` of each line along an axis and a matrix (size, new size)."""
    return matmul(x.movedim(axis, -1).contiguous(), matrix).movedim(-1, axis)


def _finished(library: Kernels, product: Tensor, bias: Tensor | None) -> Tensor | None:
    if not library.takes(product, bias, dtype=torch.float64):
        return None
    out = product.new_empty(product.shape, dtype=torch.float32)
    width = product.shape[-1] if product.dim() else 1
    library.call("finish", product, bias, out, product.numel() // width, width, threads())
    return out


@compiled(_finished)
def _finish(product: Tensor, bias: Tensor | None) -> Tensor:
    product.add_(0.0)
    return (product if bias is None else product.add_(bias)).to(torch.float32)


def rounded_matmul(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """``exact_matmul``, plus a float64 bias for each column, rounded to float32 once."""
    return _finish(multiply(a, b), bias)


_BUFFER = 1 << 17  # float64 numbers of a block of rows and its products, which stay in a core's cache
_FEWEST_ROWS = 256  # of a block: a product of fewer is slower


def row_blocks(rows: int, width: int) -> Iterator[slice]:
    """Slices that cover all rows, for products of blocks; ``width`` float64 numbers belong to a row."""
    return slices(rows, threads() * max(_FEWEST_ROWS, _BUFFER // max(width, 1)))


def _blockwise_product(
    library: Kernels, x: Tensor, bits: int, factor: Tensor, bias: Tensor | None = None
) -> Tensor | None:
    x = x.contiguous()
    if not library.is_host or not library.takes(x) or not library.takes(bias, dtype=torch.float64):
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


_LARGE = 1 << 21  # numbers of a matrix that few rows meet, which is rounded part by part and lies nowhere as a whole
_FEW = 512  # such rows
_LINES = 192  # of a part; no power of two, by which a cache would have room for few of them


def _by_blocks_of_matrix(library: Kernels, x: Tensor, matrix: Tensor, bits: int) -> Tensor | None:
    x, has_rows = x.contiguous(), matrix.is_contiguous()
    rows, width = len(x), len(matrix)
    if not library.is_host or rows > _FEW or matrix.numel() < _LARGE:
        return None
    if not library.takes(x, matrix if has_rows else matrix.T):
        return None
    left, product = snap_rows(x, bits), torch.empty((rows, width), dtype=torch.float64)
    for part in slices(width, threads() * _LINES):
        block = snap_rows(matrix[part], bits).T if has_rows else snap_columns(matrix.T, part, bits)
        torch.mm(left, block, out=product[:, part])
    return _finish(product, None)


@compiled(_by_blocks_of_matrix)
def product_of_lines(x: Tensor, matrix: Tensor, bits: int) -> Tensor:
    """Float32 rows times the lines of a float32 matrix, each on its own grid; rounded to float32 once.

    Shapes: (rows, terms) and (width, terms), which may be transposed, to (rows, width).
    """
    factor = snap_rows(matrix, bits).T if matrix.is_contiguous() else snap(matrix.T, 0, bits)
    return product_of_rows(x, bits, factor)


def _blockwise_sums(
    library: Kernels, left: Tensor, right: Tensor, left_shift: Tensor | float, right_shift: Tensor | float
) -> tuple[Tensor, ...] | None:
    if not library.is_host or not library.takes(left, right):
        return None
    given = (left, library.number(left_shift, left)), (right, library.number(right_shift, right))
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
def products_of_columns(
    left: Tensor, right: Tensor, left_shift: Tensor | float, right_shift: Tensor | float
) -> tuple[Tensor, ...]:
    """``left.T @ right`` and ``left.sum(0)`` of float32 numbers rounded as by ``snap_``, and the largest of each.

    Grids have to leave room for all rows, so that the float64 sums are exact.
    """
    (one, size), (other, other_size) = snapped(left, left_shift), snapped(right, right_shift)
    return multiply(one.T, other), one.sum(0), size, other_size


def _shard_by_shard(library: Kernels, left: Tensor, right: Tensor, bits: int) -> Tensor | None:
    left, right = left.contiguous(), right.contiguous()
    if not library.is_host or not library.takes(left, right):
        return None
    (shards, rows, height), width = left.shape, right.shape[2]
    out = torch.empty((shards, height, width), dtype=torch.float32)
    product = torch.empty((height, width), dtype=torch.float64)
    factors = [torch.empty((rows, n), dtype=torch.float64) for n in (height, width)]
    for shard in range(shards):
        for x, factor, n in zip((left, right), factors, (height, width), strict=True):
            library.call("snap_columns", x.data_ptr() + 4 * shard * rows * n, factor, 1, rows, n, bits, threads())
        torch.mm(factors[0].T, factors[1], out=product)
        target = out.data_ptr() + 4 * shard * height * width
        library.call("finish", product, None, target, height, width, threads())
    return out


@compiled(_shard_by_shard)
def products_of_shards(left: Tensor, right: Tensor, bits: int) -> Tensor:
    """``left.mT @ right`` of float32 columns, each on its own grid, rounded to float32 once.

    Shapes: (shards, rows, height) and (shards, rows, width) to (shards, height, width).
    """
    return rounded_matmul(snap(left, -2, bits).mT, snap(right, -2, bits))


def _added_by_blocks(
    library: Kernels, left: Tensor, right: Tensor, bits: int, shift: Tensor | float
) -> tuple[Tensor, Tensor] | None:
    left, right = left.contiguous(), right.contiguous()
    if not library.is_host or not library.takes(left, right):
        return None
    (shards, rows, height), width = left.shape, right.shape[2]
    total, size = torch.zeros((height, width), dtype=torch.float64), torch.zeros((), dtype=torch.float32)
    parts, number = list(row_blocks(height, width)), library.number(shift, left)
    product = torch.empty((parts[0].stop, width), dtype=torch.float64)
    step = max(1, height * width // (rows * (height + width)))  # shards whose factors take no more room than the total
    for first in range(0, shards, step):
        factors, others = (snap(x[first : first + step], -2, bits) for x in (left, right))
        for part in parts:
            block = product[: part.stop - part.start]
            for factor, other in zip(factors.mT, others, strict=True):
                torch.mm(factor[part], other, out=block)
                library.call("add_finished", block, total[part], size, block.numel(), number, threads())
    return total, size


@compiled(_added_by_blocks)
def sum_of_products(left: Tensor, right: Tensor, bits: int, shift: Tensor | float) -> tuple[Tensor, Tensor]:
    """``snapped_sum`` of ``products_of_shards``, of which none is in memory as a whole."""
    return snapped_sum(products_of_shards(left, right, bits), shift)


def exact_matmul(a: Tensor, b: Tensor) -> Tensor:
    """The product of factors on grids, without negative zeros: a kernel's sum may start from either zero."""
    return multiply(a, b).add_(0.0)
