"""The cases of the self-test: each computes on one device what ``digests`` holds for a CPU.

Cases call the functions that trainings call, so that a new engine for one of them is tested as well. Products and sums
have terms on grids whose sums need all 53 bits of a float64: fewer bits, a lost term or one too many shows.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from samebits.numerics.exact import elementary
from samebits.numerics.exact.operations import EXACT
from samebits.numerics.exact.optimizers import SGD, AdamW
from samebits.numerics.exact.products import exact_matmul, matmul
from samebits.numerics.exact.self_test.numbers import (
    bits_of_factors,
    doubles,
    factors,
    floats,
    integers,
    moved,
    terms_of_sum,
    usual_doubles,
    usual_floats,
    words,
)
from samebits.numerics.exact.sums import fixed_order_sum
from samebits.numerics.exact.tables import Table
from samebits.portable import elementary as of_the_host
from samebits.portable.random import Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from decimal import Decimal

    from torch import Tensor

    Run = Callable[[torch.device], Iterable[Tensor]]

aten = torch.ops.aten
_FAST = "or set train.numerics: [fast]"
_ARITHMETIC = f"update the driver, leave this device out with CUDA_VISIBLE_DEVICES, {_FAST}"
_TINY = f"leave torch.set_flush_denormal and libraries compiled with fast-math out of this process, {_FAST}"
_FUSED = f"a product and a sum are joined into one operation: use PyTorch's own kernels, {_FAST}"
_PRODUCTS = (
    "unset CUBLAS_EMULATE_DOUBLE_PRECISION, CUBLAS_EMULATE_SINGLE_PRECISION and CUBLAS_EMULATION_STRATEGY, see whether "
    f"LD_LIBRARY_PATH or LD_PRELOAD bring another BLAS, update the driver, {_FAST}"
)
_HOST = f"the CPU computes in another way than IEEE 754 says: leave fast-math out of this process, {_FAST}"
COPIES = (
    "turn the IOMMU and PCIe's ACS off (iommu=pt on the kernel's command line), set NCCL_P2P_DISABLE=1 for ddp, or use "
    "one GPU"
)
"""Hint where values do not arrive."""
_SAMPLE = 1 << 14


class Case(NamedTuple):
    """A computation on one device, and what to do if its result is wrong there."""

    run: Run
    hint: str


CASES: dict[str, Case] = {}
"""Cases by name, the simplest first, since those after them rest on them."""


def _case(name: str, hint: str = _ARITHMETIC) -> Callable[[Run], Run]:
    def enter(run: Run) -> Run:
        CASES[name] = Case(run, hint)
        return run

    return enter


# -- single operations -------------------------------------------------------------------------------------------


@_case("integers")
def _integers(device: torch.device) -> Iterable[Tensor]:
    x = words(_SAMPLE, 1, device)
    yield from (x, x.sum(), x.cumsum(0), x >> 41, (x & 2047) << 52, (x > 0).sum(), x.bitwise_or(5))
    yield x.to(torch.float64)
    yield torch.sort(x & 63, stable=True)[1]


@_case("copies from the host and back", COPIES)
def _round_trip(device: torch.device) -> Iterable[Tensor]:
    counted = torch.arange(1, 1 << 17, dtype=torch.int64)
    yield from (moved(counted, device), moved(counted.to(torch.float32), device), moved(counted[::3], device))


def _arithmetic(numbers: Callable[..., Tensor], device: torch.device) -> Iterable[Tensor]:
    x, y = numbers(_SAMPLE, 2, device), numbers(_SAMPLE, 3, device)
    yield from (x.add(y), x.sub(y), x.mul(y), x.div(y), x.add(x.roll(1)), x.div(3.0 * x.roll(1)))


CASES["float32 arithmetic"] = Case(partial(_arithmetic, usual_floats), _ARITHMETIC)
CASES["float64 arithmetic"] = Case(partial(_arithmetic, usual_doubles), _ARITHMETIC)


@_case("a product, then a sum", _FUSED)
def _product_then_sum(device: torch.device) -> Iterable[Tensor]:
    for numbers in (usual_floats, usual_doubles):
        x, y = numbers(_SAMPLE, 10, device), numbers(_SAMPLE, 11, device)
        product = x.mul(y)
        yield from (x.mul(y).sub_(product), x.mul(y).add_(x), x.mul(y).add_(y).mul_(x).add_(1.0))


@_case("rounding and conversion")
def _rounding(device: torch.device) -> Iterable[Tensor]:
    wide = usual_doubles(_SAMPLE, 5, device)
    halves = integers(_SAMPLE, 25, 6, device).mul(0.5)  # as float32, and to a whole number, every other one is a tie
    yield from (wide.to(torch.float32), halves.add(2.0**24).to(torch.float32))
    for values in (halves, halves.neg(), wide):
        yield from (values.round(), values.floor(), values.trunc(), values.to(torch.int64))


@_case("tiny numbers", _TINY)
def _tiny(device: torch.device) -> Iterable[Tensor]:
    for dtype, least in ((torch.float32, -126), (torch.float64, -1022)):
        unit = torch.full((1,), math.ldexp(1.0, least), dtype=dtype, device=device)
        small = unit.mul(integers(_SAMPLE, 12, 8, device).mul(2.0**-14).to(dtype))
        yield from (small, small.add(small), small.sub(unit), small.div(2.0), small.to(torch.float64), small > 0)
        yield small.div(unit.div(4.0))
    yield integers(_SAMPLE, 20, 9, device).mul(2.0**-150).to(torch.float32)


@_case("numbers of any bits")
def _any_bits(device: torch.device) -> Iterable[Tensor]:
    for x in (floats(_SAMPLE, 4, device), doubles(_SAMPLE, 5, device)):
        y = x.roll(1)
        yield from (
            x.to(torch.float32),
            x.to(torch.float64),
            x.round(),
            x.clamp(-1e15, 1e15).nan_to_num().to(torch.int64),
        )
        yield from (x.add(y), x.sub(y), x.mul(y), x.div(y))


@_case("comparisons and extremes")
def _extremes(device: torch.device) -> Iterable[Tensor]:
    x = floats(_SAMPLE, 7, device).view(128, 128)
    y = x.roll(1)
    known = x.nan_to_num(0.0)
    yield from (x < y, x == y, x.isnan(), x.isfinite(), x.signbit(), x.abs(), x.neg(), x.copysign(y), known)
    yield from (x.amax(1), known.amax(0), known.amin(0), x.clamp(-1.0, 1.0), *torch.aminmax(known))
    yield EXACT[aten.argmax](x.clamp(-1.0, 1.0), 1)
    yield from EXACT[aten.topk](known.clamp(-1.0, 1.0), 9)


# -- products ----------------------------------------------------------------------------------------------------


def _layouts(rows: int, terms: int, columns: int, kinds: str, device: torch.device) -> Iterable[Tensor]:
    """Products with factors stored as they are (n) or transposed (t); once with signs, and once without."""
    for kind, signed in itertools.product(kinds.split(), (True, False)):
        left, right = (
            factors(shape[:: -1 if stored == "t" else 1], bits, salt, device, signed=signed)
            for shape, stored, bits, salt in zip(
                ((rows, terms), (terms, columns)), kind, bits_of_factors(terms), (12, 13), strict=True
            )
        )
        yield exact_matmul(left.T if kind[0] == "t" else left, right.T if kind[1] == "t" else right)


for _rows, _terms, _columns, _kinds in (
    (640, 1024, 768, "nn nt tn"),
    (2048, 256, 1024, "nt"),
    (32, 32768, 48, "nn tn"),
    (8, 65536, 24, "tn"),
    (127, 1021, 61, "nn nt tn"),
    (1, 2048, 1000, "nn nt"),
    (1000, 2048, 1, "nn tn"),
    (3000, 64, 10, "nt"),
):
    CASES[f"product {_rows} x {_terms} x {_columns}"] = Case(
        partial(_layouts, _rows, _terms, _columns, _kinds), _PRODUCTS
    )


@_case("products of a batch of matrices", _PRODUCTS)
def _batched(device: torch.device) -> Iterable[Tensor]:
    for count, rows, terms, columns in ((48, 64, 32, 64), (6, 33, 517, 128)):
        bits_left, bits_right = bits_of_factors(terms)
        left = factors((count, rows, terms), bits_left, 14, device, signed=False)
        right = factors((count, columns, terms), bits_right, 15, device, signed=False)
        yield from (exact_matmul(left, right.mT), exact_matmul(left.mT.contiguous().mT, right.mT.contiguous()))


@_case("product of float32 factors", _PRODUCTS)
def _of_floats(device: torch.device) -> Iterable[Tensor]:
    a, b = (floats(96 * 320, salt, device).nan_to_num(0.0, 0.0, 0.0) for salt in (16, 18))
    for left, right in ((a, b), (a.clamp(-9.0, 9.0), b.clamp(-9.0, 9.0))):
        yield matmul(left.view(96, 320), right.view(320, 96))


@_case("convolution", _PRODUCTS)
def _convolution(device: torch.device) -> Iterable[Tensor]:
    x, weight, grad = (floats(n, salt, device).clamp(-9.0, 9.0).nan_to_num(0.0) for n, salt in
                       ((4 * 8 * 144, 20), (16 * 4 * 9, 22), (4 * 16 * 36, 24)))  # fmt: skip
    x, weight, grad = x.view(4, 8, 12, 12), weight.view(16, 4, 3, 3), grad.view(4, 16, 6, 6)
    settings = ([2, 2], [1, 1], [1, 1], False, [0, 0], 2)
    yield EXACT[aten.convolution](x, weight, grad[0, :, 0, 0], *settings)
    yield from EXACT[aten.convolution_backward](grad, x, weight, None, *settings, [True, True, True])


# -- sums --------------------------------------------------------------------------------------------------------


@_case("sum on a grid")
def _sum(device: torch.device) -> Iterable[Tensor]:
    for shape, dims in (((32768, 24), [0]), ((24, 32768), [1]), ((64, 24, 512), [0, 2]), ((1 << 19,), [0])):
        yield terms_of_sum(shape, math.prod(shape[d] for d in dims), 26, device).sum(dims)
    yield EXACT[aten.cumsum](floats(_SAMPLE, 27, device).view(8, -1), 1)


@_case("sum in a fixed order")
def _fixed_order(device: torch.device) -> Iterable[Tensor]:
    x = doubles(6 * 5 * 1001, 29, device).clamp(-4.0, 4.0).view(6, 5, 1001)
    yield from (fixed_order_sum(x, (2,)), fixed_order_sum(x, (0, 2)), fixed_order_sum(x, (0, 1, 2)))


_TERMS, _PLACES, _WIDTH = 1 << 14, 61, 24


def _colliding(put: Callable[[Tensor, Tensor, Tensor], Tensor], device: torch.device) -> Iterable[Tensor]:
    """Many terms into few places, of which one takes half of them."""
    drawn = words(_TERMS, 30, device).bitwise_and_(127)
    places = torch.where(drawn < _PLACES, drawn, 7)
    terms = terms_of_sum((_TERMS, _WIDTH), _TERMS, 31, device)
    yield put(torch.zeros((_PLACES, _WIDTH), dtype=torch.float64, device=device), places, terms)


def _scatter(total: Tensor, places: Tensor, terms: Tensor) -> Tensor:
    return total.scatter_add_(0, places.unsqueeze(1).expand_as(terms), terms)


def _index_put(total: Tensor, places: Tensor, terms: Tensor) -> Tensor:
    return total.index_put_((places,), terms, accumulate=True)


CASES["colliding index_add_"] = Case(partial(_colliding, lambda x, i, terms: x.index_add_(0, i, terms)), _ARITHMETIC)
CASES["colliding scatter_add_"] = Case(partial(_colliding, _scatter), _ARITHMETIC)
CASES["colliding index_put_"] = Case(partial(_colliding, _index_put), _ARITHMETIC)


@_case("gradient of an embedding")
def _embedding(device: torch.device) -> Iterable[Tensor]:
    index = words(512, 33, device).bitwise_and_(15)
    grad = floats(512 * _WIDTH, 34, device).view(512, _WIDTH)
    weight = floats(16 * _WIDTH, 36, device).view(16, _WIDTH)
    yield from (weight.index_select(0, index), EXACT[aten.embedding_dense_backward](grad, index, 16, 3, False))


# -- functions ---------------------------------------------------------------------------------------------------


def _inverse_taylor(x: Decimal) -> tuple[Decimal, Decimal, Decimal, Decimal]:
    y = 1 / (1 + x)
    return y, -(y**2), y**3, -(y**4)


@_case("functions by table")
def _by_table(device: torch.device) -> Iterable[Tensor]:
    """A table that takes less time to make than those of ``erf`` and GELU."""
    yield Table(0, 1, _inverse_taylor)(floats(_SAMPLE, 39, device).to(torch.float64))


def _function(name: str, device: torch.device) -> Iterable[Tensor]:
    yield getattr(elementary, name)(floats(_SAMPLE, 38, device).to(torch.float64))


for _name in ("root_of_float", *(function.__name__ for function in elementary.FUNCTIONS if function.__name__ != "erf")):
    CASES[_name] = Case(partial(_function, _name), _ARITHMETIC)


@_case("power")
def _power(device: torch.device) -> Iterable[Tensor]:
    x, y = (floats(_SAMPLE, salt, device).to(torch.float64) for salt in (40, 42))
    yield from (elementary.power(x, y.clamp(-9.0, 9.0)), elementary.integer_power(x, 5))


@_case("softmax and norms")
def _softmax_and_norms(device: torch.device) -> Iterable[Tensor]:
    x = floats(64 * 77, 44, device).clamp(-9.0, 9.0).nan_to_num(0.0).view(64, 77)
    grad, weight = x.roll(1), x[0]
    y = EXACT[aten._softmax](x, 1, False)
    yield from (y, EXACT[aten._softmax_backward_data](grad, y, 1, torch.float32), EXACT[aten._log_softmax](x, 1, False))
    normed, mean, rstd = EXACT[aten.native_layer_norm](x, [77], weight, weight, 1e-5)
    yield from (normed, mean, rstd)
    wanted = [True, True, True]
    yield from EXACT[aten.native_layer_norm_backward](grad, x, [77], mean, rstd, weight, weight, wanted)


@_case("optimizers")
def _optimizers(device: torch.device) -> Iterable[Tensor]:
    for kind, settings in ((SGD, {"momentum": 0.9}), (AdamW, {})):
        values = floats(_SAMPLE, 46, device).clamp(-1.0, 1.0).nan_to_num(0.0).to(torch.float64)
        weight = nn.Parameter(values)
        optimizer = kind([weight], lr=0.01, weight_decay=0.01, terms=384, clip=1.0, **settings)
        for salt in (48, 50):
            weight.grad = floats(_SAMPLE, salt, device).clamp(-9.0, 9.0).nan_to_num(0.0).to(torch.float64)
            optimizer.step()
        yield weight.detach()
        yield from (state for state in optimizer.state[weight].values() if isinstance(state, torch.Tensor))


@_case("the host's own numbers", _HOST)
def _of_the_host(_: torch.device) -> Iterable[Tensor]:
    """Draws, which are made on the CPU, and functions of ``portable``."""
    stream = Stream(0, "self-test")
    normal, uniform = stream.normal(2000), stream.uniform(2000)
    for values in (normal, uniform, of_the_host.exp(normal), of_the_host.log(uniform + 2.0**-53)):
        yield torch.from_numpy(values)
    yield torch.from_numpy(stream.permutation(1000))
