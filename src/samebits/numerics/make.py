"""The numerics that params.yaml names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from samebits.numerics.exact.numerics import ExactNumerics
from samebits.numerics.fast import FastNumerics

if TYPE_CHECKING:
    import torch

    from samebits.numerics.interface import Numerics
    from samebits.params import Params
    from samebits.params.schema import NumericsName


def make_numerics(
    name: NumericsName,
    params: Params,
    device: torch.device,
    loss: Literal["cross_entropy", "mse"],
    target_shape: tuple[int, ...],
    *,
    shards: int | None = None,
) -> Numerics:
    """``shards`` is how many shards of ``params.exact`` make a batch here, all of them by default."""
    if name == "fast":
        return FastNumerics(params.train, device, loss)
    samples = params.train.global_batch_size // params.exact.shards
    number = params.exact.shards if shards is None else shards
    return ExactNumerics(
        params.train,
        device,
        loss,
        target_shape,
        seed=params.seed,
        shards=number,
        samples=number * samples,
        independent=params.model.source is None,
    )
