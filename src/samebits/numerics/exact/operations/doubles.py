"""Functions of float64 numbers, of which models make tables of positions.

``elementary`` has those of float32 numbers, with fewer terms. The steps are the same: each a kernel of its own, whose
result IEEE 754 fixes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from samebits.numerics.exact import elementary
from samebits.numerics.exact.elementary import LN2_HI, LN2_LO, circular, divisor, near_quadrants, polynomial
from samebits.numerics.exact.grid import power_of_two
from samebits.numerics.exact.operations.pointwise import broadcast
from samebits.numerics.exact.operations.registry import EXACT, refused_if

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

aten = torch.ops.aten
Number = float | int | bool

_EXP = [1.0 / math.factorial(k) for k in range(14)]
_LOG = [1.0 / (2 * k + 1) for k in range(12)]
_SIN = [(-1.0) ** k / math.factorial(2 * k + 1) for k in range(9)]
_COS = [(-1.0) ** k / math.factorial(2 * k) for k in range(9)]
_LARGEST_EXPONENT = 2.0**70  # its power of a number beside 1 is zero or infinite


def exp(x: Tensor) -> Tensor:
    """e**x, within 1 ulp."""
    return _exp_of_sum(x, torch.zeros_like(x))


def _exp_of_sum(x: Tensor, rest: Tensor) -> Tensor:
    """e**(x + rest) for a ``rest`` that is small beside 1, by Taylor's series beside a multiple of ln 2."""
    x = x.clamp(-750.0, 710.0)
    k = x.mul(elementary.INV_LN2).round_()
    r = x.sub(k.mul(LN2_HI)).sub_(k.mul(LN2_LO)).add_(rest)
    return _times_two_to(polynomial(r, _EXP), k)


def _times_two_to(x: Tensor, k: Tensor) -> Tensor:
    """Multiply by 2**k in place, in two steps: 2**k itself may be too large, or too small, for a number."""
    whole = k.nan_to_num().to(torch.int64)
    half = whole >> 1
    return x.mul_(power_of_two(half)).mul_(power_of_two(whole - half))


def log(x: Tensor) -> Tensor:
    """Natural logarithm, within 3 ulp."""
    result, rest = _log_as_sum(x)
    return result.add_(rest)


def _log_as_sum(x: Tensor) -> tuple[Tensor, Tensor]:
    """log(x) as the sum of two numbers, of which the second is at most the last bit of the first."""
    subnormal = x.abs() < 2.0**-1022
    bits = torch.where(subnormal, x.mul(2.0**54), x).view(torch.int64)
    e = (bits >> 52).sub_(1023).sub_(subnormal.to(torch.int64).mul_(54))
    m = bits.bitwise_and((1 << 52) - 1).bitwise_or_(1023 << 52).view(torch.float64)
    large = m > elementary.SQRT_TWO
    m, e = torch.where(large, m.mul(0.5), m), e.add_(large).to(torch.float64)
    s = m.sub(1.0).div_(m.add(1.0))
    of_m = polynomial(s.mul(s), _LOG).mul_(s).mul_(2.0)
    of_two = e.mul(LN2_HI)
    total = of_two.add(of_m)
    rest = of_m.sub(total.sub(of_two)).add_(e.mul(LN2_LO))
    total = torch.where(x > 0, total, torch.where(x == 0, -math.inf, math.nan))
    return torch.where(x == math.inf, x, total), torch.where(total.isfinite(), rest, 0.0)


def exp2(x: Tensor) -> Tensor:
    """2**x, within 2 ulp; whole powers are exact."""
    x = x.clamp(-1080.0, 1025.0)
    k = x.round()
    return _times_two_to(exp(x.sub(k).mul_(elementary.LN2)), k)


def sqrt(x: Tensor) -> Tensor:
    """Square root, within 1 ulp: a second step of Newton's method."""
    near = elementary.sqrt(x)
    return torch.where((near == 0) | (near == math.inf), near, x.div(near).add_(near).mul_(0.5))


def sin(x: Tensor) -> Tensor:
    """Sine of an angle up to 2**19, to 2**-52."""
    return torch.where(x == 0, x, _circular(x, 0))  # a zero keeps its sign


def cos(x: Tensor) -> Tensor:
    """Cosine of an angle up to 2**19, to 2**-52."""
    return _circular(x, 1)


def _circular(x: Tensor, quarter: int) -> Tensor:
    quadrant, r = near_quadrants(x)
    return circular(quadrant.add_(quarter), r, _SIN, _COS)


@refused_if("angles in float64 above 2**19 have no exact version; use float32", aten.sin, aten.cos)
def _is_far(_: Tensor, x: Tensor) -> Tensor | None:
    return ((x.abs() > elementary.NEAR) & x.isfinite()).any() if x.dtype == torch.float64 else None


def power(x: Tensor | Number, y: Tensor | Number) -> Tensor:
    """``x**y``, within 2 ulp if y is at most 1, and within 2 + |y| ulp else; small whole ones by multiplication."""
    if not isinstance(y, torch.Tensor):
        assert isinstance(x, torch.Tensor)
        if abs(y) <= 64 and y == int(y):
            return elementary.whole_power(x, int(y))
        if abs(y) == 0.5:
            return elementary.whole_power(sqrt(x), 1 if y > 0 else -1)
    base, exponent = broadcast(x, y, torch.float64)
    of_base, rest = _log_as_sum(base.abs())
    factor = exponent.clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    product = of_base.mul(factor)
    rest = _error_of_product(of_base, factor, product).add_(rest.mul(factor))
    rest = torch.where(product.abs() < 1000.0, rest, 0.0)
    return elementary.signed_power(_exp_of_sum(product, rest), base, exponent)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two numbers of 26 bits whose sum is ``x`` (Veltkamp 1968)."""
    scaled = x.mul(2.0**27 + 1)
    high = scaled.sub(scaled.sub(x))
    return high, x.sub(high)


def _error_of_product(x: Tensor, y: Tensor, product: Tensor) -> Tensor:
    """What the rounded product of two numbers lacks (Dekker 1971)."""
    x_high, x_low = _halves(x)
    y_high, y_low = _halves(y)
    error = x_high.mul(y_high).sub_(product).add_(x_high.mul(y_low)).add_(x_low.mul(y_high))
    return error.add_(x_low.mul(y_low))


def _enter(packet: Any, function: Callable[..., Tensor]) -> None:
    """Let an exact version take float64 numbers too."""
    of_floats = EXACT[packet]

    def version(*values: Tensor | Number) -> Tensor:
        if torch.result_type(values[0], values[-1]) != torch.float64:
            return of_floats(*values)  # type: ignore[no-any-return]
        return function(*(v.to(torch.float64).contiguous() if isinstance(v, torch.Tensor) else v for v in values))

    EXACT[packet] = version


for _function in (exp, log, exp2, sqrt, sin, cos):
    _enter(getattr(aten, _function.__name__), _function)
_enter(aten.log2, lambda x: log(x).div_(divisor(x, elementary.LN2)))
_enter(aten.log10, lambda x: log(x).div_(divisor(x, elementary.LN10)))
_enter(aten.pow, power)
