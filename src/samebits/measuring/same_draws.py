"""Trains the first steps again, with random draws that depend only on the sample, for a comparison across devices.

In PyTorch each device draws its own random numbers, so a model with dropout learns something else with each number of
devices. With draws that depend on the sample it does not, and any remaining difference has another cause.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from samebits.errors import UserError
from samebits.numerics.draws import SharedDraws
from samebits.numerics.fast import FastNumerics
from samebits.training.loop import Tracker, train

if TYPE_CHECKING:
    from samebits.params import Params
    from samebits.training.loop import Trainable

STEPS = 8


def measure_same_draws(trainable: Trainable, params: Params) -> tuple[float, ...] | None:
    """The losses of the first steps; None if draws cannot be shared or a loss is not finite.

    Every rank must call it. Draws of a compiled model, of replicas and of CUDA graphs cannot be replaced.
    """
    numerics, settings = trainable.numerics, params.train
    replicas = len(trainable.worker.cuda_devices) > 1
    if not isinstance(numerics, FastNumerics) or settings.compile or numerics.graphs or replicas:
        return None
    shared = SharedDraws(params.seed, settings.global_batch_size)
    trainable.reset()
    try:
        with numerics.sharing(shared):
            steps = min(STEPS, params.total_steps)
            losses = train(trainable, steps, step_seconds=1.0, tracker=Tracker()).losses
    except UserError:
        return None
    return None if shared.unshared else tuple(losses)
