"""The logarithm of the gamma function and its slope, by Stirling's series (Abramowitz and Stegun 6.1.41, 6.3.18).

Arguments below ``_FAR`` are moved there by the recurrence, and negative ones are reflected (6.1.17, 6.3.7).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from samebits.numerics.exact import elementary
from samebits.numerics.exact.elementary import polynomial

if TYPE_CHECKING:
    from torch import Tensor

_FAR = 10
_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6)
_SERIES = [number / (2 * k * (2 * k - 1)) for k, number in enumerate(_BERNOULLI, start=1)]
_SLOPES = [number / (2 * k) for k, number in enumerate(_BERNOULLI, start=1)]


def _reciprocal_square(far: Tensor) -> Tensor:
    return torch.ones_like(far).div_(far.mul(far))


def _half_turn(x: Tensor) -> Tensor:
    """Pi times the distance of ``x`` from the nearest whole number, which is exact, with its sign."""
    return x.sub(x.round()).mul_(math.pi)


def lgamma(x: Tensor) -> Tensor:
    """The logarithm of the absolute value of gamma(x), to 2**-45 of the larger of it and 1; infinite at its poles."""
    positive = torch.where(x > 0, x, x.neg().add_(1.0))
    near = positive < _FAR
    product = torch.ones_like(x)
    for k in range(_FAR):
        product = torch.where(near, product.mul(positive.add(k)), product)
    far = torch.where(near, positive.add(_FAR), positive)
    series = polynomial(_reciprocal_square(far), _SERIES).div_(far)
    result = far.sub(0.5).mul_(elementary.log(far)).sub_(far).add_(0.5 * math.log(2 * math.pi)).add_(series)
    result.sub_(elementary.log(product))
    reflected = elementary.log(elementary.sin(_half_turn(x)).abs_()).neg_().add_(math.log(math.pi)).sub_(result)
    result = torch.where(x > 0, result, reflected)
    result = torch.where((x == 1) | (x == 2), 0.0, result)
    return torch.where(x.isinf(), math.inf, result)


def digamma(x: Tensor) -> Tensor:
    """The slope of ``lgamma``, to 2**-43 of the larger of it and 1; infinite at zero, NaN at its other poles."""
    positive = torch.where(x > 0, x, x.neg().add_(1.0))
    near = positive < _FAR
    fractions = torch.zeros_like(x)
    for k in range(_FAR):
        fractions.add_(torch.ones_like(x).div_(positive.add(k)))
    far = torch.where(near, positive.add(_FAR), positive)
    result = elementary.log(far).sub_(torch.full_like(far, 0.5).div_(far))
    result.sub_(polynomial(_reciprocal_square(far), _SLOPES).div_(far.mul(far)))
    result = torch.where(near, result.sub(fractions), result)
    turn = _half_turn(x)
    reflected = result.sub(elementary.cos(turn).div_(elementary.sin(turn)).mul_(math.pi))
    result = torch.where(x > 0, result, reflected)
    result = torch.where((x == x.round()) & (x < 0), math.nan, result)
    result = torch.where(x == 0, torch.full_like(x, math.inf).copysign_(x.neg()), result)
    return torch.where(x == math.inf, x, result)
