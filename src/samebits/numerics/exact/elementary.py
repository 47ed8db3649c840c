"""Elementary functions as sequences of additions, multiplications, divisions and table look-ups in float64.

Each step is a kernel of its own, so that no compiler can fuse a multiplication with an addition; IEEE 754 fixes the
rest. Functions take float64 tensors and return new ones. Stated errors compare the result, rounded to float32, with the
true value, for arguments that are float32 numbers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from samebits.numerics.exact import tables
from samebits.numerics.exact.compiled.library import of_numbers
from samebits.numerics.exact.grid import power_of_two

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

LN2_HI = float.fromhex("0x1.62e42fee00000p-1")  # 33 bits, so that k * LN2_HI is exact
LN2_LO = float.fromhex("0x1.a39ef35793c76p-33")
LN2, LN10 = float.fromhex("0x1.62e42fefa39efp-1"), float.fromhex("0x1.26bb1bbb55516p+1")
INV_LN2 = float.fromhex("0x1.71547652b82fep+0")
_HALF_PI = [float.fromhex(part) for part in ("0x1.921fb54400000p+0", "0x1.0b4611a600000p-34", "0x1.3198a2e037073p-69")]
_PI = float.fromhex("0x1.921fb54442d18p+1")
_TWO_OVER_PI = float.fromhex("0x1.45f306dc9c883p-1")
SQRT_TWO = float.fromhex("0x1.6a09e667f3bcdp+0")
NEAR = 2.0**19
"""Angles up to here have fewer than 2**20 quadrants, whose products with the parts of pi / 2 are exact."""

_EXP = [1.0 / math.factorial(k) for k in range(10)]
_EXPM1 = [*_EXP[1:], 1.0 / math.factorial(10)]
_LOG = [1.0 / (2 * k + 1) for k in range(9)]
_SIN = [(-1.0) ** k / math.factorial(2 * k + 1) for k in range(7)]
_COS = [(-1.0) ** k / math.factorial(2 * k) for k in range(8)]
_ATAN = [(-1.0) ** k / (2 * k + 1) for k in range(6)]


def divisor(like: Tensor, value: float) -> Tensor:
    """A divisor as a tensor: on a GPU, PyTorch multiplies by the reciprocal of a Python number."""
    return torch.full((1,) * like.dim(), value, dtype=like.dtype, device=like.device)


def polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Horner's rule; ``coefficients`` from the constant term upwards."""
    total = x.mul(coefficients[-1]).add_(coefficients[-2])
    for coefficient in reversed(coefficients[:-2]):
        total.mul_(x).add_(coefficient)
    return total


def _times_two_to(x: Tensor, k: Tensor) -> Tensor:
    """Multiply by 2**k in place, for normal results; ``k`` holds integers, and NaN counts as 0."""
    x.view(torch.int64).add_(k.nan_to_num_().to(torch.int64).bitwise_left_shift_(52))
    return x


@of_numbers()
def exp(x: Tensor) -> Tensor:
    """e**x, within 1 ulp: Taylor's series after taking out multiples of ln 2 (Cody and Waite 1980).

    Results beyond float32's range become infinity or zero when they are rounded to it.
    """
    x = x.clamp(-150.0, 150.0)
    k = x.mul(INV_LN2).round_()
    r = x.sub_(k.mul(LN2_HI)).sub_(k.mul(LN2_LO))
    return _times_two_to(polynomial(r, _EXP), k)


@of_numbers()
def expm1(x: Tensor) -> Tensor:
    """e**x - 1, within 1 ulp."""
    small = x.abs() < 0.35
    near = torch.where(small, x, 0.0)
    return torch.where(small, polynomial(near, _EXPM1).mul_(near), exp(x).sub_(1.0))


@of_numbers()
def log(x: Tensor) -> Tensor:
    """Natural logarithm, within 1 ulp: x = m * 2**e with m near 1, and log m = 2 artanh((m - 1) / (m + 1))."""
    bits = x.contiguous().view(torch.int64)
    e = (bits >> 52).sub_(1023)
    m = bits.bitwise_and((1 << 52) - 1).bitwise_or_(1023 << 52).view(torch.float64)
    large = m > SQRT_TWO
    m = torch.where(large, m.mul(0.5), m)
    e = e.add_(large).to(torch.float64)
    s = m.sub(1.0).div_(m.add(1.0))
    result = polynomial(s.mul(s), _LOG).mul_(s).mul_(2.0).add_(e.mul_(LN2))
    result = torch.where(x > 0, result, torch.where(x == 0, -math.inf, math.nan))
    return torch.where(x == math.inf, x, result)


@of_numbers()
def log1p(x: Tensor) -> Tensor:
    """log(1 + x), within 1 ulp."""
    return torch.where(x.abs() < 2.0**-26, x, log(x.add(1.0)))


@of_numbers()
def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e**-x), within 1 ulp."""
    return torch.ones_like(x).div_(exp(x.neg()).add_(1.0))


@of_numbers()
def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent, within 1 ulp."""
    t = expm1(x.abs().clamp_(max=20.0).mul_(2.0))
    return t.div_(t.add(2.0)).copysign_(x)


@of_numbers(table=tables.erf_of_positive.interleaved)
def erf(x: Tensor) -> Tensor:
    """Error function, within 1 ulp."""
    return tables.erf_of_positive(x.abs()).copysign_(x)


@of_numbers(near="all_near")
def sin(x: Tensor) -> Tensor:
    """Sine, within 1 ulp."""
    return torch.where(x == 0, x, _circular(x, 0))  # a zero keeps its sign


@of_numbers(near="all_near")
def cos(x: Tensor) -> Tensor:
    """Cosine, within 1 ulp."""
    return _circular(x, 1)


def _circular(x: Tensor, quarter: int) -> Tensor:
    """The sine of x + quarter * pi / 2."""
    quadrant, r = _quadrants(x)
    return circular(quadrant.add_(quarter), r, _SIN, _COS)


def circular(quadrant: Tensor, r: Tensor, sine: Sequence[float], cosine: Sequence[float]) -> Tensor:
    """The sine of quadrant * pi / 2 + r, from the series of both functions."""
    square = r.mul(r)
    size = torch.where((quadrant & 1).bool(), polynomial(square, cosine), polynomial(square, sine).mul_(r))
    return torch.where((quadrant & 2).bool(), size.neg(), size)


def near_quadrants(x: Tensor) -> tuple[Tensor, Tensor]:
    """The k and r of x = k * pi / 2 + r, with r at most pi / 4 in magnitude, for x up to ``NEAR``."""
    k = x.mul(_TWO_OVER_PI).round_()
    r = x
    for part in _HALF_PI:
        r = r.sub(k.mul(part))
    return torch.where(x.abs() <= NEAR, k, 0.0).nan_to_num_().to(torch.int64), r


def _quadrants(x: Tensor) -> tuple[Tensor, Tensor]:
    """As ``near_quadrants`` for float32 numbers of any size, with k modulo 4."""
    quadrant, r = near_quadrants(x)
    far = x.abs() > NEAR
    if x.is_cuda or bool(far.any()):  # asking a GPU would wait for all work queued on it
        far_quadrant, far_r = _far_quadrants(x)
        quadrant, r = torch.where(far, far_quadrant, quadrant), torch.where(far, far_r, r)
    return quadrant, r


def _far_quadrants(x: Tensor) -> tuple[Tensor, Tensor]:
    """As ``_quadrants`` for float32 numbers of any size: x * 2 / pi modulo 4 in integers (Payne and Hanek 1983)."""
    bits = x.abs().to(torch.float32).view(torch.int32).to(torch.int64)
    m = bits.bitwise_and((1 << 23) - 1).bitwise_or_(1 << 23)
    e = (bits >> 23).sub_(127 + 23 + tables.LEAST_EXPONENT).clamp_(0, 104 - tables.LEAST_EXPONENT)
    mask = (1 << tables.LIMB_BITS) - 1
    limbs = []
    carry = torch.zeros_like(m)
    for limb in tables.turns(x.device):
        total = m.mul(limb.take(e)).add_(carry)
        limbs.append(total & mask)
        carry = total >> tables.LIMB_BITS
    above = (limbs[3] & ((1 << 18) - 1)).bitwise_left_shift_(26).bitwise_or_(limbs[2])  # 44 bits behind the point
    over = above >= 1 << 43
    above = torch.where(over, above - (1 << 44), above).to(torch.float64).mul_(2.0**-44)
    fraction = above.add_(limbs[1].to(torch.float64).mul_(2.0**-70)).add_(limbs[0].to(torch.float64).mul_(2.0**-96))
    r = fraction.mul_(_HALF_PI[0] + _HALF_PI[1])
    quadrant = ((limbs[3] >> 18) & 3).add_(over)
    negative = x < 0
    r = torch.where(torch.isfinite(x), torch.where(negative, r.neg(), r), math.nan)
    return torch.where(negative, quadrant.neg(), quadrant), r


@of_numbers()
def root_of_float(x: Tensor) -> Tensor:
    """Square root of float32 numbers, correctly rounded to float32.

    Kernels differ in the last bit of a float64 root. The root of a float32 number is never so near the middle between
    two float32 numbers that this bit matters.
    """
    return torch.sqrt(x.to(torch.float32).to(torch.float64)).to(torch.float32).to(torch.float64)


@of_numbers()
def sqrt(x: Tensor) -> Tensor:
    """Square root of any float64 numbers, to 2**-48: ``root_of_float`` and one step of Newton's method."""
    x, half = _near_one(x)
    near = root_of_float(x)
    better = x.div(near).add_(near).mul_(0.5)
    return torch.where((near == 0) | (near == math.inf), near, better).mul_(power_of_two(half))


@of_numbers()
def rsqrt(x: Tensor) -> Tensor:
    """1 / sqrt(x), within 1 ulp, and to 2**-46 in itself."""
    x, half = _near_one(x)
    near = torch.ones_like(x).div_(root_of_float(x))
    better = near.mul(near).mul_(x).mul_(-0.5).add_(1.5).mul_(near)
    return torch.where((near == 0) | near.isinf(), near, better).mul_(power_of_two(half.neg()))


def sinh(x: Tensor) -> Tensor:
    """Hyperbolic sine, within 1 ulp."""
    t = expm1(x.abs())
    return t.div(t.add(1.0)).add_(t).mul_(0.5).copysign_(x)


def cosh(x: Tensor) -> Tensor:
    """Hyperbolic cosine, within 1 ulp."""
    t = exp(x.abs())
    return torch.ones_like(t).div_(t).add_(t).mul_(0.5)


def atan(x: Tensor) -> Tensor:
    """Arcus tangent, within 1 ulp.

    With the nearest node c of a table, it is that of c and that of (x - c) / (1 + x * c) together.
    """
    size = x.abs()
    beyond = size > 1
    y = torch.where(beyond, torch.ones_like(x).div_(size), size)
    index = y.mul(tables.ARCTAN_STEPS).round_()
    node = index.div(divisor(index, tables.ARCTAN_STEPS))
    r = y.sub(node).div_(y.mul(node).add_(1.0))
    angle = polynomial(r.mul(r), _ATAN).mul_(r).add_(tables.arctans(x.device).take(index.nan_to_num_().to(torch.int64)))
    return torch.where(beyond, angle.neg().add_(_PI / 2), angle).copysign_(x)


def asin(x: Tensor) -> Tensor:
    """Arcus sine, within 1 ulp; NaN beyond 1."""
    return atan(x.div(sqrt(x.neg().add_(1.0).mul_(x.add(1.0)))))


def acos(x: Tensor) -> Tensor:
    """Arcus cosine, within 1 ulp; NaN beyond 1."""
    return atan(sqrt(x.neg().add_(1.0).div_(x.add(1.0)))).mul_(2.0)


def asinh(x: Tensor) -> Tensor:
    """Inverse of ``sinh``, within 1 ulp."""
    size = x.abs()
    square = size.mul(size)
    result = log1p(square.div(sqrt(square.add(1.0)).add_(1.0)).add_(size))
    return torch.where(size.isinf(), size, result).copysign_(x)


def acosh(x: Tensor) -> Tensor:
    """Inverse of ``cosh``, within 1 ulp; NaN below 1."""
    t = x.sub(1.0)
    return torch.where(x < 1, math.nan, log1p(sqrt(t.add(2.0).mul_(t)).add_(t)))


def atanh(x: Tensor) -> Tensor:
    """Inverse of ``tanh``, within 1 ulp; NaN beyond 1."""
    size = x.abs()
    return log1p(size.mul(2.0).div_(size.neg().add_(1.0))).mul_(0.5).copysign_(x)


def atan2(y: Tensor, x: Tensor) -> Tensor:
    """The angle of the point (x, y), within 1 ulp; that of zero and of infinity by the signs of both."""
    ratio = y.abs().div_(x.abs())
    ratio = torch.where(y.isinf() & x.isinf(), 1.0, torch.where((y == 0) & (x == 0), 0.0, ratio))
    angle = atan(ratio)
    return torch.where(x.signbit(), angle.neg().add_(_PI), angle).copysign_(y)


def hypot(x: Tensor, y: Tensor) -> Tensor:
    """The distance of the point (x, y) from zero, to 2**-48; infinite if either is."""
    return torch.where(x.isinf() | y.isinf(), math.inf, sqrt(x.mul(x).add_(y.mul(y))))


FUNCTIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    *(exp, expm1, log, log1p, sigmoid, tanh, erf, sin, cos, sqrt, rsqrt),
    *(sinh, cosh, atan, asin, acos, asinh, acosh, atanh),
)
"""The functions of one number, within 1 ulp, that PyTorch has under the same name."""


def _near_one(x: Tensor) -> tuple[Tensor, Tensor]:
    """The y and h of x = y * 4**h, with y from 1 to 4, unless x is zero or not finite."""
    half = (x.contiguous().view(torch.int64) >> 52).sub_(1023).bitwise_right_shift_(1).clamp_(-511, 511)
    return x.mul(power_of_two(half.mul(-2))), half


def power(x: Tensor, y: Tensor) -> Tensor:
    """``x**y``, within 1 ulp if the result's logarithm is below 2**7; negative numbers need whole exponents."""
    return signed_power(exp(log(x.abs()).mul_(y)), x, y)


def signed_power(size: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """``x**y`` of the power's size: with its sign, and where it is NaN or 1 by definition."""
    whole = y == y.round()
    odd = whole & (y.mul(0.5) != y.mul(0.5).round()) & y.isfinite()
    result = torch.where(torch.signbit(x) & odd, size.neg(), size)
    result = torch.where((x < 0) & x.isfinite() & ~whole, math.nan, result)
    return torch.where((y == 0) | (x == 1), 1.0, result)


def whole_power(x: Tensor, n: int) -> Tensor:
    """``x**n`` for any n, by ``integer_power``."""
    return integer_power(x, n) if n >= 0 else torch.ones_like(x).div_(integer_power(x, -n))


def integer_power(x: Tensor, n: int) -> Tensor:
    """``x**n`` for n >= 0 by repeated squaring."""
    result, base = torch.ones_like(x), x
    while n:
        if n & 1:
            result = result.mul(base)
        base, n = base.mul(base), n >> 1
    return result
