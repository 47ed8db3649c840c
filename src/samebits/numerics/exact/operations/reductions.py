"""Sums and what is made of them, in a fixed order of float64 additions; maxima, with one sign of zero."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from samebits.numerics.exact import elementary
from samebits.numerics.exact.grid import bits_of_sum, fixed_order_sum, halved, power_of_two, shifter, snap_, top
from samebits.numerics.exact.operations.pointwise import to_fit
from samebits.numerics.exact.operations.registry import EXACT, NotExactError, exact, wide

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

aten = torch.ops.aten
Dims = "int | Sequence[int] | None"


def dims_of(x: Tensor, dim: int | Sequence[int] | None) -> tuple[int, ...]:
    """The axes that ``dim`` names, all of them for None or an empty list."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(x.dim()))
    return (dim,) if isinstance(dim, int) else tuple(dim)


def _shaped(total: Tensor, dims: tuple[int, ...], *, keepdim: bool) -> Tensor:
    return total if keepdim or not total.dim() else total.squeeze(dims)


def _of_type(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Integers as floating-point numbers if that is what is asked for, and the other way round."""
    if x.is_complex() or (dtype is not None and dtype.is_complex):
        raise NotExactError("complex numbers have no exact version")
    if dtype is None or dtype.is_floating_point == x.is_floating_point():
        return x
    return to_fit(x, dtype).to(dtype)


def _count(x: Tensor, dims: tuple[int, ...]) -> int:
    return math.prod(x.shape[d] for d in dims) if x.dim() else 1


@exact(aten.sum)
def total(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Sum; rounded once."""
    x = _of_type(x, dtype)
    if not x.is_floating_point():
        return torch.sum(x, dims_of(x, dim), keepdim, dtype=dtype) if x.dim() else torch.sum(x, dtype=dtype)
    dims = dims_of(x, dim)
    return _shaped(fixed_order_sum(wide(x), dims), dims, keepdim=keepdim).to(dtype or x.dtype, copy=True)


@exact(aten.mean)
def mean(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Mean; the sum is divided in float64."""
    x, dims = _of_type(x, dtype), dims_of(x, dim)
    found = divided(fixed_order_sum(wide(x), dims), _count(x, dims))
    return _shaped(found, dims, keepdim=keepdim).to(dtype or x.dtype)


def divided(x: Tensor, count: float) -> Tensor:
    """A true division by a number."""
    return x.div(elementary.divisor(x, count))


def moments(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, deviations and sum of squared deviations of float64 numbers, with ``dims`` kept."""
    middle = divided(fixed_order_sum(x, dims), _count(x, dims))
    deviation = x.sub(middle)
    return middle, deviation, fixed_order_sum(deviation.mul(deviation), dims)


def _variance(x: Tensor, dim: Any, correction: float | None, keepdim: bool) -> tuple[Tensor, Tensor]:
    dims = dims_of(x, dim)
    middle, _, squares = moments(wide(x), dims)
    freedom = max(0.0, _count(x, dims) - (1 if correction is None else correction))
    return (
        _shaped(divided(squares, freedom), dims, keepdim=keepdim),
        _shaped(middle, dims, keepdim=keepdim),
    )


@exact(aten.var)
def var(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    """Variance."""
    return _variance(x, dim, correction, keepdim)[0].to(x.dtype)


@exact(aten.std)
def std(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    """Standard deviation."""
    return elementary.sqrt(_variance(x, dim, correction, keepdim)[0]).to(x.dtype)


@exact(aten.var_mean)
def var_mean(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Variance and mean."""
    variance, middle = _variance(x, dim, correction, keepdim)
    return variance.to(x.dtype), middle.to(x.dtype)


@exact(aten.std_mean)
def std_mean(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Standard deviation and mean."""
    variance, middle = _variance(x, dim, correction, keepdim)
    return elementary.sqrt(variance).to(x.dtype), middle.to(x.dtype)


@exact(aten.linalg_vector_norm)
def vector_norm(
    x: Tensor,
    ord: float = 2,  # noqa: A002 - as PyTorch calls it
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Of order 1, 2 or infinity."""
    dims = dims_of(x, dim)
    if ord == 2:
        values = wide(x)
        found = elementary.sqrt(fixed_order_sum(values.mul(values), dims))
    elif ord == 1:
        found = fixed_order_sum(wide(x).abs_(), dims)
    elif ord == math.inf:
        found = torch.amax(wide(x).abs_(), dims, keepdim=True)
    else:
        raise NotExactError(f"a norm of order {ord} has no exact version; 1, 2 and infinity have one")
    return _shaped(found, dims, keepdim=keepdim).to(dtype or x.dtype)


@exact(aten.logsumexp)
def logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """The logarithm of a sum of exponentials."""
    dims = dims_of(x, dim)
    values = wide(x)
    largest = values.amax(dims, keepdim=True)
    finite = torch.where(largest.isinf(), 0.0, largest)
    found = elementary.log(fixed_order_sum(elementary.exp(values.sub(finite)), dims)).add_(finite)
    found = torch.where(largest.isinf(), largest, found)
    return _shaped(found, dims, keepdim=keepdim).to(x.dtype)


@exact(aten.prod)
def prod(x: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Product, by halving."""
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
    """Running sums; of integers on a grid, so that the order of a scan does not matter."""
    x = _of_type(x, dtype)
    if not x.is_floating_point() or x.dim() == 0 or x.numel() == 0:
        return torch.cumsum(x, dim, dtype=dtype)
    values = wide(x)
    finite = values.isfinite()
    known = torch.where(finite, values, 0.0)
    bits, tops = bits_of_sum(x.shape[dim]), top(known, dim)
    unit = power_of_two(tops - bits)
    integers = snap_(known, shifter(tops, bits)).div_(unit).to(torch.int64)
    sums = torch.cumsum(integers, dim).to(torch.float64).mul_(unit)
    return or_not_finite(sums, torch.cumsum(torch.where(finite, 0.0, values), dim)).to(dtype or x.dtype)


def or_not_finite(sums: Tensor, others: Tensor) -> Tensor:
    """Sums of the finite terms, unless the sum of the others is infinite or NaN, whose sign devices choose."""
    return torch.where(others.isnan(), math.nan, torch.where(others.isinf(), others, sums))


@exact(aten.cumprod)
def cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Running products in a fixed order: each is multiplied by the one 1, 2, 4, ... places before."""
    x = _of_type(x, dtype)
    if not x.is_floating_point() or x.dim() == 0:
        return torch.cumprod(x, dim, dtype=dtype)
    values, count, shift = wide(x), x.shape[dim], 1
    while shift < count:
        later = values.narrow(dim, shift, count - shift) * values.narrow(dim, 0, count - shift)
        values = torch.cat([values.narrow(dim, 0, shift), later], dim)
        shift *= 2
    return values.to(dtype or x.dtype)


def _extreme(packet: Any) -> None:
    def version(*args: Any, **kwargs: Any) -> Any:
        found = packet(*args, **kwargs)
        if isinstance(found, torch.Tensor):
            return found.add_(0.0) if found.is_floating_point() else found
        return (found[0].add_(0.0) if found[0].is_floating_point() else found[0], *found[1:])

    EXACT[packet] = version


for _packet in (aten.amax, aten.amin, aten.aminmax):
    _extreme(_packet)


def _first(packet: Any, best: Any) -> None:
    """Max and min with indices: of equal values the first, which kernels do not promise."""

    def version(x: Tensor, dim: Any = None, keepdim: bool = False) -> Any:
        if isinstance(dim, torch.Tensor):
            return EXACT[aten.maximum if best is torch.amax else aten.minimum](x, dim)
        if dim is None:
            found = packet(x)
            return found.add_(0.0) if found.is_floating_point() else found
        if x.dim() == 0:
            return x.clone(), torch.zeros((), dtype=torch.int64, device=x.device)
        value = best(x, dim, keepdim=True)
        value = value.add_(0.0) if value.is_floating_point() else value
        place = first_equal(x, value, dim)
        return (value, place) if keepdim else (value.squeeze(dim), place.squeeze(dim))

    EXACT[packet] = version


def first_equal(x: Tensor, value: Tensor, dim: int, among: Tensor | None = None) -> Tensor:
    """The first index along ``dim`` at which ``x`` is ``value``, or both are NaN; ``among`` says which may be taken."""
    count = x.shape[dim]
    shape = [1] * x.dim()
    shape[dim] = count
    places = torch.arange(count, device=x.device).view(shape)
    found = (x == value) | (x.isnan() & value.isnan())
    return torch.where(found if among is None else found & among, places, count).amin(dim, keepdim=True)


_first(aten.max, torch.amax)
_first(aten.min, torch.amin)


@exact(aten.argmax)
def argmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """The first of the largest."""
    return _arg(x, dim, torch.amax, keepdim=keepdim)


@exact(aten.argmin)
def argmin(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """The first of the smallest."""
    return _arg(x, dim, torch.amin, keepdim=keepdim)


def _arg(x: Tensor, dim: int | None, best: Any, *, keepdim: bool) -> Tensor:
    if x.dim() == 0:
        return torch.zeros((), dtype=torch.int64, device=x.device)
    flat, axis = (x.reshape(-1), 0) if dim is None else (x, dim)
    place = first_equal(flat, best(flat, axis, keepdim=True), axis)
    if dim is None:
        return place.reshape((1,) * x.dim() if keepdim else ())
    return place if keepdim else place.squeeze(axis)


@exact(aten.sort)
def sort(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Stable, because kernels order equal values in different ways."""
    if "stable" in kwargs:
        kwargs["stable"] = True
        return tuple(torch.sort(x, **kwargs))  # type: ignore[return-value]
    names = ("dim", "descending")
    return tuple(torch.sort(x, stable=True, **dict(zip(names, args, strict=False)), **kwargs))  # type: ignore[return-value]


@exact(aten.topk)
def topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:  # noqa: A002, ARG001
    """The first k of a stable sort."""
    if x.dim() == 0:
        return x.clone(), torch.zeros((), dtype=torch.int64, device=x.device)
    values, places = torch.sort(x, dim=dim, descending=largest, stable=True)
    return values.narrow(dim, 0, k).clone(), places.narrow(dim, 0, k).clone()
