"""Complex numbers as pairs of real ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from samebits.numerics.exact import elementary
from samebits.numerics.exact.operations.registry import NotExactError, check_float32, exact, wide
from samebits.numerics.exact.products import matmul

if TYPE_CHECKING:
    from torch import Tensor

aten = torch.ops.aten
Number = complex | float | int


def is_complex(*values: object) -> bool:
    """Whether complex numbers are among the values. Raises NotExactError: a tensor of them is not complex64."""
    found = False
    for value in values:
        if isinstance(value, complex):
            found = True
        elif isinstance(value, torch.Tensor) and value.is_complex():
            if value.dtype != torch.complex64:
                raise NotExactError(f"{value.dtype} has no exact version; use complex64")
            found = True
    return found


def parts(x: Tensor | Number) -> tuple[Any, Any]:
    """The real and the imaginary part, which is 0 for real numbers."""
    if not isinstance(x, torch.Tensor):
        return x.real, x.imag
    if not x.is_complex():
        return x, 0
    real, imaginary = torch.view_as_real(x.resolve_conj()).unbind(-1)
    return real, imaginary


def joined(real: Tensor, imaginary: Tensor) -> Tensor:
    """Complex numbers of two parts."""
    return torch.view_as_complex(torch.stack(torch.broadcast_tensors(real, imaginary), -1))  # type: ignore[no-untyped-call]


def mul(x: Tensor | Number, y: Tensor | Number) -> Tensor:
    """The product, each part of which is two products and their sum, each rounded; by a real number part by part."""
    (a, b), (c, d) = parts(x), parts(y)
    if not is_complex(y):
        return joined(torch.mul(a, c), torch.mul(b, c))
    if not is_complex(x):
        return joined(torch.mul(a, c), torch.mul(a, d))
    return joined(torch.mul(a, c).sub(torch.mul(b, d)), torch.mul(a, d).add(torch.mul(b, c)))


def div(x: Tensor | Number, y: Tensor | Number) -> Tensor:
    """The quotient, each part of which is computed in float64 and rounded once; by a real number part by part."""
    (a, b), (c, d) = parts(x), parts(y)
    device = next(value.device for value in (x, y) if isinstance(value, torch.Tensor))
    a, b, c, d = (torch.as_tensor(part, device=device).to(torch.float64) for part in (a, b, c, d))
    if not is_complex(y):
        return joined(a.div(c).to(torch.float32), b.div(c).to(torch.float32))
    size = c.mul(c).add_(d.mul(d))
    real, imaginary = a.mul(c).add(b.mul(d)).div(size), b.mul(c).sub(a.mul(d)).div(size)
    return joined(real.to(torch.float32), imaginary.to(torch.float32))


def absolute(x: Tensor) -> Tensor:
    """The magnitude, rounded once."""
    return elementary.hypot(*map(wide, parts(x))).to(torch.float32)


def sgn(x: Tensor) -> Tensor:
    """The number over its magnitude, zero for zero."""
    size = absolute(x)
    return mul(x, torch.where(size == 0, 0.0, torch.ones_like(size).div(size)))


def product(a: Tensor, b: Tensor) -> Tensor:
    """The product of matrices, (..., m, k) and (..., k, n): each part is one sum of 2k products."""
    (real, imaginary), (c, d) = parts(a), parts(b)
    both = torch.cat([real, imaginary], -1)
    columns = torch.cat([torch.cat([c, d.neg()], -2), torch.cat([d, c], -2)], -1)
    y = matmul(both, columns).to(torch.float32)
    return joined(*y.chunk(2, -1))


@exact(aten._conj_physical, aten.conj_physical)
def conjugate(x: Tensor) -> Tensor:
    """The complex conjugate."""
    if not x.is_complex():
        return x.clone()
    a, b = parts(x)
    return joined(a, b.neg())


@exact(aten.complex)
def of_parts(real: Tensor, imaginary: Tensor) -> Tensor:
    """Complex numbers of two parts. Raises NotExactError: they are not float32."""
    check_float32(real)
    return joined(real, imaginary)


@exact(aten.polar)
def polar(size: Tensor, angle: Tensor) -> Tensor:
    """Complex numbers of a magnitude and an angle, each part rounded once."""
    sizes, angles = wide(size), wide(angle)
    waves = (elementary.cos(angles), elementary.sin(angles))
    return joined(*(wave.mul(sizes).to(torch.float32) for wave in waves))


@exact(aten.angle)
def angle(x: Tensor) -> Tensor:
    """The angle from the positive real axis, rounded once; of negative real numbers pi."""
    a, b = parts(x)
    b = b if x.is_complex() else torch.where(a.isnan(), a, 0.0)
    return elementary.atan2(wide(b), wide(a).contiguous()).to(torch.float32)
