"""Losses summed over samples, in a window, so that no split of the batch can change the sum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from samebits.numerics.exact import elementary
from samebits.numerics.exact.engine import below
from samebits.numerics.exact.grid import bits_of_sum, fixed_order_sum
from samebits.numerics.exact.windows import LOSS

if TYPE_CHECKING:
    from torch import Tensor

    from samebits.numerics.exact.windows import Windows


def cross_entropies(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Losses (rows,) and their gradients (rows, classes), both rounded to float32 once, of float32 logits."""
    values = logits.to(torch.float64)
    values = values.sub_(values.amax(-1, keepdim=True))
    powers = elementary.exp(values)
    total = fixed_order_sum(powers, (1,))
    chosen = values.gather(1, targets.unsqueeze(1))
    losses = elementary.log(total).sub_(chosen).squeeze(1)
    slopes = powers.div_(total)
    hit = torch.arange(slopes.shape[1], device=slopes.device) == targets.unsqueeze(1)
    slopes = torch.where(hit, slopes - 1.0, slopes)
    return losses.to(torch.float32), slopes.to(torch.float32)


def squared_errors(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Losses and their gradients, element by element."""
    difference = outputs.sub(targets)
    return difference.mul(difference), difference.mul(2.0)


def each_loss(outputs: Tensor, targets: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Losses of all targets and their gradients; axes between the first and the last count as samples."""
    if kind == "mse":
        return squared_errors(outputs, targets)
    return cross_entropies(outputs.flatten(0, -2), targets.flatten())


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, targets: Tensor, kind: str, terms: int, windows: Windows) -> Tensor:
        with below():
            losses, slopes = each_loss(outputs, targets, kind)
            ctx.save_for_backward(slopes.view(outputs.shape))
            values = windows.round(LOSS, losses, bits_of_sum(terms))
            return losses.new_zeros((), dtype=torch.float64) if values is None else values.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return slopes, None, None, None, None


def summed_loss(outputs: Tensor, targets: Tensor, kind: str, terms: int, windows: Windows) -> Tensor:
    """The sum of the losses of all rows, float64; ``terms`` is how many there are in a global batch."""
    return _Sum.apply(outputs, targets, kind, terms, windows)  # type: ignore[no-any-return,no-untyped-call]
