"""Draws of PyTorch's in a dataset with the same bits on every host.

PyTorch's integers, permutations and uniform numbers from 0 to 1 are the same on every CPU. Its normal numbers come from
vectorised logarithms and cosines, which differ between instruction sets, and a product with a sum in ``uniform_`` may.
While samples are made, the functions here draw again what PyTorch has drawn, out of integers of the same generator.
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


def _standard_normal(count: int) -> NDArray[np.float64]:
    """Normal numbers: evenly within a cell, but for the outer cells, where the quantile is computed.

    Each operation is rounded correctly, so the numbers are the same on every host.
    """
    drawn = torch.empty(count, dtype=torch.int64).random_(0, 2**_BITS).numpy()
    cell, (lower, width) = drawn >> _BITS_INSIDE, _quantiles()
    standard: NDArray[np.float64] = (drawn & (2**_BITS_INSIDE - 1)) + 0.5
    standard *= width.take(cell)
    standard += lower.take(cell)
    outer = np.flatnonzero((cell == 0) | (cell == _CELLS - 1))
    if outer.size:
        standard[outer] = normal_quantile((drawn[outer] + 0.5) * 2.0**-_BITS)
    return standard


def _normal_again(tensor: Tensor, mean: Any = 0.0, std: Any = 1.0, generator: torch.Generator | None = None) -> Tensor:
    """Draw a tensor's normal numbers again, if they are of the CPU's default generator."""
    if _is_ours(tensor, generator):
        scale, middle = (one.detach().double().numpy() if isinstance(one, Tensor) else one for one in (std, mean))
        drawn = _standard_normal(tensor.numel()).reshape(tensor.shape) * scale + middle
        with torch.no_grad():
            tensor.copy_(torch.from_numpy(np.asarray(drawn)))
    return tensor


def _is_ours(tensor: Tensor, generator: torch.Generator | None) -> bool:
    own = generator is not None and generator is not torch.default_generator
    return tensor.device.type == "cpu" and tensor.is_floating_point() and not own


def _given(args: tuple[Any, ...], kwargs: dict[str, Any], *names: tuple[str, float]) -> list[Any]:
    """Arguments by position or name, or what they usually are."""
    return [args[at] if at < len(args) else kwargs.get(name, usual) for at, (name, usual) in enumerate(names)]


def _randn(*args: Any, **kwargs: Any) -> Tensor:
    return _normal_again(_RANDN(*args, **kwargs), generator=kwargs.get("generator"))


def _randn_like(*args: Any, **kwargs: Any) -> Tensor:
    return _normal_again(_RANDN_LIKE(*args, **kwargs), generator=kwargs.get("generator"))


def _normal(*args: Any, **kwargs: Any) -> Tensor:
    mean, std = _given(args, kwargs, ("mean", 0.0), ("std", 1.0))
    return _normal_again(_NORMAL(*args, **kwargs), mean, std, kwargs.get("generator"))


def _normal_(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    mean, std = _given(args, kwargs, ("mean", 0.0), ("std", 1.0))
    return _normal_again(_NORMAL_(self, *args, **kwargs), mean, std, kwargs.get("generator"))


def _uniform_(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    low, high = _given(args, kwargs, ("from", 0.0), ("to", 1.0))
    filled, generator = _UNIFORM_(self, *args, **kwargs), kwargs.get("generator")
    if (low, high) != (0.0, 1.0) and _is_ours(self, generator):
        with torch.no_grad():
            _UNIFORM_(self, generator=generator).mul_(high - low).add_(low)
    return filled


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
