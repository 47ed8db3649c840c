"""The training loop. A strategy, numerics and a tracker are handed in; nothing here asks which they are."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from samebits.errors import UserError
from samebits.numerics.schedule import learning_rate
from samebits.timing import StepClock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

    from samebits.data.batches import Batches
    from samebits.numerics.fast import FastNumerics
    from samebits.params import Params
    from samebits.strategies import Strategy

SEGMENT_SECONDS = 0.5  # how often losses are handed to the tracker


class Tracker(Protocol):
    """Receives losses while a training goes on, outside the timed segments."""

    def losses(self, first_step: int, losses: Sequence[float], learning_rates: Sequence[float]) -> None:
        """Take the losses of consecutive steps, the first of which is ``first_step``, counted from 1."""
        ...


class Snapshot:
    """The parameters and all buffers of a model, also those that are not saved with its weights.

    Kept in the host's memory, so that a GPU's peak is the training's own.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._values = [tensor.detach().to("cpu", copy=True) for tensor in self._tensors()]

    def _tensors(self) -> Iterator[Tensor]:
        yield from self._model.parameters()
        yield from self._model.buffers()

    def parameters(self) -> list[Tensor]:
        """The parameters' values, in the model's order."""
        return self._values[: sum(1 for _ in self._model.parameters())]

    def restore(self) -> None:
        """Put the values back in place and forget gradients."""
        with torch.no_grad():
            for tensor, value in zip(self._tensors(), self._values, strict=True):
                tensor.copy_(value)
        self._model.zero_grad(set_to_none=True)


class Trainable:
    """A model under one strategy, with its batches and its optimizer: all that a step needs."""

    def __init__(
        self, model: nn.Module, batches: Batches, strategy: Strategy, numerics: FastNumerics, params: Params
    ) -> None:
        self.model, self.batches, self.strategy, self.numerics = model, batches, strategy, numerics
        self._params, self._accum = params, params.train.grad_accum_steps
        self._initial = Snapshot(model)
        self.module = strategy.parallelise(numerics.module(model))
        if params.train.compile and strategy.placement.strategy != "dp":
            self.module = numerics.compile(self.module)
        self.optimizer = numerics.optimizer(p for p in model.parameters() if p.requires_grad)
        self.module.train()

    def step(self, step: int, rate: float) -> Tensor:
        """Make one optimizer step, counted from 0, and return this worker's mean loss without waiting for it."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        losses = []
        for index in range(self._accum):
            last = index == self._accum - 1
            with nullcontext() if last else self.strategy.accumulate(self.module):
                inputs, targets = self.batches.micro_batch(step, index)
                loss = self.numerics.loss(self.module(inputs), targets)
                loss = loss if self._accum == 1 else loss / self._accum
                self.numerics.backward(loss)
            losses.append(loss.detach())
        self.numerics.step(self.optimizer)
        return losses[0] if self._accum == 1 else torch.stack(losses).sum()

    def rates(self, start: int, stop: int) -> list[float]:
        """Learning rates of the steps from ``start`` up to ``stop``."""
        train = self._params.train
        return [
            learning_rate(
                step,
                lr=train.optimizer.lr,
                schedule=train.schedule.name,
                warmup_steps=train.schedule.warmup_steps,
                total_steps=self._params.total_steps,
            )
            for step in range(start, stop)
        ]

    def run(self, start: int, rates: Sequence[float], clock: StepClock) -> Tensor:
        """Train the steps from ``start`` on, one for each rate, as one timed segment; return this worker's losses."""
        losses = []
        clock.start()
        for index, rate in enumerate(rates):
            losses.append(self.step(start + index, rate))
            clock.lap()
        clock.stop()
        return torch.stack(losses)

    def reset(self) -> None:
        """Return to the initial state: weights, buffers, optimizer, gradient scale and random streams."""
        self._initial.restore()
        self.numerics.reset(self.optimizer)
        self.strategy.seed(self._params.seed)


@dataclass(frozen=True)
class Training:
    """What a training gave: the mean loss over ranks at each step, and this worker's times."""

    losses: list[float]
    step_seconds: list[float]
    seconds: float


def warm_up(job: Trainable, steps: int) -> float:
    """Run some steps, return to the initial state, and give the seconds of the slowest rank's last step."""
    clock = StepClock(job.strategy.device)
    job.reset()
    for step in range(steps):
        job.run(step, job.rates(step, step + 1), clock)
    job.reset()
    last = torch.tensor([clock.step_seconds[-1]], dtype=torch.float64, device=job.strategy.device)
    return float(job.strategy.gather(last).max())


def train(job: Trainable, total_steps: int, *, step_seconds: float, tracker: Tracker) -> Training:
    """Train from the initial state; ``step_seconds``, the same on every rank, sets the length of a segment.

    Raises:
        UserError: the loss is not finite.
    """
    clock = StepClock(job.strategy.device)
    segment = max(1, min(total_steps, round(SEGMENT_SECONDS / max(step_seconds, 1e-9))))
    losses: list[float] = []
    for start in range(0, total_steps, segment):
        stop = min(start + segment, total_steps)
        rates = job.rates(start, stop)
        part = job.strategy.mean(job.run(start, rates, clock)).tolist()
        tracker.losses(start + 1, part, rates)
        losses += part
        bad = next((i for i, loss in enumerate(part) if not math.isfinite(loss)), None)
        if bad is not None:
            raise UserError(
                f"the loss is {part[bad]} at step {start + bad + 1}, expected a finite number",
                hint="lower train.optimizer.lr, or set train.clip_grad_norm or a warm-up",
            )
    return Training(losses, clock.step_seconds, clock.seconds)
