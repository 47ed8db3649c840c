"""Learning-rate schedules, the same number on every host."""

from __future__ import annotations

from fractions import Fraction

from samebits.numerics.elementary import cos_pi


def learning_rate(step: int, *, lr: float, schedule: str, warmup_steps: int, total_steps: int) -> float:
    """Learning rate of a step counted from 0: linear warm-up, then constant or a half cosine to near zero.

    The cosine is lr * (1 + cos(pi * t / T)) / 2 (Loshchilov and Hutter 2017) over the T steps that follow the
    warm-up, computed without the C library so that it is the same on every host.
    """
    if step < warmup_steps:
        return lr * ((step + 1) / warmup_steps)
    if schedule == "constant":
        return lr
    progress = Fraction(step - warmup_steps, total_steps - warmup_steps)
    return lr * (0.5 * (1.0 + cos_pi(progress)))
