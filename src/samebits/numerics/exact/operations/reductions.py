"""Reductions: sums in a fixed order of float64 additions, and maxima with one sign of zero."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from samebits.numerics.exact import elementary
from samebits.numerics.exact.compiled.library import compiled, threads
from samebits.numerics.exact.grid import bits_of_sum, power_of_two, shifter, snap_, top
from samebits.numerics.exact.operations import complex_numbers
from samebits.numerics.exact.operations.pointwise import enter_extreme, positive_zero, to_fit
from samebits.numerics.exact.operations.registry import EXACT, NotExactError, exact, summed, wide
from samebits.numerics.exact.sums import fixed_order_sum, halved

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from samebits.numerics.exact.compiled.library import Kernels

aten = torch.ops.aten


def dims_of(x: Tensor, dim: int | Sequence[int] | None) -> tuple[int, ...]:
    """The axes that ``dim`` names, all of them for None or an empty list."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(x.dim()))
    return (dim,) if isinstance(dim, int) else tuple(dim)


def _shaped(total: Tensor, dims: tuple[int, ...], *, keepdim: bool) -> Tensor:
    return total if keepdim or not total.dim() else total.squeeze(dims)


def _of_type(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Integers as floating-point numbers if ``dtype`` asks for them, and the reverse."""
    if x.is_complex() or (dtype is not None and dtype.is_complex):
        raise NotExactError("complex numbers have no exact version")
    if dtype is None or dtype.is_floating_point == x.is_floating_point():
        return x
    return to_fit(x, dtype).to(dtype)


def terms_of(x: Tensor, dims: tuple[int, ...]) -> int:
    """Number of elements of a line over ``dims``."""
    return math.prod(x.shape[d] for d in dims) if x.dim() else 1


@exact(aten.sum)
def total(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """The sum over ``dim``, rounded once."""
    if complex_numbers.is_complex(x) and dtype in (None, x.dtype):
        return complex_numbers.joined(*(total(part, dim, keepdim) for part in complex_numbers.parts(x)))
    x = _of_type(x, dtype)
    if not x.is_floating_point():
        return torch.sum(x, dims_of(x, dim), keepdim, dtype=dtype) if x.dim() else torch.sum(x, dtype=dtype)
    dims = dims_of(x, dim)
    return _shaped(summed(x, dims), dims, keepdim=keepdim).to(dtype or x.dtype, copy=True)


@exact(aten.mean)
def mean(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """The mean over ``dim``: the sum is divided in float64, and the quotient rounded once."""
    x, dims = _of_type(x, dtype), dims_of(x, dim)
    middle = divided(summed(x, dims), terms_of(x, dims))
    return _shaped(middle, dims, keepdim=keepdim).to(dtype or x.dtype)


def divided(x: Tensor, count: float) -> Tensor:
    """``x / count`` by a true division."""
    return x.div(elementary.divisor(x, count))


def moments(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, deviations from it and the sum of their squares, of float64 numbers; ``dims`` become axes of size 1."""
    middle = divided(fixed_order_sum(x, dims), terms_of(x, dims))
    deviation = x.sub(middle)
    return middle, deviation, fixed_order_sum(deviation.mul(deviation), dims)


def _spread(
    x: Tensor,
    dim: Any = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
    function: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """A function of the variance over ``dim``, which is not rounded before it, and the mean.

    The variance has ``correction`` fewer degrees of freedom than terms.
    """
    dims = dims_of(x, dim)
    middle, _, squares = moments(wide(x), dims)
    freedom = max(0.0, terms_of(x, dims) - (1 if correction is None else correction))
    results = (function(divided(squares, freedom)), middle)
    spread, mean = (_shaped(result, dims, keepdim=keepdim).to(x.dtype) for result in results)
    return spread, mean


EXACT[aten.var_mean] = partial(_spread, function=torch.Tensor.clone)
EXACT[aten.std_mean] = partial(_spread, function=elementary.sqrt)
EXACT[aten.var] = lambda *args, **kwargs: EXACT[aten.var_mean](*args, **kwargs)[0]
EXACT[aten.std] = lambda *args, **kwargs: EXACT[aten.std_mean](*args, **kwargs)[0]


@exact(aten.linalg_vector_norm)
def vector_norm(
    x: Tensor,
    ord: float = 2,  # noqa: A002 - as PyTorch calls it
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The norm over ``dim``, rounded once; of order 0 the number of elements that are not zero."""
    dims = dims_of(x, dim)
    return _shaped(norm_of(wide(x), ord, dims), dims, keepdim=keepdim).to(dtype or x.dtype)


def norm_of(x: Tensor, order: float, dims: tuple[int, ...]) -> Tensor:
    """The norm of float64 numbers over ``dims``, which become axes of size 1."""
    if order == 2:
        return elementary.sqrt(fixed_order_sum(x.mul(x), dims))
    size = x.abs()
    if order == 1:
        return fixed_order_sum(size, dims)
    if order == 0:
        return fixed_order_sum((size != 0).to(x.dtype), dims)
    if order in (math.inf, -math.inf):
        return (torch.amax if order > 0 else torch.amin)(size, dims, keepdim=True)
    most = torch.amax(size, dims, keepdim=True)
    unit = torch.where((most == 0) | most.isinf(), 1.0, most)  # no power of a quotient overflows
    total = fixed_order_sum(power_of(size.div(unit), order), dims)
    return power_of(total, 1.0 / order).mul_(unit)


def power_of(x: Tensor, exponent: float) -> Tensor:
    """A power of numbers that are not negative; that of zero is not what ``power`` has for it before it is rounded."""
    return torch.where(x == 0, 0.0 if exponent > 0 else math.inf, elementary.power(x, torch.full_like(x, exponent)))


@exact(aten.logsumexp)
def logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """The logarithm of the sum of exponentials over ``dim``, rounded once."""
    dims = dims_of(x, dim)
    values = wide(x)
    largest = values.amax(dims, keepdim=True)
    finite = torch.where(largest.isinf(), 0.0, largest)
    logarithm = elementary.log(fixed_order_sum(elementary.exp(values.sub(finite)), dims)).add_(finite)
    logarithm = torch.where(largest.isinf(), largest, logarithm)
    return _shaped(logarithm, dims, keepdim=keepdim).to(x.dtype)


@exact(aten.prod)
def prod(x: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """The product over ``dim`` by halving, rounded once."""
    x = _of_type(x, dtype)
    if not x.is_floating_point():
        return torch.prod(x, dtype=dtype) if dim is None else torch.prod(x, dim, keepdim, dtype=dtype)
    values = wide(x)
    axis = 0 if dim is None else dim
    values = values.reshape(-1) if dim is None or not x.dim() else values
    values = halved(values, axis, torch.mul, empty=1.0)
    keep = keepdim and dim is not None and x.dim()
    return (values if keep else values.squeeze(axis)).to(dtype or x.dtype)


@exact(aten.cumsum)
def cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Running sums along ``dim`` of integers on a grid, so that the order of a scan does not matter."""
    x = _of_type(x, dtype)
    if not x.is_floating_point() or x.dim() == 0 or x.numel() == 0:
        return torch.cumsum(x, dim, dtype=dtype)
    return _running(x, dim % x.dim()).to(dtype or x.dtype)


def _running_sums(library: Kernels, x: Tensor, dim: int) -> Tensor | None:
    x = x.contiguous()
    if not (library.is_host and library.takes(x)):
        return None
    y, count = torch.empty_like(x), x.shape[dim]
    sizes = math.prod(x.shape[:dim]), count, math.prod(x.shape[dim + 1 :])
    return y if library.answer("running", x, y, *sizes, bits_of_sum(count), threads()) else None


@compiled(_running_sums)
def _running(x: Tensor, dim: int) -> Tensor:
    """Float32 numbers."""
    values = wide(x)
    finite = values.isfinite()
    known = torch.where(finite, values, 0.0)
    bits, tops = bits_of_sum(x.shape[dim]), top(known, dim)
    unit = power_of_two((tops - bits).clamp_(min=-1022))  # for zeros alone, the top is the least that float64 has
    integers = snap_(known, shifter(tops, bits)).div_(unit).to(torch.int64)
    sums = torch.cumsum(integers, dim).to(torch.float64).mul_(unit)
    return or_not_finite(sums, torch.cumsum(torch.where(finite, 0.0, values), dim)).to(x.dtype)


def or_not_finite(finite: Tensor, infinite: Tensor) -> Tensor:
    """Sums of the ``finite`` terms, or of the others where that is infinite or NaN; NaN has one sign."""
    return torch.where(infinite.isnan(), math.nan, torch.where(infinite.isinf(), infinite, finite))


def _scanned(x: Tensor, dim: int, join: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Running results along ``dim`` in a fixed order: each is joined with the one 1, 2, 4, ... places before."""
    shift = 1
    while shift < x.shape[dim]:
        count = x.shape[dim] - shift
        later = join(x.narrow(dim, shift, count), x.narrow(dim, 0, count))
        x = torch.cat([x.narrow(dim, 0, shift), later], dim)
        shift *= 2
    return x


@exact(aten.cumprod)
def cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Running products along ``dim``, rounded once."""
    x = _of_type(x, dtype)
    if not x.is_floating_point() or x.dim() == 0:
        return torch.cumprod(x, dim, dtype=dtype)
    return _scanned(wide(x), dim, torch.mul).to(dtype or x.dtype)


@exact(aten.logcumsumexp)
def logcumsumexp(x: Tensor, dim: int) -> Tensor:
    """Logarithms of running sums of exponentials along ``dim``, rounded once."""

    def join(a: Tensor, b: Tensor) -> Tensor:
        most, least = torch.maximum(a, b), torch.minimum(a, b)
        more = elementary.log1p(elementary.exp(torch.where(most == least, 0.0, least.sub(most))))
        return torch.where(most.isinf(), most, more.add_(most))

    return (_scanned(wide(x), dim, join) if x.dim() else wide(x)).to(x.dtype)


enter_extreme(aten.amax)
enter_extreme(aten.amin)


def _first(packet: Any, best: Any) -> None:
    """Enter a maximum or minimum with the index of the first of equal values, which kernels do not promise."""

    def version(x: Tensor, dim: Any = None, keepdim: bool = False) -> Any:
        if isinstance(dim, torch.Tensor):
            return EXACT[aten.maximum if best is torch.amax else aten.minimum](x, dim)
        if dim is None:
            return positive_zero(packet(x))
        if x.dim() == 0:
            return x.clone(), torch.zeros((), dtype=torch.int64, device=x.device)
        value = positive_zero(best(x, dim, keepdim=True))
        place = first_equal(x, value, dim)
        return (value, place) if keepdim else (value.squeeze(dim), place.squeeze(dim))

    EXACT[packet] = version


def first_equal(x: Tensor, value: Tensor, dim: int, among: Tensor | None = None) -> Tensor:
    """The first index along ``dim``, within the mask ``among``, at which ``x`` is ``value`` or both are NaN."""
    count = x.shape[dim]
    shape = [1] * x.dim()
    shape[dim] = count
    places = torch.arange(count, device=x.device).view(shape)
    equal = (x == value) | (x.isnan() & value.isnan())
    return torch.where(equal if among is None else equal & among, places, count).amin(dim, keepdim=True)


_first(aten.max, torch.amax)
_first(aten.min, torch.amin)


def _arg(packet: Any, best: Any) -> None:
    """Enter the index of a maximum or minimum, that of the first of equal ones."""

    def version(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        if x.dim() == 0:
            return torch.zeros((), dtype=torch.int64, device=x.device)
        flat, axis = (x.reshape(-1), 0) if dim is None else (x, dim)
        place = first_equal(flat, best(flat, axis, keepdim=True), axis)
        if dim is None:
            return place.reshape((1,) * x.dim() if keepdim else ())
        return place if keepdim else place.squeeze(axis)

    EXACT[packet] = version


_arg(aten.argmax, torch.amax)
_arg(aten.argmin, torch.amin)


@exact(aten.sort)
def sort(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Sorted values and their indices, always stable: kernels order equal values in different ways."""
    if "stable" in kwargs:
        kwargs["stable"] = True
        return tuple(torch.sort(x, **kwargs))  # type: ignore[return-value]
    names = ("dim", "descending")
    return tuple(torch.sort(x, stable=True, **dict(zip(names, args, strict=False)), **kwargs))  # type: ignore[return-value]


@exact(aten.topk)
def topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:  # noqa: A002, ARG001
    """The first ``k`` values of a stable sort, and their indices."""
    if x.dim() == 0:
        return x.clone(), torch.zeros((), dtype=torch.int64, device=x.device)
    values, places = torch.sort(x, dim=dim, descending=largest, stable=True)
    return values.narrow(dim, 0, k).clone(), places.narrow(dim, 0, k).clone()
