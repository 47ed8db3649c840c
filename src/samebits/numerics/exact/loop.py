"""One shard at a time, for any model: each logical shard goes through the model by itself.

Whatever the model does with its batch, a shard's gradient is then a function of that shard alone. Shards are summed by
the optimizer's float64 parameters, by ``DataParallel`` and by ``DistributedDataParallel``, in whatever order; so each
shard's gradient is rounded to a window (``windows``) on the way to its parameter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from samebits.numerics.exact.engine import below
from samebits.numerics.exact.grid import bits_of_sum
from samebits.numerics.exact.windows import GRADIENTS_OF

if TYPE_CHECKING:
    from torch import Tensor

    from samebits.numerics.exact.windows import Windows


class _Entry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, value: Tensor, windows: Windows, shards: int, place: str) -> Tensor:  # noqa: ARG004
        ctx.windows, ctx.shards, ctx.place = windows, shards, place
        return value.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with below():
            values = ctx.windows.round(f"{GRADIENTS_OF} {ctx.place}", grad, bits_of_sum(ctx.shards))
            values = torch.zeros_like(grad, dtype=torch.float64) if values is None else values
            return values, None, None, None, None


def enter(parameter: Tensor, value: Tensor, windows: Windows, shards: int, place: str) -> Tensor:
    """``value``, the float32 numbers that ``parameter`` holds, with gradients that are rounded on their way to it."""
    return _Entry.apply(parameter, value, windows, shards, place)  # type: ignore[no-any-return,no-untyped-call]
