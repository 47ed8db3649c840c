"""Powers and cosines of Python's floats that are the same on every host, for code that knows nothing of them."""

from __future__ import annotations

import decimal
import math
from fractions import Fraction
from typing import Any

from samebits.portable.elementary import cos_pi

_CONTEXT = decimal.Context(prec=50)


class PortableFloat(float):
    """A float64 number whose powers are computed with 50 digits and rounded once; the C library's differ between hosts.

    Sums, products and quotients are those of IEEE 754. Whatever is computed from one is a PortableFloat, so that code
    that was written for floats can be handed some.
    """

    __slots__ = ()

    def __pow__(self, other: Any, modulo: None = None) -> Any:
        return power(self, other) if isinstance(other, int | float) else NotImplemented

    def __rpow__(self, other: Any, modulo: None = None) -> Any:
        return power(other, self) if isinstance(other, int | float) else NotImplemented


def _keep(name: str) -> None:
    inherited = getattr(float, name)

    def operation(self: PortableFloat, *others: Any) -> Any:
        value = inherited(self, *others)
        return PortableFloat(value) if isinstance(value, float) else value

    setattr(PortableFloat, name, operation)


for _one in ("add", "sub", "mul", "truediv"):
    _keep(f"__{_one}__")
    _keep(f"__r{_one}__")
for _one in ("neg", "pos", "abs"):
    _keep(f"__{_one}__")


def power(x: float, y: float) -> float:
    """``x**y``, correctly rounded but for rare cases. Raises what Python's own raises."""
    if y == 0.5 and x >= 0.0:
        return PortableFloat(math.sqrt(x))
    expected: Any = float(x) ** float(y)  # for its special cases and errors
    if isinstance(expected, complex) or x == 0.0 or not all(map(math.isfinite, (expected, x, y))):
        return expected  # type: ignore[no-any-return]
    return PortableFloat(_CONTEXT.power(decimal.Decimal(x), decimal.Decimal(y)))


def portable(value: Any) -> Any:
    """A value of a YAML file with its floats as PortableFloat and its lists as tuples."""
    if isinstance(value, list | tuple):
        return tuple(map(portable, value))
    return PortableFloat(value) if type(value) is float else value


def cos(x: float) -> PortableFloat:
    """The cosine of a number in radians, within a few ulp."""
    turned = Fraction(x) / Fraction(math.pi) % 2
    return PortableFloat(cos_pi(min(turned, 2 - turned)))
