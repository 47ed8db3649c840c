"""What makes a sample's loss depend on the samples beside it, and so on the split of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from samebits.remarks import MixedSamples

if TYPE_CHECKING:
    from samebits.numerics.interface import MicroBatch, Numerics
    from samebits.remarks import BatchNorm


def batch_norms_of(model: nn.Module) -> tuple[str, ...]:
    """Modules that normalise by the part of a batch on their device, each as its class and its path."""
    named = model.named_modules()
    return tuple(f"{type(module).__name__} in model.{path}" for path, module in named if isinstance(module, _BatchNorm))


def by_shard(note: BatchNorm, model: nn.Module, numerics: Numerics, batch: MicroBatch) -> BatchNorm:
    """The note with the samples of a shard, and how much two of them differ from both as one, without dropout."""
    samples = batch.rows // len(batch.shards)
    two = batch.head(2 * samples)
    if len(two.shards) < 2:
        return note.model_copy(update={"samples": samples})
    module = numerics.module(model)
    for one in model.modules():
        one.training = one.training and isinstance(one, _BatchNorm)  # a frozen layer stays frozen

    with torch.no_grad():
        parts = (two, two._replace(shards=range(1)))
        apart, whole = (float(_losses(numerics, module, part).mean()) for part in parts)
    model.train()
    return note.model_copy(update={"samples": samples, "difference": abs(apart / whole - 1) if whole else None})


_MIXED = {"exact": 1e-3, "fast": 1e-2}
"""Relative differences between losses that rounding does not make, in half precision neither."""


def mixed_samples(model: nn.Module, numerics: Numerics, batch: MicroBatch) -> list[MixedSamples]:
    """A note if losses of samples depend on the others, without dropout, BatchNorm and draws in forward."""
    share: Literal["device", "shard"] = "shard" if numerics.name == "exact" else "device"
    rows = min(batch.rows, 16) if share == "device" else min(batch.rows, 2 * (batch.rows // len(batch.shards)))
    two = batch.head(rows)._replace(shards=range(1))
    one = two.head(two.rows // 2)
    if not one.rows or (numerics.own_loss and numerics.own_loss.of_batch):
        return []
    module, modes, apart = numerics.module(model), {layer: layer.training for layer in model.modules()}, numerics.apart
    try:
        model.eval()
        with torch.no_grad():
            parts = (two, two._replace(step=two.step + 1), one)
            whole, again, alone = (_losses(numerics, module, part) for part in parts)
    except Exception:  # noqa: BLE001 - a model need not take half of a batch
        return []
    finally:
        numerics.apart = apart
        for layer, mode in modes.items():
            layer.training = mode
    difference = float((whole[: len(alone)] - alone).abs().max() / whole.abs().max())
    if not torch.equal(whole, again) or not difference > _MIXED[numerics.name]:
        return []
    return [MixedSamples(part=share, difference=difference)]


def _losses(numerics: Numerics, module: nn.Module, part: MicroBatch) -> torch.Tensor:
    return numerics.losses(numerics.forward(module, part), part.targets).double()
