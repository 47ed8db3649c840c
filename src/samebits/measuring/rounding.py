"""How far rounding alone takes a training: the same steps from weights that are changed as little as rounding does.

Two runs that add the same numbers in another order differ by a rounding at first; training amplifies that, by how much
depends on the model and its settings. So it is measured: the twin's losses beside the training's give the size that a
difference may have at each step without meaning anything else.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from samebits.errors import UserError
from samebits.portable.random import Stream
from samebits.records.run import Rounding, TwinLoss, relative_difference
from samebits.training.loop import Tracker, train

if TYPE_CHECKING:
    from torch import nn

    from samebits.training.loop import Snapshot, Trainable

PERTURBATION = 2.0**-18  # of each weight, at most: 64 units in the last place, so that ReLUs switch as they would
TWIN_SECONDS = 3.0
TWIN_SHARE = 0.1  # of the training, if that is more
_RISE = 1.2  # of the envelope between two points that are kept


def measure_rounding(
    trainable: Trainable, losses: list[float], final: Snapshot, *, seed: int, step_seconds: float
) -> Rounding | None:
    """Train a twin for as many steps as there is time for; None if its loss is not finite.

    ``losses`` are the training's and ``final`` its last weights. Every rank must call it with the same
    ``step_seconds``.
    """
    budget = max(TWIN_SECONDS, TWIN_SHARE * len(losses) * step_seconds)
    steps = max(1, min(len(losses), int(budget / max(step_seconds, 1e-9))))
    trainable.reset()
    _perturb(trainable.model, seed)
    try:
        twin = train(trainable, steps, step_seconds=step_seconds, tracker=Tracker()).losses
    except UserError:
        return None
    weights = _weight_differences(trainable.model, final) if steps == len(losses) else None
    return Rounding(perturbation=PERTURBATION, steps=steps, losses=envelope(losses, twin), weights=weights)


def envelope(losses: list[float], twin: list[float]) -> tuple[TwinLoss, ...]:
    """The points at which the largest relative difference so far rises."""
    points: list[TwinLoss] = []
    for step, (a, b) in enumerate(zip(losses, twin, strict=False), start=1):
        difference = relative_difference(a, b)
        if difference > (points[-1].difference * _RISE if points else 0.0):
            points.append(TwinLoss(step=step, difference=float(f"{difference:.3g}")))
    return tuple(points)


def _perturb(model: nn.Module, seed: int) -> None:
    """Multiply each weight by 1 plus or minus at most PERTURBATION, the same on every rank and host."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            draws = Stream(seed, "rounding", name).uniform(p.numel())
            factors = 1.0 + PERTURBATION * (2.0 * torch.from_numpy(draws) - 1.0)
            p.mul_(factors.reshape(p.shape).to(p.device, p.dtype))


def _weight_differences(model: nn.Module, final: Snapshot) -> dict[str, float] | None:
    """By tensor; None where a last update overflowed, which no loss of the training tells."""
    differences = {}
    for (name, p), value in zip(model.named_parameters(), final.parameters(), strict=True):
        a, b = p.detach().cpu().double(), value.double()
        scale = max(float(a.norm()), float(b.norm()))
        if not math.isfinite(scale):
            return None
        differences[name] = float(f"{float((a - b).norm()) / scale if scale else 0.0:.3g}")
    return differences
