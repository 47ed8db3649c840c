"""Sums into indexed places, on a grid, so that their order does not matter."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from samebits.numerics.exact.compiled.library import compiled, threads
from samebits.numerics.exact.grid import MANTISSA, shifter, snap_, top_of_magnitude
from samebits.numerics.exact.operations.reductions import or_not_finite
from samebits.numerics.exact.operations.registry import NotExactError, check_float32, exact, refused_if, wide

if TYPE_CHECKING:
    from torch import Tensor

    from samebits.numerics.exact.compiled.library import Kernels

aten = torch.ops.aten
_MOST = 2**31 - 1
_TWICE = "values are put into one place twice, and which one stays is not fixed"


def _of_elements(places: Tensor, dim: int, terms: Tensor) -> Tensor:
    """Places of slices of an axis as those of each element of ``terms``."""
    shape = [-1 if axis == dim % terms.dim() else 1 for axis in range(terms.dim())]
    return places.view(shape).expand_as(terms)


class _Slices(NamedTuple):
    """Slices of an axis: term number i belongs to slice ``places[i]``."""

    dim: int
    places: Tensor

    def add(self, x: Tensor, terms: Tensor) -> Tensor:
        """Add terms to their places in ``x``."""
        return x.index_add_(self.dim, self.places, terms)

    def join_largest(self, x: Tensor, terms: Tensor) -> Tensor:
        """Give each place in ``x`` the largest of itself and its terms."""
        return x.scatter_reduce_(self.dim, _of_elements(self.places, self.dim, terms), terms, "amax")

    def read(self, x: Tensor) -> Tensor:
        """What the place of each term holds."""
        return x.index_select(self.dim, self.places)


class _Elements(NamedTuple):
    """Elements of lines along an axis: each term has its own index, of the same shape."""

    dim: int
    places: Tensor

    def add(self, x: Tensor, terms: Tensor) -> Tensor:
        """Add terms to their places in ``x``."""
        return x.scatter_add_(self.dim, self.places, terms)

    def join_largest(self, x: Tensor, terms: Tensor) -> Tensor:
        """Give each place in ``x`` the largest of itself and its terms."""
        return x.scatter_reduce_(self.dim, self.places, terms, "amax")

    def read(self, x: Tensor) -> Tensor:
        """What the place of each term holds."""
        return x.gather(self.dim, self.places)


def _by_kernel(library: Kernels, x: Tensor, source: Tensor, places: _Slices | _Elements) -> Tensor | None:
    if not library.is_host or x.dim() != source.dim() or x.dim() == 0:
        return None
    x, source = x.contiguous(), source.contiguous()
    if not library.takes(x, source):
        return None
    dim, index = places.dim % x.dim(), places.places
    if x.shape[:dim] != source.shape[:dim] or x.shape[dim + 1 :] != source.shape[dim + 1 :]:
        return None
    shape = source.shape if isinstance(places, _Elements) else source.shape[dim : dim + 1]
    if index.dtype not in (torch.int32, torch.int64) or index.shape != shape:  # PyTorch says what is wrong
        return None
    index, out = index.to(torch.int64).contiguous(), torch.empty_like(x)
    sizes = math.prod(x.shape[:dim]), x.shape[dim], source.shape[dim], math.prod(x.shape[dim + 1 :])
    done = library.answer("accumulated", x, source, index, out, *sizes, isinstance(places, _Elements), threads())
    return out if done else None


@compiled(_by_kernel)
def _accumulated(x: Tensor, source: Tensor, places: _Slices | _Elements) -> Tensor:
    """``x`` with terms added at places; integers need no grid.

    Each place has a grid of its own, that of the terms that meet there: so it does not matter what else is in the
    tensors. A place that gets no term stays as it is.
    """
    if not x.is_floating_point() and not x.is_complex():
        return places.add(x.clone(), source)
    base, terms = wide(x), wide(source)
    count = places.add(torch.zeros_like(base), torch.ones_like(terms))
    base_known = torch.where(base.isfinite(), base, 0.0)
    terms_known = torch.where(terms.isfinite(), terms, 0.0)
    size = places.join_largest(base_known.abs(), terms_known.abs())
    room = top_of_magnitude(count)  # bits of the number of numbers that meet: terms, and what was there
    shift = shifter(top_of_magnitude(size) + room, MANTISSA)
    finite = places.add(snap_(base_known, shift), snap_(terms_known, places.read(shift)))
    infinite = places.add(torch.where(base.isfinite(), 0.0, base), torch.where(terms.isfinite(), 0.0, terms))
    return torch.where(count > 0, or_not_finite(finite, infinite), base).to(x.dtype)


@exact(aten.embedding_dense_backward)
def embedding_dense_backward(
    grad: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    """The gradient of an embedding's weight: for each row the sum of the gradients where it was looked up.

    Raises:
        NotExactError: gradients are to be divided by how often a row was looked up.
    """
    if scale_grad_by_freq:
        raise NotExactError("an embedding with scale_grad_by_freq has no exact version")
    flat, rows = indices.reshape(-1).to(torch.int64), grad.reshape(-1, grad.shape[-1])
    if padding_idx >= 0:
        rows = torch.where((flat == padding_idx).unsqueeze(1), 0.0, rows)
    total = rows.new_zeros((num_weights, rows.shape[1]))
    if flat.numel() >= num_weights or flat.is_cuda:  # on a GPU, the host would wait for the rows that are met
        return _accumulated(total, rows, _Slices(0, flat))
    met, places = torch.unique(flat, return_inverse=True)
    return total.index_copy_(0, met, _accumulated(total[: len(met)], rows, _Slices(0, places)))


@exact(aten.index_add)
def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    """``x`` with ``alpha * source`` added to the slices of ``dim`` that ``index`` names."""
    terms = source if alpha == 1 else source.mul(alpha)
    return _accumulated(x, terms, _Slices(dim, index))


@exact(aten.scatter_add)
def scatter_add(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """``x`` with each element of ``source`` added at the place along ``dim`` that ``index`` gives for it."""
    if index.numel() == 0:
        return x.clone()
    if x.dim() == 0:
        return scatter_add(x.view(1), 0, index.view(-1), source.view(-1)).view(())
    part = source[tuple(slice(n) for n in index.shape)]
    return _accumulated(x, part, _Elements(dim, index))


@exact(aten.index_put, aten._index_put_impl)
def index_put(x: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False, *_: bool) -> Tensor:
    """``x`` with ``values`` added at places, or put into places that must differ."""
    if accumulate:
        return _added(x, indices, values)
    result: Tensor = aten.index_put(x, indices, values)
    return result


def _added(x: Tensor, indices: list[Tensor | None], values: Tensor) -> Tensor:
    """``x`` with ``values`` added at places: slices of the axes with indices, where these are neighbours."""
    met = {axis: index for axis, index in enumerate(indices) if index is not None}
    first, last = min(met), max(met) + 1
    if last - first > len(met) or any(index.dtype in (torch.bool, torch.uint8) for index in met.values()):
        first, last = 0, x.dim()  # a mask may be of several axes
    before, indexed, after = x.shape[:first], x.shape[first:last], x.shape[last:]
    place = torch.arange(math.prod(indexed), device=x.device).view(indexed)[_places(indices[first:last])]
    terms = values.expand(*before, *place.shape, *after).reshape(*before, place.numel(), *after)
    return index_add(x.reshape(*before, math.prod(indexed), *after), first, place.reshape(-1), terms).view(x.shape)


@refused_if(_TWICE, aten.index_put, aten._index_put_impl)
def index_put_twice(
    result: Tensor, _: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False, *__: bool
) -> Tensor | None:
    """Whether different values were put into one place."""
    return None if accumulate else _differ(result[_places(indices)], values)


def _places(indices: list[Tensor | None]) -> tuple[slice | Tensor, ...]:
    """The index of a tensor, with a full slice for each axis without indices."""
    return tuple(slice(None) if index is None else index for index in indices)


def _differ(read: Tensor, values: Tensor) -> Tensor:
    if not read.is_floating_point():
        return (read != values).any()
    unequal = (read != values) | (read.signbit() != values.signbit())  # a zero may replace a negative zero
    return (unequal & ~(read.isnan() & values.isnan())).any()


@exact(aten.scatter)
def scatter(x: Tensor, dim: int, index: Tensor, value: Tensor | float, *, reduce: str | None = None) -> Tensor:
    """``x`` with values put into places along ``dim`` that must differ.

    Raises:
        NotExactError: ``reduce`` is set.
    """
    if reduce is not None:
        raise NotExactError("scatter with reduce has no exact version; use scatter_add")
    return x.scatter(dim, index, value)


@refused_if(_TWICE, aten.scatter)
def scatter_twice(
    result: Tensor, _: Tensor, dim: int, index: Tensor, value: Tensor | float, **__: object
) -> Tensor | None:
    """Whether different values were put into one place."""
    if not isinstance(value, torch.Tensor):
        return None
    return _differ(result.gather(dim, index), value[tuple(slice(n) for n in index.shape)])


@exact(aten.put)
def put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """``index_put`` into a tensor as one line."""
    line: Tensor = index_put(x.reshape(-1), [index.reshape(-1)], source.reshape(-1), accumulate)
    return line.view(x.shape)


@refused_if(_TWICE, aten.put)
def put_twice(result: Tensor, _: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor | None:
    """Whether different values were put into one place."""
    return None if accumulate else _differ(result.reshape(-1)[index], source)


def _ordered(x: Tensor, *, largest: bool) -> Tensor:
    """Integers in the order of float32 numbers; NaN is the ``largest`` or the least, and zero has one sign."""
    bits = torch.where(x == 0, 0.0, x).view(torch.int32)
    keys = bits ^ ((bits >> 31) & _MOST)
    return torch.where(x.isnan(), _MOST if largest else -_MOST - 1, keys)


def _of_ordered(keys: Tensor) -> Tensor:
    """The inverse of ``_ordered``."""
    x = (keys ^ ((keys >> 31) & _MOST)).view(torch.float32)
    return torch.where(x.isnan(), math.nan, x)


@exact(aten.scatter_reduce)
def scatter_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """``x`` with the elements of ``source`` joined at the places along ``dim`` that ``index`` gives for them.

    Raises:
        NotExactError: they are to be multiplied.
    """
    if reduce == "prod":
        raise NotExactError("a product of elements that meet in one place has no exact version")
    if not x.is_floating_point():
        result: Tensor = aten.scatter_reduce(x, dim, index, source, reduce, include_self=include_self)
        return result
    check_float32(x)
    if reduce in ("amax", "amin"):
        keys = (_ordered(part, largest=reduce == "amax") for part in (x, source))
        return _of_ordered(aten.scatter_reduce(next(keys), dim, index, next(keys), reduce, include_self=include_self))
    start = x if include_self else x.scatter(dim, index, 0.0)
    total = scatter_add(start, dim, index, source)
    if reduce == "sum":
        return total
    count = torch.ones_like(x, dtype=torch.int64)
    count = count if include_self else count.scatter(dim, index, 0)
    count = count.scatter_add(dim, index, torch.ones_like(source, dtype=torch.int64))
    return total.div(count.clamp(min=1).to(total.dtype))


@exact(aten.index_reduce)
def index_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """``x`` with slices of ``source`` joined to the slices of ``dim`` that ``index`` names; see ``scatter_reduce``."""
    if not x.dim():
        line = scatter_reduce(x.view(1), 0, index.view(-1), source.view(-1), reduce, include_self=include_self)
        return line.view(())
    return scatter_reduce(x, dim, _of_elements(index, dim, source), source, reduce, include_self=include_self)


def onto(x: Tensor, axis: int, places: Tensor, size: int) -> Tensor:
    """The sum of the slices of an axis that have one place among ``size``."""
    shape = list(x.shape)
    shape[axis] = size
    return index_add(x.new_zeros(shape), axis, places, x)


@exact(aten.unfold_backward)
def unfold_backward(grad: Tensor, input_sizes: list[int], dim: int, size: int, step: int) -> Tensor:
    """The gradient of ``Tensor.unfold``: float64 sums over the windows that hold an element, in a fixed order."""
    if not input_sizes:
        return grad.sum().reshape(())
    total = torch.zeros(input_sizes, dtype=torch.float64, device=grad.device)
    for offset in range(size):
        part = grad.select(-1, offset)
        count = part.shape[dim]
        places = torch.arange(offset, offset + (count - 1) * step + 1, step, device=grad.device)
        total.index_copy_(dim, places, total.index_select(dim, places).add_(part))
    return total.to(grad.dtype)
