"""exp, log, cos and the normal quantile from additions, multiplications and divisions alone.

Versions of C libraries differ between hosts in the last bit, and NumPy's differ between instruction sets. IEEE 754
fixes the basic operations and the square root. Each is a NumPy call of its own here, so that no compiler can fuse two
of them.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Array = NDArray[np.float64]

_LN2_HI = float.fromhex("0x1.62e42fee00000p-1")  # 33 bits, so that k * _LN2_HI is exact
_LN2_LO = float.fromhex("0x1.a39ef35793c76p-33")
_INV_LN2 = float.fromhex("0x1.71547652b82fep+0")
_SQRT_HALF = float.fromhex("0x1.6a09e667f3bcdp-1")
_PI = float.fromhex("0x1.921fb54442d18p+1")

_EXP = [1.0 / float(np.prod(np.arange(1, k + 1, dtype=np.int64))) for k in range(14)]
_LOG = [1.0 / (2 * k + 1) for k in range(12)]


def _polynomial(x: Array, coefficients: Sequence[float]) -> Array:
    """Horner's rule; ``coefficients`` from the constant term upwards."""
    total = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = np.add(np.multiply(total, x), coefficient)
    return total


def exp(x: Array) -> Array:
    """e**x for |x| below 700, within 1 ulp.

    Taylor's series to degree 13 after subtraction of the nearest multiple of ln 2 (Cody and Waite 1980).
    """
    k = np.rint(np.multiply(x, _INV_LN2))
    r = np.subtract(np.subtract(x, np.multiply(k, _LN2_HI)), np.multiply(k, _LN2_LO))
    return np.asarray(np.ldexp(_polynomial(r, _EXP), k.astype(np.int32)))


def log(x: Array) -> Array:
    """The natural logarithm of positive normal numbers, within 2 ulp.

    x = m * 2**e with m near 1, and log m = 2 artanh((m - 1) / (m + 1)) by its series.
    """
    m, e = np.frexp(x)
    small = m < _SQRT_HALF
    m = np.where(small, np.multiply(m, 2.0), m)
    e = np.where(small, e - 1, e).astype(np.float64)
    f = np.subtract(m, 1.0)
    s = np.divide(f, np.add(f, 2.0))
    series = np.multiply(np.multiply(s, 2.0), _polynomial(np.multiply(s, s), _LOG))
    return np.add(np.multiply(e, _LN2_HI), np.add(series, np.multiply(e, _LN2_LO)))


def cos_pi(fraction: Fraction) -> float:
    """cos(pi * fraction) for 0 <= fraction <= 1, within a few ulp: Taylor's series on [0, pi/4]."""
    if fraction > Fraction(1, 2):
        return -cos_pi(1 - fraction)
    use_sine = fraction > Fraction(1, 4)  # cos x = sin(pi/2 - x), where the argument is small
    x = _PI * float(Fraction(1, 2) - fraction if use_sine else fraction)
    term, total, k = (x, x, 1) if use_sine else (1.0, 1.0, 0)
    for _ in range(10):
        term = -term * (x * x) / ((k + 1) * (k + 2))
        total, k = total + term, k + 2
    return total


# fmt: off
# Wichura, "Algorithm AS 241: The percentage points of the normal distribution", Applied Statistics 37 (1988).
_A = [3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
      4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3]
_B = [1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
      2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3]
_C = [1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0,
      1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4]
_D = [1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1,
      1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9]
_E = [6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0, 2.96560571828504891230e-1,
      2.65321895265761230930e-2, 1.24266094738807843860e-3, 2.71155556874348757815e-5, 2.01033439929228813265e-7]
_F = [1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2,
      7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15]
# fmt: on


def normal_quantile(p: Array) -> Array:
    """The quantile of the standard normal distribution at probability ``p``, 0 < p < 1 (AS 241)."""
    q = np.subtract(p, 0.5)
    r = np.subtract(0.180625, np.multiply(q, q))
    central = np.multiply(q, np.divide(_polynomial(r, _A), _polynomial(r, _B)))
    tails = np.abs(q) > 0.425
    q, p = q[tails], p[tails]
    r = np.sqrt(np.negative(log(np.where(q < 0, p, np.subtract(1.0, p)))))
    near, far = np.subtract(r, 1.6), np.subtract(r, 5.0)
    size = np.where(
        r <= 5.0,
        np.divide(_polynomial(near, _C), _polynomial(near, _D)),
        np.divide(_polynomial(far, _E), _polynomial(far, _F)),
    )
    central[tails] = np.where(q < 0, np.negative(size), size)
    return central
