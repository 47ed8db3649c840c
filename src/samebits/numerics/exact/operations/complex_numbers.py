"""Complex numbers as pairs of real ones, and Fourier transforms as products with tables of sines and cosines."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from samebits.numerics.exact import elementary
from samebits.numerics.exact.grid import matmul
from samebits.numerics.exact.operations.registry import NotExactError, check_float32, exact, wide

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

aten = torch.ops.aten
Number = complex | float | int
_LONGEST = 8192
_SMALLEST = 2.0**-40  # a sine below is zero


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
    a, b = (wide(part) for part in parts(x))
    return elementary.sqrt(a.mul(a).add_(b.mul(b))).to(torch.float32)


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


# -- Fourier transforms --------------------------------------------------------------------------------------------


@cache
def _turns(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
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
    return cosine.to(device), sine.to(device)


def _scale(count: int, normalization: int) -> float:
    return (1.0, 1.0 / math.sqrt(count), 1.0 / count)[normalization]


def _along(x: Tensor, dim: int, matrix: Tensor, scale: float) -> Tensor:
    """Lines of real numbers along ``dim``, one part behind the other, times a matrix; rounded once."""
    lines = x.movedim(dim, -1).contiguous()
    y = matmul(lines, matrix)
    return y.mul_(scale).to(torch.float32).movedim(-1, dim)


def _both(x: Tensor, dim: int) -> Tensor:
    return torch.cat(parts(x), dim)


@exact(aten._fft_c2c)
def fft_of_complex(x: Tensor, dims: Sequence[int], normalization: int, forward: bool) -> Tensor:
    """The discrete Fourier transform, or its inverse, axis by axis."""
    is_complex(x)
    for dim in dims:
        cosine, sine = _turns(x.shape[dim], x.device)
        sine = sine if forward else sine.neg()
        matrix = torch.cat([torch.cat([cosine, sine.neg()], 1), torch.cat([sine, cosine], 1)], 0)
        y = _along(_both(x, dim), dim, matrix, _scale(x.shape[dim], normalization))
        x = joined(*y.chunk(2, dim))
    return x


@exact(aten._fft_r2c)
def fft_of_reals(x: Tensor, dims: Sequence[int], normalization: int, onesided: bool) -> Tensor:
    """The transform of real numbers, of whose last axis the first half with ``onesided``."""
    check_float32(x)
    dim = dims[-1]
    cosine, sine = _turns(x.shape[dim], x.device)
    kept = x.shape[dim] // 2 + 1 if onesided else x.shape[dim]
    matrix = torch.cat([cosine[:, :kept], sine[:, :kept].neg()], 1)
    y = _along(x, dim, matrix, _scale(x.shape[dim], normalization))
    return fft_of_complex(joined(*y.chunk(2, dim)), dims[:-1], normalization, True)


@exact(aten._fft_c2r)
def fft_to_reals(x: Tensor, dims: Sequence[int], normalization: int, last_dim_size: int) -> Tensor:
    """The inverse transform to real numbers, from the first half of the last axis."""
    x = fft_of_complex(x, dims[:-1], normalization, False)
    dim = dims[-1]
    cosine, sine = _turns(last_dim_size, x.device)
    kept = last_dim_size // 2 + 1
    twice = torch.full((kept, 1), 2.0, device=x.device)
    twice[0] = 1.0
    if last_dim_size % 2 == 0:
        twice[-1] = 1.0
    matrix = torch.cat([cosine[:kept].mul(twice), sine[:kept].mul(twice).neg()], 0)
    return _along(_both(x.narrow(dim, 0, kept), dim), dim, matrix, _scale(last_dim_size, normalization))
