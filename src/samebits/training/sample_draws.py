"""Draws of PyTorch's in a dataset with the same bits on every host.

PyTorch's integers, permutations and uniform numbers from 0 to 1 are the same on every CPU. Its normal numbers come from
vectorised logarithms and cosines, which differ between instruction sets, and a product with a sum in ``uniform_`` may.
The functions here take their place while samples are made. They draw integers from the same generator.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from samebits.portable.elementary import normal_quantile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_RANDN, _RANDN_LIKE, _NORMAL = torch.randn, torch.randn_like, torch.normal
_NORMAL_, _UNIFORM_ = Tensor.normal_, Tensor.uniform_


_CELLS, _BITS, _BITS_INSIDE = 2**16, 52, 36


@cache
def _quantiles() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The lower ends of cells of equal probability, and their widths over the numbers inside; 0 for the outer cells."""
    lower = np.concatenate([[0.0], normal_quantile(np.arange(1, _CELLS) / _CELLS)])
    width = np.append(lower[1:] - lower[:-1], 0.0) * 2.0**-_BITS_INSIDE
    width[0] = 0.0
    return lower, width


def _fill_normal(tensor: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Fill a tensor with normal numbers: evenly within a cell, but for the outer cells, where the quantile is computed.

    Each operation is rounded correctly, so the numbers are the same on every host.
    """
    drawn = torch.empty(tensor.numel(), dtype=torch.int64).random_(0, 2**_BITS).numpy()
    cell, (lower, width) = drawn >> _BITS_INSIDE, _quantiles()
    standard = (drawn & (2**_BITS_INSIDE - 1)) + 0.5
    standard *= width.take(cell)
    standard += lower.take(cell)
    outer = np.flatnonzero((cell == 0) | (cell == _CELLS - 1))
    if outer.size:
        standard[outer] = normal_quantile((drawn[outer] + 0.5) * 2.0**-_BITS)
    with torch.no_grad():
        return tensor.copy_(torch.from_numpy(standard * std + mean).view(tensor.shape))


def _is_ours(tensor: Tensor, generator: torch.Generator | None) -> bool:
    own = generator is not None and generator is not torch.default_generator
    return tensor.device.type == "cpu" and tensor.is_floating_point() and not own


def _normal_(self: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: torch.Generator | None = None) -> Tensor:
    if _is_ours(self, generator):
        return _fill_normal(self, mean, std)
    return _NORMAL_(self, mean, std, generator=generator)


def _uniform_(self: Tensor, a: float = 0.0, b: float = 1.0, *, generator: torch.Generator | None = None) -> Tensor:
    _UNIFORM_(self, generator=generator)
    with torch.no_grad():
        return self.mul_(b - a).add_(a) if (a, b) != (0.0, 1.0) else self


def _randn(*size: Any, generator: torch.Generator | None = None, out: Tensor | None = None, **kwargs: Any) -> Tensor:
    if out is not None or generator is not None:
        return _RANDN(*size, generator=generator, out=out, **kwargs)
    made = torch.empty(*size, **kwargs)
    return _fill_normal(made) if _is_ours(made, None) else _RANDN(*size, **kwargs)


def _randn_like(input: Tensor, **kwargs: Any) -> Tensor:  # noqa: A002 - PyTorch's name
    made = torch.empty_like(input, **kwargs)
    return _fill_normal(made) if _is_ours(made, None) else _RANDN_LIKE(input, **kwargs)


def _normal(mean: Any, std: Any = 1.0, size: Any = None, **kwargs: Any) -> Tensor:
    if any(kwargs.get(name) is not None for name in ("generator", "out")):
        return _NORMAL(mean, std, **({} if size is None else {"size": size}), **kwargs)
    if size is None:
        size = np.broadcast_shapes(*(np.shape(one) for one in (mean, std)))
    return _randn(size, **kwargs).mul(std).add(mean)


_REPLACED: tuple[tuple[Any, str, Any, Any], ...] = (
    (torch, "randn", _RANDN, _randn),
    (torch, "randn_like", _RANDN_LIKE, _randn_like),
    (torch, "normal", _NORMAL, _normal),
    (Tensor, "normal_", _NORMAL_, _normal_),
    (Tensor, "uniform_", _UNIFORM_, _uniform_),
)


@contextmanager
def portable_draws() -> Iterator[None]:
    """Context in which a dataset's normal and uniform numbers are the same on every host."""
    for owner, name, _, ours in _REPLACED:
        setattr(owner, name, ours)
    try:
        yield
    finally:
        for owner, name, usual, _ in _REPLACED:
            setattr(owner, name, usual)
