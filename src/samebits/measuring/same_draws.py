"""The first steps again, with the same draws for the same samples, so that they can be compared over devices.

Each device draws random numbers of its own, as PyTorch has it: a model with dropout learns something else with each
number of devices. With draws that follow from the sample it does not, so that what still differs has another cause.
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
    """The losses of the first steps; None where draws cannot be shared, or a loss is not finite.

    Every rank must call it. A compiled model, replicas and CUDA graphs draw where nobody can answer.
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
