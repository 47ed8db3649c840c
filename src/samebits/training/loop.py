"""The training loop, which works the same for every strategy, numerics and tracker."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from samebits.errors import NotFiniteError, UserError, few
from samebits.models.experiment import schedule_of
from samebits.training.diagnosis import hint_for_nan, require_same_again, where_not_finite
from samebits.training.meters import StepClock, ignore_phase
from samebits.training.schedules import LearningRates

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    from samebits.numerics.interface import Numerics
    from samebits.params import Params
    from samebits.training.batches import Feed
    from samebits.training.checkpoints import PeriodicCheckpointer
    from samebits.training.meters import Notes
    from samebits.training.worker import Worker

_ASKED_EVERY = 4  # the check for the same bits is repeated after 4 times as many steps as at the last check
SEGMENT_SECONDS = 0.5  # between two calls of the tracker with losses


class Tracker:
    """Receives the progress of a training. This class is for trainings without an audience: it does nothing."""

    def step(self, step: int) -> None:
        """Step ``step``, counted from 1, begins. The call is timed with the step."""

    def losses(self, first_step: int, losses: Sequence[float], learning_rates: Sequence[float]) -> None:
        """Take the losses of consecutive steps, the first of which is ``first_step``, outside the timed segments."""


def _tensors_of(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


class Snapshot:
    """A copy of the parameters and all buffers of a model, also of buffers that are not saved with the weights.

    It lies in the host's memory, so that a GPU's peak is the training's own.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._values = [tensor.detach().to("cpu", copy=True) for tensor in _tensors_of(model)]

    def parameters(self) -> list[Tensor]:
        """The parameters' values, in the model's order."""
        return self._values[: sum(1 for _ in self._model.parameters())]

    def restore(self) -> None:
        """Restore the values and drop all gradients. Raises UserError: the model has other tensors by now."""
        tensors = _tensors_of(self._model)
        if [tensor.shape for tensor in tensors] != [value.shape for value in self._values]:
            raise UserError(
                "forward adds a parameter or buffer to the model, or gives one another shape",
                hint="make them in __init__, in the shape that they keep",
            )
        with torch.no_grad():
            for tensor, value in zip(tensors, self._values, strict=True):
                tensor.copy_(value)
        self._model.zero_grad(set_to_none=True)


class Trainable:
    """A model under one strategy with its batches and its optimizer: everything that a step needs."""

    def __init__(self, *, model: nn.Module, batches: Feed, worker: Worker, numerics: Numerics, params: Params) -> None:
        self.model, self.batches, self.worker, self.numerics = model, batches, worker, numerics
        self._params = params
        self._learning_rates = LearningRates(params.train, params.total_steps, schedule_of(model))
        self.notes: Notes = ignore_phase
        module = self._unwrapped = numerics.module(model)
        if worker.compiles and numerics.captures:
            numerics.capture(module, batches.micro_batch(0, 0), batches.micro_batch(1, 0))
        self.module = worker.wrap(module, reduction=numerics.reduction)
        numerics.meet(worker.ranks.all_reduce)
        self._initial = Snapshot(model)  # ddp has broadcast the weights of rank 0 by now
        if params.train.compile and worker.compiles:
            self.module = numerics.compile(self.module)
        self.optimizer = numerics.optimizer(model)
        held, trained = ({id(p) for p in ps if p.requires_grad} for ps in (self._optimized(), self.module.parameters()))
        if held != trained:  # nothing would be trained, without a word
            raise RuntimeError("the optimizer's parameters are not those of the wrapped module")
        self._shares = [group["lr"] / params.train.optimizer.lr for group in self.optimizer.param_groups]
        """The learning rate of each group over that of the params."""
        self._trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.module.train()

    def step(self, step: int, rate: float) -> Tensor:
        """Make one optimizer step, counted from 0, and return this worker's part of the loss without waiting for it.

        Raises:
            UserError: a parameter got no gradient, and there are several ranks.
        """
        for group, share in zip(self.optimizer.param_groups, self._shares, strict=True):
            group["lr"] = rate * share
        largest_of_all = partial(self.worker.ranks.all_reduce, maximum=True)
        loss = self._accumulate_grads(step)
        try:
            while not self.numerics.accepts_grads(largest_of_all):
                loss = self._accumulate_grads(step)
        except NotFiniteError as error:  # all ranks raise it
            micro_batches = map(partial(self.batches.micro_batch, step), range(self.batches.micro_batches))
            raise where_not_finite(error, self.numerics, self._unwrapped, micro_batches, largest_of_all) from None
        self.notes("optimizer")
        self.numerics.step(self.optimizer)
        self.notes("host")
        return loss

    def _accumulate_grads(self, step: int) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        losses = []
        count = self.batches.micro_batches
        for index in range(count):
            last = index == count - 1
            with nullcontext() if last else self.worker.no_sync(self.module):
                self.notes("data")
                batch = self.batches.micro_batch(step, index)
                self.notes("forward")
                loss = self.numerics.loss(self.numerics.forward(self.module, batch), batch.targets)
                if count > 1 and self.numerics.reduction == "mean":
                    loss = loss / count
                self.notes("backward")
                self.numerics.backward(loss)
                self.notes("host")
            losses.append(loss.detach())
        if self.worker.world_size > 1 and (idle := [name for name, p in self._trained if p.grad is None]):
            # DDP has not reduced the bucket of this parameter, and would say so only at the next forward pass.
            raise UserError(
                f"no gradient reaches {few(idle)} at step {step + 1}, and the ranks wait for it",
                hint="use every parameter at every step, or set its requires_grad to False",
            )
        return losses[0] if count == 1 else torch.stack(losses).sum()

    def require_same_again(self, step: int) -> None:
        """Feed some samples of a step twice, while no clock runs. Raises RefusedError: see ``diagnosis``."""
        require_same_again(self.numerics, self._unwrapped, self.batches.micro_batch(step, 0))

    def watch(self, notes: Notes) -> None:
        """Call ``notes`` with each phase of the steps from now on."""
        self.notes = notes
        self.worker.note_phases(self.module, notes)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of a whole training: epochs times the global batches in the data."""
        return self._params.total_steps

    @property
    def sync_buffers(self) -> bool:
        """Whether a forward pass begins with the buffers of rank 0."""
        flag = getattr(self.module, "forward_sync_buffers", None)  # before 2.12, PyTorch had only broadcast_buffers
        return bool(getattr(self.module, "broadcast_buffers", False) if flag is None else flag)

    def mean_losses(self, losses: Tensor) -> list[float]:
        """Mean losses over all ranks, from the parts that ``run`` returned; every rank must call it."""
        return self.numerics.mean_losses(losses, self.worker.ranks.all_reduce, self.worker.world_size)

    def digests(self, start: int, stop: int) -> list[list[int]]:
        """The digests of the batches of steps that have run, of all ranks, which call it; empty if none are made."""
        found = self.batches.digests(start, stop)
        if found is None:
            return []
        sums = self.worker.ranks.all_reduce(found.to(self.worker.device))
        return (sums % 2**32).tolist()

    def rates(self, start: int, stop: int) -> list[float]:
        """Learning rates of the steps from ``start`` up to ``stop``."""
        return [self._learning_rates.of(step) for step in range(start, stop)]

    def run(
        self, start: int, rates: Sequence[float], clock: StepClock, on_step: Callable[[int], None] | None = None
    ) -> Tensor:
        """Train the steps from ``start`` on, one for each rate, as one timed segment.

        ``on_step`` is called with the number of each step, from 1. Return this worker's parts of the losses, (steps,),
        for ``mean_losses``.
        """
        losses = []
        self.batches.ready(start)
        clock.start()
        for index, rate in enumerate(rates):
            if on_step:
                on_step(start + index + 1)
            losses.append(self.step(start + index, rate))
            clock.lap()
        clock.stop()
        return torch.stack(losses)

    def reset(self) -> None:
        """Return to the initial state: weights, buffers, optimizer, gradient scale and random streams."""
        self._initial.restore()
        self.numerics.reset(self.optimizer)
        self.worker.seed(self._params.seed)

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The state of this rank that determines the next step: tensors, which are not copied, and the rest as JSON.

        It is the same on every rank. The worker has the state of the random streams.
        """
        tensors: dict[str, Tensor] = {f"model.{i}": t for i, t in enumerate(_tensors_of(self.model))}
        numbers: dict[str, dict[str, Any]] = {}
        for i, p in enumerate(self._optimized()):
            for name, value in self.optimizer.state[p].items():
                if isinstance(value, torch.Tensor):
                    tensors[f"optimizer.{i}.{name}"] = value
                else:
                    numbers.setdefault(str(i), {})[name] = value
        return tensors, {"optimizer": numbers, "numerics": self.numerics.state_dict()}

    def load_state_dict(self, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        """Restore a state that ``state_dict`` returned, perhaps on another rank."""
        self.reset()
        with torch.no_grad():
            for i, tensor in enumerate(_tensors_of(self.model)):
                value = tensors[f"model.{i}"]
                if value.shape != tensor.shape or value.dtype != tensor.dtype:  # copy_ would cast and broadcast
                    raise ValueError(f"model.{i} is {value.dtype} {tuple(value.shape)}, another model's")
                tensor.copy_(value)
        self.numerics.load_state_dict(record["numerics"])
        parameters = self._optimized()
        for i, numbers in record["optimizer"].items():
            self.optimizer.state[parameters[int(i)]].update(numbers)
        for key, value in tensors.items():
            kind, number, *name = key.split(".", maxsplit=2)
            if kind == "optimizer":
                p = parameters[int(number)]
                self.optimizer.state[p][name[0]] = self._placed(value, p, counts=name == ["step"])

    def _placed(self, value: Tensor, parameter: Tensor, *, counts: bool) -> Tensor:
        """A value of an optimizer's state on the device and in the memory format that the optimizer needs."""
        if counts:  # PyTorch's fused optimizers count steps on the device, the others on the CPU
            on_device = any(group.get("fused") or group.get("capturable") for group in self.optimizer.param_groups)
            return value.to(parameter.device) if on_device else value
        if value.shape != parameter.shape:
            return value.to(parameter.device)
        return torch.empty_like(parameter, dtype=value.dtype).copy_(value)

    def _optimized(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The result of a training: the mean loss over ranks at each step, and this worker's times.

    ``digests`` are those of each step's batch: see ``records.batches``. ``resumed`` lists the steps after which it
    continued from a checkpoint. ``elsewhere``: a part of it ran under another strategy or on other devices.
    """

    losses: list[float]
    step_seconds: list[float]
    seconds: float
    digests: list[list[int]] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    elsewhere: bool = False


def warm_up(
    trainable: Trainable, steps: int, *, seconds: float = 0.0, before_reset: Callable[[], None] = lambda: None
) -> float:
    """Run two steps or more and return to the initial state; return the seconds of a step, of the slowest rank.

    The steps are repeated, each time from the initial state, until ``seconds`` have passed on every rank. The first one
    does not count, because it may load libraries.
    """
    worker, rates = trainable.worker, trainable.rates(0, steps)
    began, cold = time.perf_counter(), True
    while cold:
        trainable.reset()
        trainable.run(0, rates[:1], StepClock(worker.device))
        clock = StepClock(worker.device)
        trainable.run(1, rates[1:], clock)
        cold = seconds > 0 and worker.ranks.any_rank(time.perf_counter() - began < seconds)
    before_reset()
    trainable.reset()
    return worker.ranks.max_over_ranks([clock.seconds / (steps - 1)])[0]


def train(
    trainable: Trainable,
    total_steps: int,
    *,
    step_seconds: float,
    tracker: Tracker,
    checkpointer: PeriodicCheckpointer | None = None,
) -> TrainResult:
    """Train from the initial state, or from a checkpoint of ``checkpointer``.

    ``step_seconds``, the same on every rank, sets the length of a segment.

    Raises:
        UserError: the loss is not finite.
        Interrupted: a signal asked the training to stop.
    """
    clock = StepClock(trainable.worker.device)
    segment = max(1, min(total_steps, round(SEGMENT_SECONDS / max(step_seconds, 1e-9))))
    before = checkpointer.resume(trainable) if checkpointer else None
    result = before or TrainResult(losses=[], step_seconds=[], seconds=0.0)
    losses = result.losses
    clock.step_seconds, clock.seconds = result.step_seconds, result.seconds
    if before:
        result.resumed.append(len(losses))
        tracker.losses(1, losses, trainable.rates(0, len(losses)))
    asked = len(losses)
    while len(losses) < total_steps:
        start = len(losses)
        stop = min(start + segment, total_steps, checkpointer.next_stop(start) if checkpointer else total_steps)
        rates = trainable.rates(start, stop)
        part = trainable.mean_losses(trainable.run(start, rates, clock, tracker.step))
        tracker.losses(start + 1, part, rates)
        losses += part
        result.digests.extend(trainable.digests(start, stop))
        bad = next((i for i, loss in enumerate(part) if not math.isfinite(loss)), None)
        if bad is not None:
            text = f"the loss is {part[bad]} at step {start + bad + 1}, expected a finite number"
            raise UserError(text, hint=hint_for_nan(first=start + bad == 0))
        if stop == total_steps or stop >= _ASKED_EVERY * max(asked, 1):
            trainable.require_same_again(start)
            asked = stop
        if checkpointer:
            so_far = replace(result, seconds=clock.seconds)
            checkpointer.segment_done(trainable, so_far, last=stop == total_steps)
    trainable.worker.require_reduced(trainable.module)
    return replace(result, seconds=clock.seconds)
