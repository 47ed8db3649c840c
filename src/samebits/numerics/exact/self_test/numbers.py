"""Numbers that every device makes alike from integers, and digests of results."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import torch

from samebits.numerics.exact.grid import bits_of_sum, power_of_two

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

_MIX = (0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64)  # odd, so that no bit is lost (Steele et al. 2014)
_COLUMNS = 4096
_DIGITS = 16


def words(count: int, salt: int, device: torch.device) -> Tensor:
    """``count`` pseudo-random int64 numbers, all bits of use; another ``salt`` gives other ones."""
    x = torch.arange(count, dtype=torch.int64, device=device).add_(salt << 32)
    for factor in _MIX:
        x = x.mul_(factor)
        x = x.bitwise_xor(x >> 31)
    return x


def integers(count: int, bits: int, salt: int, device: torch.device) -> Tensor:
    """Pseudo-random integers from 0 to 2**bits - 1, for ``bits`` up to 53, as float64."""
    return (words(count, salt, device) >> 9).bitwise_and_((1 << bits) - 1).to(torch.float64)


def factors(shape: tuple[int, ...], bits: int, salt: int, device: torch.device, *, signed: bool) -> Tensor:
    """Factors of products: integers whose magnitudes have so many bits, the highest of them set."""
    drawn = integers(math.prod(shape), bits, salt, device)
    size = drawn.mul(0.5).floor_().add_(2.0 ** (bits - 1))
    if signed:  # the lowest bit, which the halving has dropped, gives the sign
        size = torch.where(drawn == size.sub(2.0 ** (bits - 1)).mul_(2.0), size, size.neg())
    return size.view(shape)


def bits_of_factors(terms: int) -> tuple[int, int]:
    """Bits of left and right factors of so many products whose sum needs all bits of a float64."""
    bits = bits_of_sum(terms)
    return bits // 2, bits - bits // 2


def terms_of_sum(shape: tuple[int, ...], terms: int, salt: int, device: torch.device) -> Tensor:
    """Positive integers whose sums over ``terms`` need all bits of a float64."""
    bits = bits_of_sum(terms)
    return integers(math.prod(shape), bits - 1, salt, device).add_(2.0 ** (bits - 1)).view(shape)


def usual_floats(count: int, salt: int, device: torch.device) -> Tensor:
    """Float32 numbers from 2**-48 to 2**7 in size, of either sign."""
    return _scaled(integers(count, 24, salt, device), 24, salt, device).to(torch.float32)


def usual_doubles(count: int, salt: int, device: torch.device) -> Tensor:
    """Float64 numbers from 2**-48 to 2**36 in size, of either sign."""
    return _scaled(integers(count, 53, salt, device), 53, salt, device)


def _scaled(drawn: Tensor, bits: int, salt: int, device: torch.device) -> Tensor:
    """Integers of so many bits, less the middle of their range, times powers of two from 2**-47 to 2**-16."""
    exponents = words(len(drawn), salt + 100, device).bitwise_and_(31).sub_(47)
    return drawn.sub_(2.0 ** (bits - 1)).add_(0.5).mul_(power_of_two(exponents))


def floats(count: int, salt: int, device: torch.device) -> Tensor:
    """Float32 numbers: half of any bits, also infinite, NaN and subnormal, and half usual ones."""
    drawn = words(count, salt, device)
    patterns = (drawn >> 9).bitwise_and_(2**32 - 1).sub_(2**31).to(torch.int32).view(torch.float32)
    return torch.where((drawn & 1) == 0, patterns, usual_floats(count, salt + 1, device))


def doubles(count: int, salt: int, device: torch.device) -> Tensor:
    """Float64 numbers: half of any bits, and half usual ones."""
    drawn = words(count, salt, device)
    return torch.where((drawn & 1) == 0, drawn.view(torch.float64), usual_doubles(count, salt + 1, device))


def moved(x: Tensor, target: torch.device) -> Tensor:
    """A tensor on another device."""
    return x.to(target)


def digest(results: Iterable[Tensor]) -> str:
    """The first digits of the SHA-256 of all bits. NaN counts as one number, and large tensors are summed first.

    A sum is one of bits as integers, each times an odd number of its own, so that no single change can be lost.
    """
    parts = [_summed(_bits(result)) for result in results]
    return hashlib.sha256(torch.cat(parts).cpu().numpy().tobytes()).hexdigest()[:_DIGITS]


def _bits(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x.to(torch.int64).reshape(-1)
    known = torch.where(x.isnan(), 1.5, x).contiguous()
    return known.view(torch.int32 if x.dtype == torch.float32 else torch.int64).to(torch.int64).view(-1)


def _summed(bits: Tensor) -> Tensor:
    rows = len(bits) // _COLUMNS
    if rows < 2:
        return bits
    odd = torch.arange(1, 2 * rows, 2, device=bits.device)
    sums = bits[: rows * _COLUMNS].view(rows, _COLUMNS).mul(odd.unsqueeze(1)).sum(0)
    return torch.cat([sums, bits[rows * _COLUMNS :]])
