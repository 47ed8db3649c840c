"""Fourier transforms as products with tables of sines and cosines."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from samebits.numerics.exact import elementary
from samebits.numerics.exact.grid import bits_of_products, snap, snap_rows
from samebits.numerics.exact.operations.complex_numbers import is_complex, joined, parts
from samebits.numerics.exact.operations.registry import NotExactError, check_float32, exact
from samebits.numerics.exact.products import exact_matmul

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

aten = torch.ops.aten
_LONGEST = 8192
_SMALLEST = 2.0**-40  # a sine below is zero
_kept = lru_cache(maxsize=16)  # tables are large
_WIDE = 1 << 24  # numbers of a table that is kept as it is, and rounded for each transform


def _turns(count: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of ``2 * pi * j * k / count``, (count, count), in float32.

    Raises:
        NotExactError: the table would be too large.
    """
    if count > _LONGEST:
        raise NotExactError(f"a Fourier transform of {count:,} numbers has no exact version; {_LONGEST:,} may have one")
    steps = torch.arange(count, dtype=torch.float64).mul_(2.0 * math.pi)
    angles = steps.div(elementary.divisor(steps, count))
    waves = (elementary.cos(angles), elementary.sin(angles))
    numbers = torch.arange(count)
    places = torch.outer(numbers, numbers).remainder_(count)
    cosine, sine = (torch.where(wave.abs() < _SMALLEST, 0.0, wave).to(torch.float32)[places] for wave in waves)
    return cosine, sine


def _table(matrix: Tensor, device: torch.device) -> Tensor:
    """A matrix as it is kept: on its grids, unless that would take too much memory."""
    matrix = matrix.to(device)
    return matrix if matrix.numel() > _WIDE else _on_grids(matrix)


def _on_grids(matrix: Tensor) -> Tensor:
    """A table's numbers as float64 on the grids of its columns."""
    return snap(matrix, -2, bits_of_products(len(matrix)))


@_kept
def _of_complex(count: int, forward: bool, device: torch.device) -> Tensor:
    """The matrix (2 count, 2 count) of a transform, or of its inverse."""
    cosine, sine = _turns(count)
    sine = sine if forward else sine.neg()
    return _table(torch.cat([torch.cat([cosine, sine.neg()], 1), torch.cat([sine, cosine], 1)], 0), device)


@_kept
def _of_reals(count: int, kept: int, device: torch.device) -> Tensor:
    """The matrix (count, 2 kept) of the first ``kept`` numbers of a transform of real ones."""
    cosine, sine = _turns(count)
    return _table(torch.cat([cosine[:, :kept], sine[:, :kept].neg()], 1), device)


@_kept
def _to_reals(count: int, device: torch.device) -> Tensor:
    """The matrix (2 kept, count) from the first half of a transform to real numbers."""
    cosine, sine = _turns(count)
    kept = count // 2 + 1
    twice = torch.full((kept, 1), 2.0)
    twice[0] = 1.0
    if count % 2 == 0:
        twice[-1] = 1.0
    return _table(torch.cat([cosine[:kept].mul(twice), sine[:kept].mul(twice).neg()], 0), device)


def _along(x: Tensor, dim: int, table: Tensor, count: int, normalization: int) -> Tensor:
    """Lines along ``dim``, one part behind the other, times a table and PyTorch's factor; rounded once."""
    scale = (1.0, 1.0 / math.sqrt(count), 1.0 / count)[normalization]
    lines = snap_rows(x.movedim(dim, -1).contiguous(), bits_of_products(len(table)))
    product = exact_matmul(lines, table if table.dtype == torch.float64 else _on_grids(table))
    return product.movedim(-1, dim).mul_(scale).to(torch.float32)


@exact(aten._fft_c2c)
def fft_of_complex(x: Tensor, dims: Sequence[int], normalization: int, forward: bool) -> Tensor:
    """The discrete Fourier transform, or its inverse, axis by axis."""
    is_complex(x)
    for dim in dims:
        count = x.shape[dim]
        y = _along(torch.cat(parts(x), dim), dim, _of_complex(count, forward, x.device), count, normalization)
        x = joined(*y.chunk(2, dim))
    return x


@exact(aten._fft_r2c)
def fft_of_reals(x: Tensor, dims: Sequence[int], normalization: int, onesided: bool) -> Tensor:
    """The transform of real numbers, of whose last axis the first half with ``onesided``."""
    check_float32(x)
    dim, count = dims[-1], x.shape[dims[-1]]
    matrix = _of_reals(count, count // 2 + 1 if onesided else count, x.device)
    y = _along(x, dim, matrix, count, normalization)
    return fft_of_complex(joined(*y.chunk(2, dim)), dims[:-1], normalization, True)


@exact(aten._fft_c2r)
def fft_to_reals(x: Tensor, dims: Sequence[int], normalization: int, last_dim_size: int) -> Tensor:
    """The inverse transform to real numbers, from the first half of the last axis."""
    x = fft_of_complex(x, dims[:-1], normalization, False)
    dim, matrix = dims[-1], _to_reals(last_dim_size, x.device)
    half = torch.cat(parts(x.narrow(dim, 0, last_dim_size // 2 + 1)), dim)
    return _along(half, dim, matrix, last_dim_size, normalization)
