"""Products of numbers on grids by products of 8-bit integers, for devices whose float64 is slow.

A number on a grid is an integer times a power of two, and an integer of at most 27 bits has three or four digits of
base 128. Their products, summed in 32-bit integers, put together give the sum of products that float64 gives: both are
exact (Ootomo, Ozaki and Yokota 2024).
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import torch

from samebits.host.variables import PRODUCTS, chosen
from samebits.numerics.exact.compiled.library import compiled
from samebits.numerics.exact.grid import bits_of_products, power_of_two, slices, snap, snap_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from samebits.numerics.exact.compiled.library import Kernels

    _Digits = tuple[Tensor, Tensor, Tensor]

LEAST, LEAST_SIDE = 1 << 26, 64
"""Products of a matrix product, and sizes of its factors, from which integers pay."""
_DIGIT = 7  # bits
_MOST_TERMS = 1 << 15  # of which the sums fit into an int32, and sums of signs into a float16
_MOST_NUMBERS, _FEWEST_ROWS = 1 << 22, 256  # of a product that is made at once, which bounds memory
_ROWS, _MULTIPLE = 24, 8  # the fewest rows that CUDA's products of integers take, and what sizes are multiples of
_FARTHEST = 900  # of a line's exponent from zero; smaller numbers than these are zeros
_TRIED, _TIMES, _FASTER = 1024, 3, 0.8

_multiply_integers = getattr(torch, "_int_mm", None)
_chosen: set[torch.device] = set()


def start(devices: Iterable[torch.device]) -> None:
    """Let products on each device be those of integers from now on, if they are right there, and faster.

    On a CPU they are not faster, and are used if the variable says so alone.
    """
    setting = chosen(PRODUCTS)
    _chosen.clear()
    for device in set(devices):
        wanted = setting == "int8" or (setting != "float64" and device.type == "cuda")
        if wanted and _are_right(device) and (setting == "int8" or _is_faster(device)):
            _chosen.add(device)


def are_used(device: torch.device) -> bool:
    """Whether large products on a device are those of integers."""
    return device in _chosen


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """``torch.matmul`` of float64 factors: rows of ``a`` and columns of ``b`` are on grids, as in ``products``."""
    if a.device in _chosen and a.dim() >= b.dim() > 1 and b.shape[:-2].numel() == 1:
        rows, terms, width = a.shape[:-1].numel(), a.shape[-1], b.shape[-1]
        if rows * terms * width >= LEAST and min(rows, terms, width) >= LEAST_SIDE:
            return by_digits(a.reshape(rows, terms), b.reshape(terms, width)).view(*a.shape[:-1], width)
    return torch.matmul(a, b)


def by_digits(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of two matrices as in ``multiply``, without negative zeros.

    Numbers that are not finite give what they give in float64.
    """
    count = 3 if bits_of_products(a.shape[1]) < 3 * _DIGIT else 4
    product = a.new_empty((len(a), b.shape[1]))
    for terms in slices(len(b), _MOST_TERMS):
        right = _digits(b[terms].mT.contiguous(), count, True)
        for rows in slices(len(a), max(_FEWEST_ROWS, _MOST_NUMBERS // b.shape[1])):
            part = _product(_digits(a[rows, terms].contiguous(), count, False), right, count)
            product[rows] = product[rows] + part if terms.start else part
    return product


def _product(left: _Digits, right: _Digits, count: int) -> Tensor:
    """The product of factors of so many digits.

    Digits of one factor lie behind each other in a row, and those of the other in the opposite order. So all products
    of digits that have one weight are the product of two parts of the rows.
    """
    assert _multiply_integers is not None
    (digits, signs, tops), (others, other_signs, other_tops) = left, right
    terms = signs.shape[1]
    products = digits.new_empty((2 * count - 1, len(digits), len(others)), dtype=torch.int32)
    for weight, product in enumerate(products):
        low, high = max(0, weight - count + 1), min(weight, count - 1) + 1
        one, other = digits[:, low * terms : high * terms], others[:, (count - high) * terms : (count - low) * terms]
        _multiply_integers(one, other.T, out=product)
    return _joined(products, torch.mm(signs, other_signs.T).to(torch.float32), tops, other_tops, count)


def _padded(x: Tensor) -> tuple[int, int]:
    """Rows and terms of the digits of a matrix."""
    rows, terms = (-(-size // _MULTIPLE) * _MULTIPLE for size in x.shape)
    return max(rows, _ROWS), terms


def _digits_by_kernel(library: Kernels, x: Tensor, count: int, backwards: bool) -> _Digits | None:
    if library.is_host or not library.takes(x, dtype=torch.float64):
        return None
    rows, terms = _padded(x)
    digits = x.new_empty((rows, count * terms), dtype=torch.int8)
    signs = x.new_empty((rows, terms), dtype=torch.float16)
    tops = x.new_empty(len(x), dtype=torch.int64)
    library.call("digits", x, digits, signs, tops, rows, len(x), x.shape[1], terms, count, int(backwards))
    return digits, signs, tops


@compiled(_digits_by_kernel)
def _digits(x: Tensor, count: int, backwards: bool) -> _Digits:
    """Digits of each row, from the lowest or ``backwards``; signs of its numbers, or what is not finite; its exponent.

    Shapes: (rows, terms) to int8 (padded rows, count * padded terms), float16 (padded rows, padded terms), and int64
    (rows).
    """
    rows, terms = _padded(x)
    most = x.abs().view(torch.int64).amax(1)
    tops = ((most - 1) >> 52).sub_(1022).clamp_(-_FARTHEST, _FARTHEST)  # numbers of the row are at most 2**top
    finite = x.isfinite()
    integers = torch.where(finite, x, 0.0).mul_(power_of_two(count * _DIGIT - 1 - tops).unsqueeze(1)).to(torch.int64)
    digits, signs = x.new_zeros((rows, count, terms), dtype=torch.int8), x.new_zeros((rows, terms), dtype=torch.float16)
    for place in range(count):
        low = ((integers + 64) & 127) - 64 if place < count - 1 else integers
        digits[: len(x), count - 1 - place if backwards else place, : x.shape[1]] = low
        integers = (integers - low) >> _DIGIT
    signs[: len(x), : x.shape[1]] = torch.where(finite, x.sign(), x)
    return digits.view(rows, -1), signs, tops


def _joined_by_kernel(
    library: Kernels, products: Tensor, signs: Tensor, tops: Tensor, others: Tensor, count: int
) -> Tensor | None:
    if library.is_host or not library.takes(signs):
        return None
    out = signs.new_empty((len(tops), len(others)), dtype=torch.float64)
    library.call("joined", products, signs, tops, others, out, *out.shape, *signs.shape, count)
    return out


@compiled(_joined_by_kernel)
def _joined(products: Tensor, signs: Tensor, tops: Tensor, others: Tensor, count: int) -> Tensor:
    """The float64 product from products of digits, by weight, and of signs, which say what is not finite."""
    rows, width = len(tops), len(others)
    total = products[-1, :rows, :width].to(torch.float64)
    for product in products[:-1].flip(0):
        total.mul_(2.0**_DIGIT).add_(product[:rows, :width])
    for exponents in (tops.unsqueeze(1), others):
        total.mul_(power_of_two(exponents - (count * _DIGIT - 1)))
    signs = signs[:rows, :width]
    return torch.where(signs.isfinite(), total, signs.to(torch.float64))


def _are_right(device: torch.device) -> bool:
    """Whether products of integers are those of float64 on a device, for three and for four digits."""
    if _multiply_integers is None:
        return False
    try:
        return all(torch.equal(by_digits(a, b), torch.matmul(a, b).add_(0.0)) for a, b in tried(device))
    except RuntimeError:  # the device has none
        return False


def tried(device: torch.device) -> Iterable[tuple[Tensor, Tensor]]:
    """Factors that need all bits they may have, and all digits."""
    for rows, terms, width in ((26, 2049, 9), (33, 200, 17)):
        bits = bits_of_products(terms)
        left = torch.arange(rows * terms, dtype=torch.float32, device=device).mul_(7919.0).remainder_(65521.0)
        right = torch.arange(width * terms, dtype=torch.float32, device=device).mul_(104729.0).remainder_(65519.0)
        left, right = left.sub_(32768.0).view(rows, terms).div_(3.0), right.sub_(32768.0).view(terms, width).div_(7.0)
        left[:, 0] = left[0] = 2.0**15  # a digit that is the largest, alone and with all others
        yield snap_rows(left, bits), snap(right, 0, bits)


def _is_faster(device: torch.device) -> bool:
    """Whether a large product of integers takes clearly less time than one of float64."""
    a, b = (torch.ones((_TRIED, _TRIED), dtype=torch.float64, device=device) for _ in range(2))
    return _seconds(by_digits, a, b) < _FASTER * _seconds(torch.matmul, a, b)


def _seconds(product: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> float:
    """The shortest of some times, after a first product that is not timed."""
    least = math.inf
    for timed in range(1 + _TIMES):
        torch.cuda.synchronize(a.device)
        before = time.perf_counter()
        product(a, b)
        torch.cuda.synchronize(a.device)
        least = min(least, time.perf_counter() - before) if timed else math.inf
    return least
