"""The training loop. A strategy, numerics and a tracker are handed in; nothing here asks which they are."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from samebits.errors import UserError
from samebits.numerics.schedule import learning_rate
from samebits.timing import StepClock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

    from samebits.data.batches import Batches
    from samebits.numerics.interface import Numerics
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
        self, model: nn.Module, batches: Batches, strategy: Strategy, numerics: Numerics, params: Params
    ) -> None:
        self.model, self.batches, self.strategy, self.numerics = model, batches, strategy, numerics
        self._params, self._parts = params, batches.parts
        self._initial = Snapshot(model)
        self.module = strategy.parallelise(numerics.module(model), sums=numerics.reduction == "sum")
        if params.train.compile and strategy.compiles:
            self.module = numerics.compile(self.module)
        self.optimizer = numerics.optimizer(model)
        self.module.train()

    def step(self, step: int, rate: float) -> Tensor:
        """Make one optimizer step, counted from 0, and return this worker's part of the loss without waiting for it."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self._gradients(step)
        while not self.numerics.settled(self.strategy.largest):
            loss = self._gradients(step)
        self.numerics.step(self.optimizer)
        return loss

    def _gradients(self, step: int) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        losses = []
        for index in range(self._parts):
            last = index == self._parts - 1
            with nullcontext() if last else self.strategy.accumulate(self.module):
                batch = self.batches.micro_batch(step, index)
                loss = self.numerics.loss(self.numerics.outputs(self.module, batch), batch.targets)
                if self._parts > 1 and self.numerics.reduction == "mean":
                    loss = loss / self._parts
                self.numerics.backward(loss)
            losses.append(loss.detach())
        return losses[0] if self._parts == 1 else torch.stack(losses).sum()

    def mean_losses(self, losses: Tensor) -> list[float]:
        """What ``run`` gave on this and on all other ranks, as mean losses; every rank must call it."""
        return self.numerics.mean_losses(losses, self.strategy.total, self.strategy.world_size)

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
        """Train the steps from ``start`` on, one for each rate, as one timed segment.

        Return this worker's parts of the losses, for ``mean_losses``.
        """
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

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that the next step depends on, of this rank: tensors, which are not copied, and the rest as JSON.

        The state of the random streams is that of this rank; all else is the same on every rank.
        """
        tensors: dict[str, Tensor] = {f"model.{i}": t for i, t in enumerate(self._state_of_model())}
        numbers: dict[str, dict[str, Any]] = {}
        for i, p in enumerate(self._optimized()):
            for name, value in self.optimizer.state[p].items():
                if isinstance(value, torch.Tensor):
                    tensors[f"optimizer.{i}.{name}"] = value
                else:
                    numbers.setdefault(str(i), {})[name] = value
        return tensors, {"optimizer": numbers, "numerics": self.numerics.state()}

    def load_state(self, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        """Go back to a state that ``state`` gave, perhaps on another rank."""
        self.reset()
        with torch.no_grad():
            for i, tensor in enumerate(self._state_of_model()):
                tensor.copy_(tensors[f"model.{i}"])
        self.numerics.load_state(record["numerics"])
        parameters = self._optimized()
        for i, numbers in record["optimizer"].items():
            self.optimizer.state[parameters[int(i)]].update(numbers)
        for key, value in tensors.items():
            kind, number, *name = key.split(".", maxsplit=2)
            if kind == "optimizer":
                p = parameters[int(number)]
                on_device = value if name == ["step"] and not self._step_on_device() else value.to(p.device)
                self.optimizer.state[p][name[0]] = on_device

    def _state_of_model(self) -> list[Tensor]:
        return [*self.model.parameters(), *self.model.buffers()]

    def _optimized(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _step_on_device(self) -> bool:
        """PyTorch's fused optimizers count steps on the device, the others on the CPU."""
        return any(group.get("fused") or group.get("capturable") for group in self.optimizer.param_groups)


class Keeper(Protocol):
    """Keeps checkpoints of a training while it goes on."""

    def resume(self, job: Trainable) -> Training | None:
        """Put ``job`` into the state of the newest checkpoint, and give what was done until then."""
        ...

    def next_stop(self, step: int) -> int:
        """The step after ``step`` at which a segment has to end."""
        ...

    def segment_done(self, job: Trainable, so_far: Training) -> None:
        """Write a checkpoint if it is time for one.

        Raises:
            Interrupted: somebody asked to stop; the state is kept.
        """
        ...


@dataclass(frozen=True)
class Training:
    """What a training gave: the mean loss over ranks at each step, and this worker's times.

    ``resumed`` lists the steps after which it was continued from a checkpoint.
    """

    losses: list[float]
    step_seconds: list[float]
    seconds: float
    resumed: list[int] = field(default_factory=list)


def warm_up(job: Trainable, steps: int) -> float:
    """Run some steps, return to the initial state, and give the seconds of the slowest rank's last step."""
    clock = StepClock(job.strategy.device)
    job.reset()
    for step in range(steps):
        job.run(step, job.rates(step, step + 1), clock)
    job.reset()
    return job.strategy.maximum([clock.step_seconds[-1]])[0]


def train(
    job: Trainable, total_steps: int, *, step_seconds: float, tracker: Tracker, keeper: Keeper | None = None
) -> Training:
    """Train from the initial state, or from the checkpoint that ``keeper`` has.

    ``step_seconds``, the same on every rank, sets the length of a segment.

    Raises:
        UserError: the loss is not finite.
        Interrupted: somebody asked to stop.
    """
    clock = StepClock(job.strategy.device)
    segment = max(1, min(total_steps, round(SEGMENT_SECONDS / max(step_seconds, 1e-9))))
    before = keeper.resume(job) if keeper else None
    losses = list(before.losses) if before else []
    resumed = [*before.resumed, len(losses)] if before else []
    if before:
        clock.step_seconds, clock.seconds = list(before.step_seconds), before.seconds
        tracker.losses(1, losses, job.rates(0, len(losses)))
    while len(losses) < total_steps:
        start = len(losses)
        stop = min(start + segment, total_steps, keeper.next_stop(start) if keeper else total_steps)
        rates = job.rates(start, stop)
        part = job.mean_losses(job.run(start, rates, clock))
        tracker.losses(start + 1, part, rates)
        losses += part
        bad = next((i for i, loss in enumerate(part) if not math.isfinite(loss)), None)
        if bad is not None:
            raise UserError(
                f"the loss is {part[bad]} at step {start + bad + 1}, expected a finite number",
                hint="lower train.optimizer.lr, or set train.clip_grad_norm or a warm-up",
            )
        if keeper and stop < total_steps:
            keeper.segment_done(job, Training(losses, clock.step_seconds, clock.seconds, resumed))
    return Training(losses, clock.step_seconds, clock.seconds, resumed)
