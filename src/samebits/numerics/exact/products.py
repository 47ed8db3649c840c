"""Matrix products that are the same bits on every device.

Each line of a factor is rounded to a grid of its own (``grid.snap``) with so many bits that every product and every
partial sum is exact in float64. The scale of a result's element depends on its row and its column alone, so a product
does not depend on what else is in the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from samebits.numerics.exact.grid import bits_of_products, snap, snap_rows

if TYPE_CHECKING:
    from torch import Tensor


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """(..., M, K) times (..., K, N), float32 in, float64 out, without negative zeros.

    With b = floor((53 - ceil(log2 K)) / 2) bits the error of an element is at most K * 2**-b * (1 + 2**-b / 2) times
    the largest magnitudes in its row of ``a`` and its column of ``b``, where subnormal numbers count as normal.
    """
    bits = bits_of_products(a.shape[-1])
    left = snap_rows(a, bits) if a.is_contiguous() else snap(a, -1, bits)
    right = snap_rows(b.mT, bits).mT if b.mT.is_contiguous() else snap(b, -2, bits)
    return exact_matmul(left, right)


def exact_matmul(a: Tensor, b: Tensor) -> Tensor:
    """The product of factors that are on grids already; a sum of zeros may start from either sign of zero."""
    return torch.matmul(a, b).add_(0.0)
