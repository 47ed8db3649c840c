"""Measures the effect of rounding on a training, by a twin that starts from weights changed as little as by rounding.

Two runs that add the same numbers in different orders differ by a rounding at first. Training amplifies the difference,
by a factor that depends on the model and its settings. The losses of the twin, compared with the training's, show how
large a difference at each step may be from rounding alone.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from samebits.errors import UserError
from samebits.portable.random import Stream
from samebits.records.progress import tell
from samebits.records.run import Rounding, TwinLoss, relative_difference
from samebits.training.loop import Tracker, train

if TYPE_CHECKING:
    from torch import nn

    from samebits.training.loop import Snapshot, Trainable

PERTURBATION = 2.0**-18  # largest relative change of a weight: 64 units in the last place, enough to switch ReLUs
TWIN_SECONDS = 3.0
TWIN_SHARE = 0.1  # of the training's time, if that is longer
_RISE = 1.2  # least factor between two points of the envelope


def measure_rounding(
    trainable: Trainable, losses: list[float], final: Snapshot, *, seed: int, step_seconds: float
) -> Rounding | None:
    """Train a twin for as many steps as time allows; None if its loss is not finite.

    ``losses`` are the training's, and ``final`` has its last weights. Every rank must call it with the same
    ``step_seconds``.
    """
    budget = max(TWIN_SECONDS, TWIN_SHARE * len(losses) * step_seconds)
    steps = max(1, min(len(losses), int(budget / max(step_seconds, 1e-9))))
    tell("training a twin")
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
    """Multiply each weight by a factor within 1 ± PERTURBATION, the same on every rank and host."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            draws = Stream(seed, "rounding", name).uniform(p.numel())
            factors = 1.0 + PERTURBATION * (2.0 * torch.from_numpy(draws) - 1.0)
            p.mul_(factors.reshape(p.shape).to(p.device, p.dtype))


def _weight_differences(model: nn.Module, final: Snapshot) -> dict[str, float] | None:
    """Relative difference by tensor; None if the last update overflowed, which no loss of the training shows."""
    differences = {}
    for (name, p), value in zip(model.named_parameters(), final.parameters(), strict=True):
        a, b = p.detach().cpu().double(), value.double()
        scale = max(float(a.norm()), float(b.norm()))
        if not math.isfinite(scale):
            return None
        differences[name] = float(f"{float((a - b).norm()) / scale if scale else 0.0:.3g}")
    return differences
