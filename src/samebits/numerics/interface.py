"""Interface between the training loop and its numerics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from samebits.batch_split import leading
from samebits.errors import UserError
from samebits.models.experiment import loss_of
from samebits.models.nested import called, mapped, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping
    from contextlib import AbstractContextManager

    from samebits.models.experiment import Loss
    from samebits.models.nested import Nested
    from samebits.numerics.exact.self_test.check import Team
    from samebits.records.run import Arithmetic

    AllReduce = Callable[[Tensor], Tensor]
    """A sum or a maximum over all ranks. Every rank must call it."""


LossName = Literal["cross_entropy", "mse", "own"]


class MicroBatch(NamedTuple):
    """Samples on the device, their step, and under ``exact`` the numbers of their shards.

    Without ``targets`` the inputs are whole samples, from which the loss takes what it needs. ``start`` is the index of
    the first sample in the global batch.
    """

    inputs: Nested
    targets: Nested
    step: int
    shards: range = range(1)
    start: int = 0

    @property
    def rows(self) -> int:
        """The number of samples."""
        return rows_of(self.inputs)

    def by_shard(self) -> tuple[Nested, Nested]:
        """Inputs and targets with an axis for the shards in front of that for the samples."""

        def split(tensor: Tensor) -> Tensor:
            return tensor.reshape(len(self.shards), -1, *tensor.shape[1:])

        inputs, targets = mapped(split, (self.inputs, self.targets))
        return inputs, targets

    def head(self, rows: int) -> MicroBatch:
        """At most ``rows`` samples from the front; under ``exact`` whole shards, and at least one."""
        rows, shards = leading(self.rows, self.shards, rows)
        inputs, targets = mapped(lambda tensor: tensor[:rows], (self.inputs, self.targets))
        return self._replace(inputs=inputs, targets=targets, shards=shards)


def logits_of(outputs: object) -> Tensor:
    """The tensor that a model returned, or the ``logits`` of its output object.

    Raises:
        UserError: the output is neither.
    """
    if isinstance(outputs, Tensor):
        return outputs
    logits = getattr(outputs, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    raise UserError(
        f"the model returned {type(outputs).__name__}, expected a tensor or an object with a tensor .logits",
        hint="return the logits alone; DataParallel cannot gather other objects from its devices",
    )


def loss_in(outputs: object, _: object) -> Tensor:
    """The loss that a model returned itself, as those of Hugging Face do.

    Raises:
        UserError: there is none.
    """
    loss = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    raise UserError(
        f"the model returned {type(outputs).__name__} without a tensor loss, for samples that are not (inputs, target)",
        hint="give samebits.Experiment a loss(outputs, batch), or return an object with .loss",
    )


def computed(model: nn.Module, own: OwnLoss | None, function: Loss | None, inputs: Nested, targets: Nested) -> Tensor:
    """What a model gives for its inputs: its logits, or with an ``own`` loss that of each sample.

    ``function`` computes it: a replica's copy of it where it is a module.
    """
    outputs = called(model, inputs)
    if own is None or function is None:
        return logits_of(outputs)
    return own.each(function(outputs, inputs if targets is None else targets), rows_of(inputs))


class OwnLoss:
    """A loss of the user's own. ``of_batch``: it returns one number for all samples that it gets."""

    def __init__(self, function: Loss, device: torch.device) -> None:
        self.function = function.to(device) if isinstance(function, nn.Module) else function
        self.of_batch = False

    def each(self, losses: object, rows: int) -> Tensor:
        """What the function returned for ``rows`` samples, as a loss of each of them in float32.

        Raises:
            UserError: it is one number neither for each sample nor for all.
        """
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else None
        if not isinstance(losses, Tensor) or shape not in ((rows,), ()):
            got = type(losses).__name__ if shape is None else f"shape {shape}"
            raise UserError(
                f"the loss returned {got} for {rows} samples, expected a tensor of one number for each: ({rows},)",
                hint='give PyTorch\'s losses reduction="none", and take the mean over the other axes of a sample',
            )
        self.of_batch = shape == ()
        return losses.float().expand(rows)


class Optimizer(Protocol):
    """The part of ``torch.optim.Optimizer`` that a training uses."""

    param_groups: list[dict[str, Any]]

    @property
    def state(self) -> MutableMapping[Tensor, dict[str, Any]]:
        """The optimizer's state after the steps so far, by parameter."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters."""


class Numerics(ABC):
    """Arithmetic of one training: the module that a strategy wraps, the loss, gradients and their use."""

    name: Literal["fast", "exact"]
    batch_norm: Literal["device", "shard", "global"] = "device"
    """What BatchNorm normalises by: the samples on a device, those of a shard, or the whole batch."""
    apart: str | None = None
    """Why the shards of ``exact`` run one by one and not in one pass; None if they do."""
    reduction: Literal["mean", "sum"]
    """How the gradients of several ranks are combined."""
    own_loss: OwnLoss | None = None
    """The loss of the user's own, of the last model that ``module`` got: outputs are then losses of samples."""

    @abstractmethod
    def configure(self) -> None:
        """Set this process's switches. Where trainings take turns, each sets its own again."""

    def require_sound(self, team: Team) -> None:  # noqa: B027 - ``fast`` takes devices as they are
        """Test what these numerics trust devices with, once in each process. Every rank must call it.

        Raises HostError: something gives wrong results.
        """

    def construction(self) -> AbstractContextManager[object]:
        """Context in which a model is built."""
        return nullcontext()

    def prepare(self, model: nn.Module) -> None:  # noqa: B027 - a model may be trained as it was built
        """Make a newly built model trainable. Called once for each model."""

    def model_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """The model's state to save, under the names and types that it was built with."""
        return model.state_dict()

    def take_data(self, loss: LossName, target_shape: tuple[int, ...] = ()) -> None:  # noqa: ARG002 - of ``exact``
        """Take over what the data decide: the loss, ``own`` if they have no targets that it fits, and their shape."""
        self._loss = loss

    def take_loss(self, model: nn.Module, device: torch.device) -> OwnLoss | None:
        """Take over the loss that a model carries, on its device, as the one of these numerics; None if it has none."""
        function = loss_of(model) or (loss_in if self._loss == "own" else None)
        self.own_loss = OwnLoss(function, device) if function else None
        return self.own_loss

    @abstractmethod
    def module(self, model: nn.Module) -> nn.Module:
        """The module that a strategy wraps. Only ``forward`` runs it. It applies a loss of the user's own, if any."""

    def compile(self, module: nn.Module) -> nn.Module:
        """The wrapped module, compiled if these numerics can be compiled."""
        return module

    @property
    def graphs(self) -> bool:
        """Whether the wrapped module's passes become CUDA graphs if the strategy allows it."""
        return False

    @property
    def captures(self) -> bool:
        """Whether ``capture`` has anything to do: with ``graphs`` at least."""
        return self.graphs

    def capture(self, module: nn.Module, sample: MicroBatch, check: MicroBatch) -> None:  # noqa: ARG002
        """Capture the passes over ``sample`` and check them on ``check``; called only with ``captures``."""
        raise AssertionError("these numerics capture nothing")

    def own_passes(self) -> AbstractContextManager[None]:
        """Context in which a CPU runs the model's own passes, and no recording of them."""
        return nullcontext()

    @abstractmethod
    def forward(self, module: nn.Module, batch: MicroBatch) -> Tensor:
        """The model's outputs, (samples, ...), or with a loss of the user's own its values, (samples,)."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Nested) -> Tensor:
        """The loss that ``backward`` takes."""

    @abstractmethod
    def losses(self, outputs: Tensor, targets: Nested) -> Tensor:
        """The loss of each target, (targets,), or of each sample, in float32."""

    @abstractmethod
    def optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer of params.yaml."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Add the loss's gradients to those of the parameters."""

    def accepts_grads(self, all_reduce_max: AllReduce) -> bool:  # noqa: ARG002 - ``fast`` depends on no other rank
        """Whether the step's gradients are valid; if not, the step's passes are run again."""
        return True

    @abstractmethod
    def step(self, optimizer: Any) -> None:  # what ``optimizer`` gave
        """Clip the gradients if the params say so, and update the weights."""

    @abstractmethod
    def mean_losses(self, losses: Tensor, all_reduce: AllReduce, ranks: int) -> list[float]:
        """The mean loss of each step, from this rank's values of ``loss`` summed over ranks by ``all_reduce``."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The state of these numerics after the steps so far, as JSON."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that ``state_dict`` returned."""

    def fingerprint(self, module: nn.Module, batch: MicroBatch, *, backwards: bool = False) -> dict[int, bytes]:  # noqa: ARG002
        """A digest of each shard's results, fed in order or ``backwards``; empty if these numerics check none."""
        return {}

    def meet(self, all_reduce: Callable[..., Tensor]) -> None:  # noqa: B027
        """Take a training's ``all_reduce(values, maximum=False)`` over ranks, for passes that join their samples."""

    def try_together(self, module: nn.Module, batch: MicroBatch, first: dict[int, bytes]) -> None:  # noqa: B027
        """Choose how to run several shards, by a trial; ``first`` is the fingerprint of each alone."""

    def not_finite(self, module: nn.Module, batch: MicroBatch) -> list[str]:  # noqa: ARG002
        """Descriptions of the operations that produce infinity or NaN from a batch; empty if unknown."""
        return []

    def arithmetic(self) -> Arithmetic | None:
        """Arithmetic figures for the record of the training; None if there are none."""
        return None

    @abstractmethod
    def reset(self, optimizer: Any) -> None:
        """Restore the state before the first step."""
