"""Where exact versions of operations are entered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch

from samebits.numerics.exact.grid import blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Version = Callable[..., Any]

V = TypeVar("V", bound="Version")

EXACT: dict[Any, Version] = {}
"""Exact versions by operation (an ``OpOverloadPacket`` of ``torch.ops.aten``)."""


class NotExactError(TypeError):
    """An operation has no exact version for these arguments; the text says why."""


def exact(*packets: Any) -> Callable[[V], V]:
    """Enter a function as the exact version of operations."""

    def enter(version: V) -> V:
        EXACT.update(dict.fromkeys(packets, version))
        return version

    return enter


def check_float32(x: Tensor) -> None:
    """Refuse every other type.

    Raises:
        NotExactError: it is another one.
    """
    if x.dtype != torch.float32:
        raise NotExactError(f"{x.dtype} has no exact version; use float32")


def wide(x: Tensor) -> Tensor:
    """A float64 copy of a float32 tensor.

    Raises:
        NotExactError: it has another type.
    """
    check_float32(x)
    return x.to(torch.float64)


def elementwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function of float64 numbers to float32 ones, block by block, and round once."""
    check_float32(x)
    source = x.contiguous()
    out = torch.empty_like(source)
    flat, target = source.view(-1), out.view(-1)
    for part in blocks(flat.numel(), 1, x.device):
        target[part] = function(flat[part].to(torch.float64))
    return out
