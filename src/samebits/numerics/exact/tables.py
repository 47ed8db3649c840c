"""Functions as tables of short Taylor polynomials, and the bits of 2 / pi, computed once in decimals and integers.

Python's ``decimal`` and integers are the same on every host. Nothing here calls a C library.
"""

from __future__ import annotations

from decimal import Decimal, localcontext
from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Taylor = Callable[[Decimal], tuple[Decimal, Decimal, Decimal, Decimal]]

_STEPS = 128  # nodes in a unit interval; the fourth term is then below 2**-34
_DIGITS = 50


class Table:
    """A smooth function between ``low`` and ``high``, as cubic polynomials around nodes; constant beyond the ends.

    ``taylor`` gives f, f', f'' / 2 and f''' / 6 at a node. The absolute error is at most 2**-34 times the largest
    fourth derivative over 24.
    """

    def __init__(self, low: int, high: int, taylor: Taylor) -> None:
        self._low, self._high, self._taylor = low, high, taylor
        self._on: dict[torch.device, list[Tensor]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """The function at float64 ``x``; beyond an end, its value at that end."""
        t = x.clamp(self._low, self._high).sub_(self._low).mul_(_STEPS)
        node = t.round()
        d = t.sub_(node).div_(_STEPS)
        index = node.nan_to_num_().to(torch.int64)
        c0, c1, c2, c3 = (c.take(index) for c in self._coefficients(x.device))
        return c3.mul_(d).add_(c2).mul_(d).add_(c1).mul_(d).add_(c0)

    @cache  # noqa: B019 - the tables live as long as the process
    def interleaved(self, device: torch.device) -> Tensor:
        """The coefficients, (nodes, 4)."""
        return torch.stack(self._coefficients(device), 1).contiguous()

    def _coefficients(self, device: torch.device) -> list[Tensor]:
        if device not in self._on:
            with localcontext() as context:
                context.prec = _DIGITS
                nodes = [Decimal(self._low) + Decimal(i) / _STEPS for i in range((self._high - self._low) * _STEPS + 1)]
                rows = [[float(value) for value in self._taylor(node)] for node in nodes]
            self._on[device] = [torch.tensor(c, dtype=torch.float64, device=device) for c in zip(*rows, strict=True)]
        return self._on[device]


@cache
def pi_scaled(bits: int) -> int:
    """floor(pi * 2**bits), by Machin's formula, pi = 16 arctan(1/5) - 4 arctan(1/239)."""
    guard = 32
    return (16 * _arctan_of_inverse(5, bits + guard) - 4 * _arctan_of_inverse(239, bits + guard)) >> guard


def _arctan_of_inverse(n: int, bits: int) -> int:
    power = (1 << bits) // n
    total, k, sign = 0, 1, 1
    while power:
        total += sign * (power // k)
        power //= n * n
        k, sign = k + 2, -sign
    return total


def _pi() -> Decimal:
    return Decimal(pi_scaled(160)) / Decimal(2**160)


Bells = list[tuple[Decimal, Decimal]]


def _bells(square: Decimal, a: Decimal, high: int) -> Bells:
    """B(x) = sqrt(square) * e**(-a * x * x), and its integral from 0, at the nodes from 0 to ``high``.

    From a node x to the next one, B(x + h) / B(x) = e**(-a * (2 * x * h + h * h)). Coefficients of its series in h are
    c(0) = 1 and c(n + 1) = -2 * a * (x * c(n) + c(n - 1)) / (n + 1); it is integrated term by term.
    """
    h = 1 / Decimal(_STEPS)
    least, slope = Decimal(10) ** -_DIGITS, -2 * a * h * h
    bell, integral, bells = square.sqrt(), Decimal(0), []
    for node in range(high * _STEPS + 1):
        bells.append((bell, integral))
        before, term, total, n = Decimal(0), Decimal(1), Decimal(0), 0  # with their powers of h
        while abs(term) + abs(before) > least:
            n += 1
            total += term / n
            before, term = term, slope * (node * term + before) / n
        integral += bell * h * total
        bell *= (slope * (2 * node + 1) / 2).exp()
    return bells


@cache
def _bells_of_erf() -> Bells:
    return _bells(4 / _pi(), Decimal(1), 4)


@cache
def _bells_of_normal() -> Bells:
    return _bells(1 / (2 * _pi()), Decimal("0.5"), 8)


def _erf_taylor(x: Decimal) -> tuple[Decimal, Decimal, Decimal, Decimal]:
    slope, erf = _bells_of_erf()[int(x * _STEPS)]
    return erf, slope, -x * slope, (2 * x * x - 1) * slope / 3


def _normal(x: Decimal) -> tuple[Decimal, Decimal]:
    """The normal distribution function and its density."""
    density, integral = _bells_of_normal()[int(abs(x) * _STEPS)]
    return (1 + 2 * integral.copy_sign(x)) / 2, density


def _cdf_taylor(x: Decimal) -> tuple[Decimal, Decimal, Decimal, Decimal]:
    cdf, p = _normal(x)
    return cdf, p, -x * p / 2, (x * x - 1) * p / 6


def _gelu_slope_taylor(x: Decimal) -> tuple[Decimal, Decimal, Decimal, Decimal]:
    cdf, p = _normal(x)
    return cdf + x * p, (2 - x * x) * p, (x**3 - 4 * x) * p / 2, (7 * x * x - x**4 - 4) * p / 6


erf_of_positive = Table(0, 4, _erf_taylor)
normal_cdf = Table(-8, 8, _cdf_taylor)
gelu_slope = Table(-8, 8, _gelu_slope_taylor)
"""Derivative of x * normal_cdf(x), the slope of GELU in its exact form."""

ARCTAN_STEPS = 32  # nodes between 0 and 1


def _arctan(x: Decimal) -> Decimal:
    """Euler's series, whose terms shrink by x * x / (1 + x * x), at most a half, or faster."""
    ratio = x * x / (1 + x * x)
    term = total = x / (1 + x * x)
    n = 1
    while abs(term) > abs(total) * Decimal(10) ** (-_DIGITS):
        term *= ratio * 2 * n / (2 * n + 1)
        total += term
        n += 1
    return total


@cache
def arctans(device: torch.device) -> Tensor:
    """The arcus tangent at the nodes between 0 and 1."""
    with localcontext() as context:
        context.prec = _DIGITS
        nodes = [float(_arctan(Decimal(i) / ARCTAN_STEPS)) for i in range(ARCTAN_STEPS + 1)]
    return torch.tensor(nodes, dtype=torch.float64, device=device)


LIMB_BITS = 26
LEAST_EXPONENT = -8
_QUADRANT_BITS, _FRACTION_BITS, _WORKING_BITS = 2, 96, 400


@cache
def turns(device: torch.device) -> list[Tensor]:
    """2**e * 2 / pi modulo 4 for e from ``LEAST_EXPONENT`` to 104, as four limbs of 26 bits, the least first.

    The upper limb has 20 bits: two of the quadrant and 18 of the 96 behind the point.
    """
    scaled = (2 << 2 * _WORKING_BITS) // pi_scaled(_WORKING_BITS)
    behind = _WORKING_BITS - _FRACTION_BITS
    rows = [
        ((scaled << i) >> (behind - LEAST_EXPONENT)) % (1 << (_QUADRANT_BITS + _FRACTION_BITS))
        for i in range(105 - LEAST_EXPONENT)
    ]
    limbs = [[(row >> (LIMB_BITS * i)) & ((1 << LIMB_BITS) - 1) for row in rows] for i in range(4)]
    return [torch.tensor(limb, dtype=torch.int64, device=device) for limb in limbs]
