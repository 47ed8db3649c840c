"""Matrix products: sums of products, rounded to float32 once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from samebits.numerics.exact.operations import complex_numbers
from samebits.numerics.exact.operations.reductions import total
from samebits.numerics.exact.operations.registry import NotExactError, bits_for, check_float32, exact
from samebits.numerics.exact.products import matmul, on_grids, rounded_matmul

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

aten = torch.ops.aten
Number = float | int


def _product(a: Tensor, b: Tensor, product: Callable[..., Tensor] = matmul) -> Tensor:
    """Float64 product of float32 factors; of integers, whose products are exact, in their own type."""
    if not a.is_floating_point() and not a.is_complex():
        return a.unsqueeze(-1).mul(b.unsqueeze(-3)).sum(-2, dtype=a.dtype)  # CUDA has no matrix product of integers
    check_float32(a)
    check_float32(b)
    bits_for(a.shape[-1])
    return product(a, b)


def _rounded(a: Tensor, b: Tensor) -> Tensor:
    """``_product``, rounded to float32 once."""
    return _product(a, b, lambda a, b: rounded_matmul(*on_grids(a, b)))


@exact(aten.mm, aten.bmm)
def mm(a: Tensor, b: Tensor) -> Tensor:
    """The product of two matrices, or of each pair in a batch."""
    if complex_numbers.is_complex(a, b):
        return complex_numbers.product(a, b)
    return _rounded(a, b)


@exact(aten._grouped_mm)
def grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Products of the groups that end at ``offs``, along whichever axis has no group of its own; zeros behind the last.

    Raises:
        NotExactError: the result is to have a bias or another type.
    """
    if bias is not None or out_dtype not in (None, a.dtype):
        raise NotExactError("with a bias or another type of the result it has no exact version")
    if offs is None:
        return mm(a, b)
    ends = [int(end) for end in offs]
    groups = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    if a.dim() == b.dim():
        return torch.stack([mm(a[:, part], b[part]) for part in groups])
    out = a.new_zeros((a.shape[-2], b.shape[-1]))
    for number, part in enumerate(groups):
        if a.dim() == 2:
            out[part] = mm(a[part], b[number])
        else:
            out[:, part] = mm(a[number], b[:, part])
    return out


@exact(aten.mv)
def mv(a: Tensor, x: Tensor) -> Tensor:
    """The product of a matrix and a vector."""
    return _rounded(a, x.unsqueeze(1)).squeeze(1)


@exact(aten.dot, aten.vdot)
def dot(x: Tensor, y: Tensor) -> Tensor:
    """The inner product of two vectors."""
    return _rounded(x.unsqueeze(0), y.unsqueeze(1)).reshape(())


@exact(aten.addmm, aten.baddbmm)
def addmm(c: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
    """``beta * c + alpha * (a @ b)``, each step rounded to float32.

    For other layouts of its arguments, and for several shards at once, PyTorch runs the steps one by one.
    """
    return _added(_rounded(a, b), c, beta, alpha)


def _added(product: Tensor, c: Tensor, beta: Number, alpha: Number) -> Tensor:
    if not product.is_floating_point():
        return product.mul_(int(alpha)).add_(c.mul(int(beta)))
    check_float32(c)
    product = product if alpha == 1 else product.mul(alpha)
    return product.add(c if beta == 1 else c.mul(beta)) if beta else product


@exact(aten.addmv)
def addmv(c: Tensor, a: Tensor, x: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
    """``beta * c + alpha * (a @ x)``, rounded as in ``addmm``."""
    return addmm(c.unsqueeze(-1) if c.dim() else c, a, x.unsqueeze(1), beta=beta, alpha=alpha).squeeze(1)


@exact(aten.addbmm)
def addbmm(c: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
    """``beta * c + alpha * (a @ b).sum(0)``, rounded as in ``addmm``."""
    return _added(total(mm(a, b), 0), c, beta, alpha)


@exact(aten.addr)
def addr(c: Tensor, x: Tensor, y: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
    """``beta * c + alpha * outer(x, y)``, rounded as in ``addmm``."""
    check_float32(x)
    check_float32(y)
    return _added(x.unsqueeze(1).mul(y), c, beta, alpha)
