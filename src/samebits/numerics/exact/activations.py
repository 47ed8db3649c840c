"""Activations and their derivatives as sequences of exact steps in float64, see ``elementary``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from samebits.numerics.exact import elementary, tables
from samebits.numerics.exact.compiled.library import of_numbers

if TYPE_CHECKING:
    from torch import Tensor


@of_numbers(table=tables.normal_cdf.interleaved)
def gelu(x: Tensor) -> Tensor:
    """X times the normal distribution function, to 2**-33 of x; the relative error grows as the result shrinks."""
    return tables.normal_cdf(x).mul_(x.clamp(min=-8.0))  # below, the table is constant


@of_numbers(table=tables.gelu_slope.interleaved)
def gelu_slope(x: Tensor) -> Tensor:
    """Derivative of ``gelu``."""
    return tables.gelu_slope(x)


_GELU_SCALE, _GELU_CUBE = math.sqrt(2.0 / math.pi), 0.044715


def _gelu_inner(x: Tensor) -> Tensor:
    return x.mul(x).mul_(x).mul_(_GELU_CUBE).add_(x).mul_(_GELU_SCALE)


@of_numbers()
def gelu_tanh(x: Tensor) -> Tensor:
    """GELU in its form with tanh (Hendrycks and Gimpel 2016)."""
    return elementary.tanh(_gelu_inner(x)).add_(1.0).mul_(x).mul_(0.5)


@of_numbers()
def gelu_tanh_slope(x: Tensor) -> Tensor:
    """Derivative of ``gelu_tanh``."""
    t = elementary.tanh(_gelu_inner(x))
    inner_slope = x.mul(x).mul_(3.0 * _GELU_CUBE).add_(1.0).mul_(_GELU_SCALE)
    return t.mul(t).neg_().add_(1.0).mul_(inner_slope).mul_(x).add_(t).add_(1.0).mul_(0.5)


@of_numbers()
def silu(x: Tensor) -> Tensor:
    """``x * sigmoid(x)``."""
    return elementary.sigmoid(x).mul_(x)


@of_numbers()
def silu_slope(x: Tensor) -> Tensor:
    """Derivative of ``silu``: ``s + x * s * (1 - s)`` with s the sigmoid."""
    s = elementary.sigmoid(x)
    return s.neg().add_(1.0).mul_(s).mul_(x).add_(s)


@of_numbers()
def log_sigmoid(x: Tensor) -> Tensor:
    """Logarithm of ``sigmoid``."""
    return elementary.log1p(elementary.exp(x.abs().neg_())).neg_().add_(x.clamp(max=0.0))
