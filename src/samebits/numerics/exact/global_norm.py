"""BatchNorm over the whole batch under ``exact``: the shards of all ranks share a mean and a variance.

Sums over the batch are exact: each is on a grid that the largest number of the whole batch sets, so that ranks meet
twice for each sum, and no result depends on how shards are spread over them.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from samebits.numerics.exact.engine import below
from samebits.numerics.exact.grid import bits_of_sum, shifter, snap_, top_of_magnitude
from samebits.numerics.exact.of_shards import UnderVmap, first
from samebits.numerics.exact.operations.reductions import divided


class Reduce(Protocol):
    """The sum over ranks of values, or their maximum."""

    def __call__(self, values: Tensor, *, maximum: bool = False) -> Tensor:
        """Every rank must call it."""


class JoinedBatch(NamedTuple):
    """The shards of all ranks, of which this one's run in one pass; not ``at_once``: the one shard of a trial."""

    all_reduce: Reduce
    shards: int
    at_once: bool = True


def alone(values: Tensor, *, maximum: bool = False) -> Tensor:  # noqa: ARG001
    """``Reduce`` of a single rank."""
    return values


def _means(values: Tensor, batch: JoinedBatch) -> Tensor:
    """Mean of each channel over the batch, (kinds, channels), of float64 (kinds, shards, samples, channels, values)."""
    largest = batch.all_reduce(values.abs().amax((1, 2, 4)), maximum=True)
    count = batch.shards * values.shape[2] * values.shape[4]
    shift = shifter(top_of_magnitude(largest), bits_of_sum(count))
    sums = snap_(values, shift[:, None, None, :, None]).sum((1, 2, 4))
    return divided(batch.all_reduce(sums), count)


class _Norm(torch.autograd.Function):
    """Values (shards, samples, channels, values) normalised by the batch; its mean and variance, (channels)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, batch: JoinedBatch) -> tuple[Tensor, Tensor, Tensor]:
        with below():
            wide = x.to(torch.float64)
            mean = _means(wide.unsqueeze(0).clone(), batch)[0]
            wide = wide.sub_(mean[:, None])
            variance = _means(wide.square().unsqueeze(0), batch)[0]
            root = variance.add(eps).sqrt_()
            y = wide.div_(root[:, None]).to(torch.float32)
            count = batch.shards * x.shape[1] * x.shape[3]
            found = mean.to(torch.float32), variance.mul_(count / max(count - 1, 1)).to(torch.float32)
        ctx.save_for_backward(y, root)
        ctx.batch = batch
        ctx.mark_non_differentiable(*found)
        return y, *found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None, None]:
        y, root = ctx.saved_tensors
        with below():
            grad, y = grad.to(torch.float64), y.to(torch.float64)
            along = grad.mul(y)
            of_mean, of_scale = _means(torch.stack([grad, along]), ctx.batch)
            slopes = grad.sub_(of_mean[:, None]).sub_(y.mul_(of_scale[:, None])).div_(root[:, None])
            return slopes.to(torch.float32), None, None


class _OfShards(UnderVmap):
    """``_Norm`` where the axis of shards is that of ``torch.func.vmap``."""

    @staticmethod
    def forward(x: Tensor, eps: float, _: JoinedBatch) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = _Norm.apply(x.unsqueeze(0), eps, JoinedBatch(alone, 1))  # type: ignore[no-untyped-call]
        return results[0].squeeze(0), *results[1:]

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, eps: float, batch: JoinedBatch
    ) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
        """The results, of which the values have an axis of shards."""
        results = _Norm.apply(first(x, in_dims[0], info.batch_size), eps, batch)  # type: ignore[no-untyped-call]
        return results, (0, None, None)


def normalized(x: Tensor, eps: float, batch: JoinedBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Values of a shard under ``vmap``, (samples, channels, ...), normalised; the batch's mean and variance.

    The variance is the unbiased one, which buffers follow.
    """
    lines = x.flatten(2).contiguous() if x.dim() > 2 else x.unsqueeze(2)
    if not batch.at_once:
        y, mean, variance = _Norm.apply(lines.unsqueeze(0), eps, batch)  # type: ignore[no-untyped-call]
    else:
        y, mean, variance = _OfShards.apply(lines, eps, batch)  # type: ignore[no-untyped-call]
    return y.view(x.shape), mean, variance
