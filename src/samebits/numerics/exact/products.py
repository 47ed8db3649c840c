"""Matrix products of numbers on grids: exact in float64, and rounded to float32 once.

Each line of a factor is rounded to a grid of its own, so that an element of the product depends on its row and its
column alone, and not on what else is in the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from samebits.numerics.exact.compiled.library import compiled, threads
from samebits.numerics.exact.grid import bits_of_products, slices, snap, snap_rows, snapped_sum
from samebits.numerics.exact.integer_products import multiply

if TYPE_CHECKING:
    from torch import Tensor

    from samebits.numerics.exact.compiled.library import Kernels
    from samebits.numerics.exact.spare import SpareMemory


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


def _finished(library: Kernels, product: Tensor) -> Tensor | None:
    if not library.takes(product, dtype=torch.float64):
        return None
    out = product.new_empty(product.shape, dtype=torch.float32)
    library.call("finish", product, out, product.numel(), threads())
    return out


@compiled(_finished)
def _finish(product: Tensor) -> Tensor:
    return product.add_(0.0).to(torch.float32)


def rounded_matmul(a: Tensor, b: Tensor) -> Tensor:
    """``exact_matmul``, rounded to float32 once."""
    return _finish(multiply(a, b))


_LARGE = 1 << 21  # numbers of a matrix that is rounded part by part and lies nowhere as a whole
_ROWS, _LINES = 512, 192  # of a part; the second no power of two, by which a cache would have room for few of them


def _by_parts(library: Kernels, x: Tensor, matrix: Tensor, bits: int) -> Tensor:
    out = x.new_empty((len(x), len(matrix)))
    for rows in slices(len(x), _ROWS):
        left, to = snap_rows(x[rows], bits), out[rows]
        product = torch.empty(to.shape, dtype=torch.float64)
        for part in slices(len(matrix), threads() * _LINES):
            torch.mm(left, _lines_on_grids(matrix[part], bits), out=product[:, part])
        library.call("finish", product, to, to.numel(), threads())
    return out


def _by_tiles(library: Kernels, x: Tensor, matrix: Tensor, bits: int) -> Tensor | None:
    x, lines = x.contiguous(), matrix if matrix.is_contiguous() else matrix.T
    if not library.is_host or not library.takes(x, lines):
        return None
    if matrix.numel() >= _LARGE:
        return _by_parts(library, x, matrix, bits)
    (rows, terms), width = x.shape, len(matrix)
    out, is_transposed = x.new_empty((rows, width)), int(lines is not matrix)
    library.call("product_of_lines", x, lines, out, rows, terms, width, is_transposed, bits, threads())
    return out


@compiled(_by_tiles)
def product_of_lines(x: Tensor, matrix: Tensor, bits: int) -> Tensor:
    """Float32 rows times the lines of a float32 matrix, each on its own grid; rounded to float32 once.

    Shapes: (rows, terms) and (width, terms), which may be transposed, to (rows, width).
    """
    return rounded_matmul(snap_rows(x, bits), _lines_on_grids(matrix, bits))


def _lines_on_grids(matrix: Tensor, bits: int) -> Tensor:
    """The transpose of a matrix, (terms, width), of which each line is on its own grid, read as it lies in memory."""
    return snap_rows(matrix, bits).T if matrix.is_contiguous() else snap(matrix.T, 0, bits)


def _shard_by_shard(library: Kernels, left: Tensor, right: Tensor, bits: int) -> Tensor | None:
    left, right = left.contiguous(), right.contiguous()
    if not library.is_host or not library.takes(left, right):
        return None
    (shards, rows, height), width = left.shape, right.shape[2]
    out = left.new_empty((shards, height, width))
    library.call("products_of_columns", left, right, out, shards, rows, height, width, bits, threads())
    return out


@compiled(_shard_by_shard)
def products_of_shards(left: Tensor, right: Tensor, bits: int) -> Tensor:
    """``left.mT @ right`` of float32 columns, each on its own grid, rounded to float32 once.

    Shapes: (shards, rows, height) and (shards, rows, width) to (shards, height, width).
    """
    return rounded_matmul(snap(left, -2, bits).mT, snap(right, -2, bits))


def _added(
    library: Kernels, left: Tensor, right: Tensor, bits: int, spare: SpareMemory, shift: Tensor | float
) -> tuple[Tensor, Tensor] | None:
    left, right = left.contiguous(), right.contiguous()
    if not library.is_host or not library.takes(left, right):
        return None
    (shards, rows, height), width = left.shape, right.shape[2]
    total, size, number = spare.numbers(torch.Size((height, width))), library.place(left), library.number(shift, left)
    library.call("add_products", left, right, total, size, shards, rows, height, width, bits, number, threads())
    return total, size


@compiled(_added)
def sum_of_products(
    left: Tensor,
    right: Tensor,
    bits: int,
    spare: SpareMemory,  # noqa: ARG001 - of the kernel
    shift: Tensor | float,
) -> tuple[Tensor, Tensor]:
    """``snapped_sum`` of ``products_of_shards``, of which none is in memory as a whole."""
    return snapped_sum(products_of_shards(left, right, bits), shift)


def exact_matmul(a: Tensor, b: Tensor) -> Tensor:
    """The product of factors on grids, without negative zeros: a kernel's sum may start from either zero."""
    return multiply(a, b).add_(0.0)
