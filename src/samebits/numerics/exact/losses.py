"""Losses of all targets of a batch, and their sum in a window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from samebits.numerics.exact import elementary
from samebits.numerics.exact.compiled.library import compiled, threads
from samebits.numerics.exact.engine import below
from samebits.numerics.exact.grid import bits_of_sum
from samebits.numerics.exact.operations.normalization import exponentials
from samebits.numerics.exact.windows import LOSS

if TYPE_CHECKING:
    from samebits.models.nested import Nested
    from samebits.numerics.exact.compiled.library import Kernels
    from samebits.numerics.exact.windows import Windows


def _compiled_cross_entropies(library: Kernels, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor] | None:
    if (
        not library.has("cross_entropy", 2 * logits.shape[1])
        or not library.takes(logits)
        or not library.takes(targets, dtype=torch.int64)
    ):
        return None
    losses, slopes = logits.new_empty(logits.shape[0]), torch.empty_like(logits)
    if not library.answer("cross_entropy", logits, targets, losses, slopes, *logits.shape, threads()):
        wrong = targets[(targets < 0) | (targets >= logits.shape[1])]
        raise IndexError(f"Target {wrong[0]} is out of bounds.")  # as PyTorch says it
    return losses, slopes


@compiled(_compiled_cross_entropies)
def cross_entropies(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Losses (rows,) and their gradients (rows, classes), both rounded to float32 once, of float32 logits."""
    values, powers, total = exponentials(logits.to(torch.float64), 1)
    chosen = values.gather(1, targets.unsqueeze(1))
    losses = elementary.log(total).sub_(chosen).squeeze(1)
    slopes = powers.div_(total)
    hit = torch.arange(slopes.shape[1], device=slopes.device) == targets.unsqueeze(1)
    slopes = torch.where(hit, slopes - 1.0, slopes)
    return losses.to(torch.float32), slopes.to(torch.float32)


def each_loss(outputs: Tensor, targets: Nested, kind: str) -> tuple[Tensor, Tensor]:
    """Losses of all targets and their gradients; each step of a squared error is rounded to float32.

    Of a loss of the user's ``own`` the outputs are the losses.

    Under cross-entropy axes between first and last count as samples.
    """
    if kind == "own":
        return outputs, torch.ones_like(outputs)
    assert isinstance(targets, Tensor)
    if kind == "mse":
        difference = outputs.sub(targets)
        return difference.mul(difference), difference.mul(2.0)
    return cross_entropies(outputs.flatten(0, -2), targets.flatten())


class SummedLoss(torch.autograd.Function):
    """The float64 sum of the losses of all rows, in a window, so that no split of the batch can change it.

    ``terms`` counts the rows of a global batch. The gradients are the rounded ones of ``each_loss``.
    """

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, targets: Nested, kind: str, terms: int, windows: Windows) -> Tensor:
        """The sum, in the window of the loss."""
        with below():
            losses, slopes = each_loss(outputs, targets, kind)
            ctx.save_for_backward(slopes.view(outputs.shape))
            values = windows.round(LOSS, losses, bits_of_sum(terms))
            return losses.new_zeros((), dtype=torch.float64) if values is None else values.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients that ``forward`` has kept."""
        (slopes,) = ctx.saved_tensors
        return slopes, None, None, None, None
