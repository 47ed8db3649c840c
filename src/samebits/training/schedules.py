"""The learning rate of each step: schedules of our own, and those of ``torch.optim.lr_scheduler``."""

from __future__ import annotations

import inspect
import math
import warnings
from contextlib import contextmanager
from fractions import Fraction
from itertools import islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import lr_scheduler

from samebits.errors import UserError, first_line, place_of
from samebits.portable.elementary import cos_pi
from samebits.portable.floats import PortableFloat, cos, portable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from samebits.models.experiment import Schedule
    from samebits.params.schema import Train

_PORTABLE_MATH = SimpleNamespace(cos=cos, floor=math.floor, pi=math.pi)
"""In the place of Python's ``math``, whose cosine differs between C libraries."""


class LearningRates:
    """Learning rates by step, counted from 0: a linear warm-up, then the schedule over the steps after it.

    The cosine is lr * (1 + cos(pi * t / T)) / 2 (Loshchilov and Hutter 2017) over T steps. All are computed without the
    C library, so that they are the same on every host. A schedule of PyTorch's keeps its last rate after them.

    With ``own``, a schedule of the user's, they are its factors of ``train.optimizer.lr``.

    Raises:
        UserError: the schedule does not take an argument, or its value.
    """

    def __init__(self, train: Train, total_steps: int, own: Schedule | None = None) -> None:
        self._own, self._total_steps = own, total_steps
        self._lr, self._schedule = train.optimizer.lr, train.schedule
        self._steps = max(total_steps - train.schedule.warmup_steps, 1)
        self._known: list[float] = []
        self._coming = iter(()) if self._schedule.name in ("constant", "cosine") else self._rates_of_torch()

    def of(self, step: int) -> float:
        """The learning rate of a step."""
        if self._own is not None:
            return self._lr * self._factor(self._own, step)
        warmup_steps = self._schedule.warmup_steps
        if step < warmup_steps:
            return self._lr * ((step + 1) / warmup_steps)
        step -= warmup_steps
        if self._schedule.name == "constant":
            return self._lr
        if self._schedule.name == "cosine":
            return self._lr * (0.5 * (1.0 + cos_pi(min(Fraction(1), Fraction(step, self._steps)))))
        while len(self._known) <= step and (rate := next(self._coming, None)) is not None:
            self._known.append(rate)
        return self._known[min(step, len(self._known) - 1)]

    def _factor(self, own: Schedule, step: int) -> float:
        try:
            factor = float(own(step, self._total_steps))
        except Exception as error:
            what = f"schedule: {type(error).__name__}: {first_line(str(error))}"
            raise UserError(what, hint=f"see {place_of(error) or 'that function'}") from error
        if not (math.isfinite(factor) and factor >= 0):
            raise UserError(f"schedule: it gives {factor} at step {step}", hint="return a factor of the learning rate")
        return factor

    def _rates_of_torch(self) -> Iterator[float]:
        chosen, made = self._schedule, getattr(lr_scheduler, self._schedule.name)
        optimizer = torch.optim.SGD([torch.zeros(())], lr=PortableFloat(self._lr))
        usual = {"T_max": self._steps, "total_iters": self._steps, "total_steps": self._steps, "max_lr": self._lr,
                 "base_lr": self._lr / 10}  # fmt: skip
        missing = {"epochs", "steps_per_epoch"} - chosen.kwargs.keys()
        if not missing:
            del usual["total_steps"]  # which OneCycleLR would take in the place of their product
        elif len(missing) == 1 and "total_steps" not in chosen.kwargs:
            what = f"train.schedule.kwargs: {chosen.name} takes epochs with steps_per_epoch, without {min(missing)}"
            raise UserError(what, hint="leave both out: the steps of the training are filled in")
        takes = inspect.signature(made).parameters
        accepts = [name for name in takes if name not in ("optimizer", "last_epoch")]
        for name in chosen.kwargs:
            if name not in accepts:
                hint = f"{chosen.name} takes {', '.join(accepts)}"
                raise UserError(f"train.schedule.kwargs.{name}: unknown key", hint=hint)
        if "cycle_momentum" in accepts and chosen.kwargs.get("cycle_momentum") is not False:
            what = f"train.schedule.kwargs.cycle_momentum: {chosen.name} changes the momentum too unless told otherwise"
            raise UserError(what, hint="add `cycle_momentum: false`, also in what you compare with")
        given = {name: value for name, value in {**usual, **chosen.kwargs}.items() if name in takes}
        with _portable_math():
            try:
                schedule = made(optimizer, **{name: portable(value) for name, value in given.items()})
            except (TypeError, ValueError) as error:
                text = f"train.schedule.kwargs: {chosen.name} does not take {chosen.kwargs}: {first_line(str(error))}"
                raise UserError(text, hint=f"see torch.optim.lr_scheduler.{chosen.name}") from None
        if (ends := getattr(schedule, "total_steps", self._steps)) < self._steps:
            left = f"{self._steps} after the warm-up" if chosen.warmup_steps else f"{self._steps}"
            what = f"train.schedule.kwargs: {chosen.name} ends after {ends} steps, and the training has {left}"
            raise UserError(what, hint="leave total_steps and epochs out: they are filled in")
        return islice(_each_rate(optimizer, schedule), self._steps)


def _each_rate(optimizer: torch.optim.Optimizer, schedule: Any) -> Iterator[float]:
    while True:
        yield float(optimizer.param_groups[0]["lr"])
        with _portable_math(), warnings.catch_warnings(action="ignore"):  # it waits for steps of the optimizer
            try:
                schedule.step()
            except ValueError:  # of OneCycleLR, which has no more steps
                return


@contextmanager
def _portable_math() -> Iterator[None]:
    own = lr_scheduler.math  # type: ignore[attr-defined]
    lr_scheduler.math = _PORTABLE_MATH  # type: ignore[attr-defined,assignment]
    try:
        yield
    finally:
        lr_scheduler.math = own  # type: ignore[attr-defined]
