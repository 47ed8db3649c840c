"""Rounding to grids of powers of two, on which sums and products of float64 numbers are exact, hence associative.

A grid is chosen by its top: values below 2**e are rounded to multiples of 2**(e - bits), which leaves integers of at
most ``bits`` bits times a power of two. Sums of such numbers are exact in float64 as long as they stay below 2**53
units, so neither order nor blocking nor fused multiply-add can change them (Ozaki, Ogita, Oishi and Rump 2012).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from samebits.numerics.exact.compiled.library import compiled, threads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from samebits.numerics.exact.compiled.library import Kernels

MANTISSA = 53  # bits of a float64
_BLOCK = 1 << 15  # elements that stay in a core's cache as float64


def bits_of_sum(terms: int) -> int:
    """Bits that each of ``terms`` terms may have if their sum is to be exact."""
    return MANTISSA - (max(terms, 1) - 1).bit_length()


def bits_of_products(terms: int) -> int:
    """Bits that both factors of ``terms`` products may have if the sum of the products is to be exact."""
    return bits_of_sum(terms) // 2


def blocks(rows: int, width: int, device: torch.device) -> Iterator[slice]:
    """Slices that cover all rows; on a CPU each has as many rows as its cache holds."""
    return slices(rows, max(1, _BLOCK // max(width, 1)) if device.type == "cpu" else max(rows, 1))


def slices(rows: int, step: int) -> Iterator[slice]:
    """Slices of at most ``step`` rows that cover all."""
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def top(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """The least e with abs(x) < 2**e over ``dim``, kept as axes of size 1, as int64; read from the bits.

    Zeros and subnormal numbers count as the smallest normal ones; infinities and NaN give the largest e.
    """
    integers, most = (torch.int32, 2**31 - 1) if x.dtype == torch.float32 else (torch.int64, 2**63 - 1)
    sizes = x.view(integers).bitwise_and(most)  # in the order of magnitudes; the sign of a NaN differs between hosts
    return top_of_magnitude(torch.amax(sizes, dim=dim, keepdim=True).view(x.dtype))


def top_of_magnitude(size: Tensor) -> Tensor:
    """``top`` of each non-negative float32 or float64 number."""
    if size.dtype == torch.float32:
        return (size.view(torch.int32) >> 23).to(torch.int64).sub_(126)
    return (size.view(torch.int64) >> 52).sub_(1022)


def top_of_number(size: Tensor) -> int:
    """``top_of_magnitude`` of one number, which the host reads."""
    number, info = size.item(), torch.finfo(size.dtype)
    if not math.isfinite(number):
        return math.frexp(info.max)[1] + 1
    return math.frexp(max(number, info.tiny / 2))[1]  # of which all smaller ones count as one


def shifter(tops: Tensor, bits: int) -> Tensor:
    """The float64 1.5 * 2**(52 + e - bits): adding and subtracting it rounds abs(x) < 2**e to the grid, ties to even.

    Grids finer than float64's own range become its finest one.
    """
    exponents = (tops + (1023 + 52 - bits)).clamp_(1, 2046)
    return ((exponents << 52) | (1 << 51)).view(torch.float64)


def shift_of(top: int, bits: int) -> float:
    """``shifter`` of one top that the host knows, as a Python number, which costs a GPU no transfer."""
    return math.ldexp(1.5, min(max(top + 1023 + 52 - bits, 1), 2046) - 1023)


def power_of_two(exponents: Tensor) -> Tensor:
    """2**n as float64, for integers n from -1022 to 1023."""
    return ((exponents + 1023) << 52).view(torch.float64)


def snap_(x: Tensor, shift: Tensor | float) -> Tensor:
    """Round float64 numbers in place; two kernels, so that nothing can simplify them away."""
    return x.add_(shift).sub_(shift)


def largest(x: Tensor) -> Tensor:
    """The largest magnitude, in the type of ``x``; NaN if ``x`` has one."""
    if x.numel() == 0:
        return x.new_zeros(())
    least, most = torch.aminmax(x)
    return torch.maximum(most.abs(), least.abs())


def _snapped(library: Kernels, x: Tensor, shift: Tensor | float) -> tuple[Tensor, Tensor] | None:
    if not library.takes(x):
        return None
    out, size = x.new_empty(x.shape, dtype=torch.float64), library.place(x)
    library.call("snap_to", x, out, size, x.numel(), library.number(shift, x), threads())
    return out, size


@compiled(_snapped)
def snapped(x: Tensor, shift: Tensor | float) -> tuple[Tensor, Tensor]:
    """``x`` rounded as by ``snap_``, as new float64 numbers, and its largest magnitude."""
    return snap_(x.to(torch.float64, copy=True), shift), largest(x)


def _snapped_sum(library: Kernels, x: Tensor, shift: Tensor | float) -> tuple[Tensor, Tensor] | None:
    if not library.takes(x):
        return None
    total, size = x.new_empty(x.shape[1:], dtype=torch.float64), library.place(x)
    library.call("snap_sum", x, total, size, x.shape[0], total.numel(), library.number(shift, x), threads())
    return total, size


@compiled(_snapped_sum)
def snapped_sum(x: Tensor, shift: Tensor | float) -> tuple[Tensor, Tensor]:
    """The sum over the first axis of ``snapped`` numbers, and their largest magnitude."""
    values, size = snapped(x, shift)
    return values.sum(0), size


def _snap(library: Kernels, x: Tensor, dim: int, bits: int) -> Tensor | None:
    if x.dim() < 2 or dim % x.dim() != x.dim() - 2:
        return None
    are_apart = x.dim() == 2 and len(x) > 0 and x.stride(1) == 1  # rows, of which each lies densely
    if not library.takes(x[0] if are_apart else x):
        return None
    out = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    across = x.stride(0) if are_apart else x.shape[-1]
    library.call("snap_columns", x, out, math.prod(x.shape[:-2]), *x.shape[-2:], across, bits, threads())
    return out


@compiled(_snap)
def snap(x: Tensor, dim: int, bits: int) -> Tensor:
    """``x`` as float64, each line along ``dim`` rounded to ``bits`` bits of its own largest magnitude.

    The relative error of a line is at most 2**-bits of its largest element.
    """
    if x.numel() == 0:
        return x.to(torch.float64)
    return snap_(x.to(torch.float64, copy=True), shifter(top(x, dim), bits))


def _snap_rows(library: Kernels, x: Tensor, bits: int) -> Tensor | None:
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x
    if not library.takes(rows):
        return None
    out = x.new_empty(x.shape, dtype=torch.float64)
    library.call("snap_rows", rows, out, *rows.shape, bits, threads())
    return out


@compiled(_snap_rows)
def snap_rows(x: Tensor, bits: int) -> Tensor:
    """``snap`` along the last axis, block by block."""
    if x.numel() == 0:
        return x.to(torch.float64)
    flat = x.reshape(-1, x.shape[-1])
    out = torch.empty(flat.shape, dtype=torch.float64, device=x.device)
    for part in blocks(flat.shape[0], flat.shape[1], x.device):
        rows = flat[part]
        snap_(out[part].copy_(rows), shifter(top(rows, -1), bits))
    return out.view(x.shape)
