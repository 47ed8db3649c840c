"""The QR factorisation, by which factories draw orthogonal weights, and triangular systems, as in its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from samebits.numerics.exact.operations.reductions import norm_of
from samebits.numerics.exact.operations.registry import exact, wide
from samebits.numerics.exact.sums import fixed_order_sum

if TYPE_CHECKING:
    from torch import Tensor

aten = torch.ops.aten


def _reflect_(x: Tensor, v: Tensor) -> None:
    """Reflect the columns of ``x``, (..., rows, columns), at the plane of ``v``, (..., rows, 1), unless it is zero."""
    size = fixed_order_sum(v.mul(v), (-2,))
    along = fixed_order_sum(x.mul(v), (-2,)).mul_(2.0).div_(torch.where(size == 0, 1.0, size))
    x.sub_(v.mul(along))


@exact(aten.linalg_qr)
def qr(a: Tensor, mode: str = "reduced") -> tuple[Tensor, Tensor]:
    """Q and R by Householder's reflections in float64 (Golub and Van Loan 2013, 5.2.2), with LAPACK's signs."""
    r = wide(a).clone()
    rows, columns = a.shape[-2:]
    reflections = []
    for place in range(min(rows, columns)):
        v = r[..., place:, place : place + 1].clone()
        first, rest = v[..., :1, :], v[..., 1:, :]
        norm = norm_of(v, 2, (-2,))
        first.add_(norm.copysign_(first))
        v.mul_((rest != 0).any(-2, keepdim=True))  # LAPACK leaves a column that is done as it is
        _reflect_(r[..., place:, place:], v)
        reflections.append(v)
    kept = rows if mode == "complete" else min(rows, columns)
    r = r.triu()[..., :kept, :].to(a.dtype)
    if mode == "r":
        return a.new_zeros(0), r
    q = torch.eye(rows, kept, dtype=torch.float64, device=a.device).expand(*a.shape[:-2], rows, kept).clone()
    for place, v in reversed([*enumerate(reflections)]):
        _reflect_(q[..., place:, :], v)
    return q.to(a.dtype), r


@exact(aten.linalg_solve_triangular)
def solve_triangular(a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Tensor:
    """The X of ``a @ X = b``, or of ``X @ a = b`` unless ``left``, by substitution in float64, rounded once."""
    if not left:
        return solve_triangular(a.mT, b.mT, upper=not upper, unitriangular=unitriangular).mT
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    values, x = wide(a), wide(b).expand(*batch, *b.shape[-2:]).clone()
    count = a.shape[-1]
    for place in reversed(range(count)) if upper else range(count):
        row = x[..., place : place + 1, :]
        if not unitriangular:
            row.div_(values[..., place : place + 1, place : place + 1])
        rest = slice(0, place) if upper else slice(place + 1, count)
        x[..., rest, :].sub_(values[..., rest, place : place + 1].mul(row))
    return x.to(b.dtype)
