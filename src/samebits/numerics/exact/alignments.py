"""The CTC loss (Graves et al. 2006, equations 5 to 16) of whole batches, in float64.

A path goes through a sequence of states: the labels, with a blank before, between and behind them. Forward and backward
variables are logarithms of the probabilities of all beginnings and ends of paths; each step adds up at most three of
them, in one order. PyTorch's kernels differ between devices, and some add gradients in the order of their threads.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from samebits.numerics.exact import elementary
from samebits.numerics.exact.engine import below
from samebits.numerics.exact.of_shards import UnderVmap, first

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

_REDUCTIONS = ("none", "mean", "sum")


class _Losses(torch.autograd.Function):
    """The losses (samples,) of all samples.

    Shapes: log_probs (steps, samples, classes), labels (samples, most labels), steps and lengths (samples,).
    """

    @staticmethod
    def forward(ctx: Any, log_probs: Tensor, labels: Tensor, steps: Tensor, lengths: Tensor, blank: int) -> Tensor:
        with below():
            _check(log_probs, labels, steps, lengths)
            states = _states(labels, lengths, blank)
            _check_classes(states, log_probs.shape[2])
            emitted = _emitted(log_probs, states)
            skips = _skips(states, blank)
            now = torch.full_like(emitted[0], -math.inf)
            now[:, :2] = emitted[0, :, :2]
            begun = [now]
            for step in range(1, len(emitted)):
                ways = (now, _moved(now, 1), _moved(now, 2).where(skips, -math.inf))
                after = _sum_of(ways).add_(emitted[step])
                now = after.where((step < steps).unsqueeze(1), now)
                begun.append(now)
            likelihood = _sum_of([now.where(ends, -math.inf).amax(1) for ends in _ends(states, lengths)])
            ctx.save_for_backward(log_probs, states, steps, lengths, likelihood, *begun)
            ctx.blank = blank
            return likelihood.neg().to(torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        log_probs, states, steps, lengths, likelihood, *begun = ctx.saved_tensors
        with below():
            emitted = _emitted(log_probs, states)
            skipped = _moved(_skips(states, ctx.blank), -2, empty=False)
            ends = _ends(states, lengths)
            last = torch.zeros_like(begun[0]).where(ends[0] | ends[1], -math.inf)
            slopes = torch.empty_like(log_probs)
            now = last
            for step in reversed(range(len(emitted))):
                if step + 1 < len(emitted):
                    on = emitted[step + 1].add(now)
                    before = _sum_of((on, _moved(on, -1), _moved(on, -2).where(skipped, -math.inf)))
                    now = before.where((step + 1 < steps).unsqueeze(1), last)
                shares = elementary.exp(begun[step].add(now).sub_(likelihood.unsqueeze(1)))
                slope = elementary.exp(log_probs[step].to(torch.float64))
                for place in range(states.shape[1]):  # of two equal labels one after the other
                    slope.scatter_add_(1, states[:, place : place + 1], shares[:, place : place + 1].neg())
                slope.mul_(grad.unsqueeze(1))
                # A sample without a path has no gradient but where the loss leaves it out.
                slopes[step] = slope.where(((step < steps) & (grad != 0)).unsqueeze(1), 0.0)
        return slopes, None, None, None, None


def _check(log_probs: Tensor, labels: Tensor, steps: Tensor, lengths: Tensor) -> None:
    """Raise ValueError for more steps or labels than there are."""
    for name, given, most in (("input_lengths", steps, len(log_probs)), ("target_lengths", lengths, labels.shape[1])):
        if bool(((given < 0) | (given > most)).any()):
            raise ValueError(f"{name}: got {int(given.min())} to {int(given.max())}, expected 0 to {most}")


def _check_classes(states: Tensor, classes: int) -> None:
    """Raise ValueError for a label, or a blank, that is no class."""
    if bool(((states < 0) | (states >= classes)).any()):
        raise ValueError(f"targets: got {int(states.min())} to {int(states.max())}, expected classes below {classes}")


def _states(labels: Tensor, lengths: Tensor, blank: int) -> Tensor:
    """The labels with a blank before, between and behind them; whatever pads them counts as blank."""
    states = labels.new_full((labels.shape[0], 2 * labels.shape[1] + 1), blank)
    are_labels = torch.arange(labels.shape[1], device=labels.device) < lengths.unsqueeze(1)
    states[:, 1::2] = labels.where(are_labels, blank)
    return states


def _emitted(log_probs: Tensor, states: Tensor) -> Tensor:
    """The logarithm of each state's probability in each step (steps, samples, states)."""
    return log_probs.gather(2, states.expand(len(log_probs), *states.shape)).to(torch.float64)


def _skips(states: Tensor, blank: int) -> Tensor:
    """Whether a path may come from two states before, past a blank: to a label that is not the one before."""
    return (states != blank) & (states != _moved(states, 2, empty=blank))


def _ends(states: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Whether a state is the blank behind the last label, and whether it is the last label."""
    places = torch.arange(states.shape[1], device=states.device)
    last = lengths.mul(2).unsqueeze(1)
    return places == last, places == last - 1


def _moved(x: Tensor, places: int, *, empty: float = -math.inf) -> Tensor:
    """Each row moved by some places towards its end, or towards its start if negative."""
    start, end = max(places, 0), x.shape[1] + min(places, 0)
    moved = torch.full_like(x, empty)
    moved[:, start:end] = x[:, start - places : end - places]
    return moved


def _sum_of(logarithms: Sequence[Tensor]) -> Tensor:
    """The logarithm of the sum of numbers that are given by theirs."""
    most = logarithms[0]
    for one in logarithms[1:]:
        most = most.maximum(one)
    finite = most.where(most != -math.inf, 0.0)
    total = elementary.exp(logarithms[0].sub(finite))
    for one in logarithms[1:]:
        total.add_(elementary.exp(one.sub(finite)))
    return elementary.log(total).add_(finite).where(most != -math.inf, most)


class _LossesOfShards(UnderVmap):
    """``_Losses`` under ``torch.func.vmap``: the samples of all shards are one batch."""

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        return _losses(*arguments)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
        """The losses with the axis of shards in front."""
        shards = info.batch_size
        log_probs, *others = (first(x, dim, shards) for x, dim in zip(arguments[:4], in_dims[:4], strict=True))
        of_samples = (one.flatten(0, 1) for one in others)
        losses = _losses(log_probs.movedim(0, 1).flatten(1, 2), *of_samples, arguments[4])
        return losses.view(shards, -1), 0


def _losses(*arguments: Any) -> Tensor:
    losses: Tensor = _Losses.apply(*arguments)  # type: ignore[no-untyped-call]
    return losses


def _ctc_loss(losses_of: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``F.ctc_loss``, and ``torch.ctc_loss``, whose reduction is a number."""

    def version(
        log_probs: Tensor,
        targets: Tensor,
        input_lengths: Tensor | Sequence[int],
        target_lengths: Tensor | Sequence[int],
        blank: int = 0,
        reduction: str | int = "mean",
        zero_infinity: bool = False,
    ) -> Tensor:
        if log_probs.dtype != torch.float32:
            refused: Any = torch.ctc_loss
            number = _REDUCTIONS.index(reduction) if isinstance(reduction, str) else reduction
            loss: Tensor = refused(log_probs, targets, input_lengths, target_lengths, blank, number, zero_infinity)
            return loss
        one = log_probs.dim() == 2
        if one:
            log_probs = log_probs.unsqueeze(1)
        steps, lengths = (
            torch.as_tensor(given, device=log_probs.device).to(torch.int64).reshape(-1)
            for given in (input_lengths, target_lengths)
        )
        labels = targets.to(log_probs.device, torch.int64)
        if one:
            labels = labels.reshape(1, -1)
        elif labels.dim() == 1:
            labels = _padded(labels, lengths)
        losses = losses_of(log_probs, labels, steps, lengths, blank)
        if zero_infinity:
            losses = losses.where(losses != math.inf, 0.0)
        if reduction in ("mean", 1):
            return losses.div(lengths.clamp(min=1).to(losses.dtype)).mean()
        if reduction in ("sum", 2):
            return losses.sum()
        return losses.squeeze(0) if one else losses

    return version


def _padded(labels: Tensor, lengths: Tensor) -> Tensor:
    """Labels that stand behind each other, a row for each sample; what is behind a sample's own has no meaning."""
    places = torch.arange(int(lengths.max()), device=labels.device)
    starts = lengths.cumsum(0).sub(lengths).unsqueeze(1)
    return labels[(starts + places).clamp(max=len(labels) - 1)]


FORMS = {F.ctc_loss: _ctc_loss(_losses), torch.ctc_loss: _ctc_loss(_losses)}
OF_SHARDS = {name: _ctc_loss(_LossesOfShards.apply) for name in FORMS}
"""The same for several shards in one pass."""
