"""What a training loop asks of its numerics, and what they take and give."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from torch import Tensor

from samebits.batch_split import leading
from samebits.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping
    from contextlib import AbstractContextManager

    from torch import nn

    from samebits.records.run import Arithmetic

    AllReduce = Callable[[Tensor], Tensor]
    """A sum or a maximum over ranks, which every rank must call."""


class MicroBatch(NamedTuple):
    """Samples on the device, the step they belong to, and under ``exact`` the numbers of the shards that they are.

    ``start`` is the place of the first of them in the global batch.
    """

    inputs: Tensor
    targets: Tensor
    step: int
    shards: range = range(1)
    start: int = 0

    def head(self, rows: int) -> MicroBatch:
        """So many samples at most; under ``exact`` whole shards, and at least one."""
        rows, shards = leading(len(self.inputs), self.shards, rows)
        return self._replace(inputs=self.inputs[:rows], targets=self.targets[:rows], shards=shards)


def logits_of(outputs: object) -> Tensor:
    """The tensor that a model returned, or the ``logits`` of its output object. Raises UserError: it is neither."""
    if isinstance(outputs, Tensor):
        return outputs
    logits = getattr(outputs, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    raise UserError(
        f"the model returned {type(outputs).__name__}, expected a tensor or an object with a tensor .logits",
        hint="return the logits alone; DataParallel cannot gather other objects from its devices",
    )


class Optimizer(Protocol):
    """As much of ``torch.optim.Optimizer`` as a training needs."""

    param_groups: list[dict[str, Any]]

    @property
    def state(self) -> MutableMapping[Tensor, dict[str, Any]]:
        """What the steps so far have left, by parameter."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters."""


class Numerics(ABC):
    """Arithmetic of one training: the module that a strategy wraps, the loss, gradients and their use."""

    name: Literal["fast", "exact"]
    reduction: Literal["mean", "sum"]
    """What becomes of the gradients of several ranks."""

    @abstractmethod
    def configure(self) -> None:
        """Set this process's switches; again after those of other numerics, where trainings take turns."""

    def construction(self) -> AbstractContextManager[object]:
        """A block in which a model is built."""
        return nullcontext()

    def prepare(self, model: nn.Module) -> None:  # noqa: B027 - a model may be trained as it was built
        """Change a model that was built into one that can be trained; called once for each model."""

    def model_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """The model's state as it is saved, under the names and types that it was built with."""
        return model.state_dict()

    @abstractmethod
    def module(self, model: nn.Module) -> nn.Module:
        """What a strategy wraps; run by ``forward`` alone."""

    def compile(self, module: nn.Module) -> nn.Module:
        """The wrapped module compiled, if that is possible."""
        return module

    @property
    def graphs(self) -> bool:
        """Whether the wrapped module's passes become CUDA graphs, under a strategy that allows it."""
        return False

    def capture(self, module: nn.Module, sample: MicroBatch, check: MicroBatch) -> None:  # noqa: ARG002
        """Make graphs of the passes over ``sample``, and try them on ``check``; called where there are ``graphs``."""
        raise AssertionError("these numerics have no graphs")

    @abstractmethod
    def forward(self, module: nn.Module, batch: MicroBatch) -> Tensor:
        """The model's outputs, (samples, ...)."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """What ``backward`` is called with."""

    @abstractmethod
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each target, (targets,), in float32."""

    @abstractmethod
    def optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer of params.yaml."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Add the loss's gradients to those of the parameters."""

    def accepts_grads(self, all_reduce_max: AllReduce) -> bool:  # noqa: ARG002 - they may depend on no other rank
        """Whether the step's gradients stand; if not, the step's passes are made again."""
        return True

    @abstractmethod
    def step(self, optimizer: Any) -> None:  # what ``optimizer`` gave
        """Clip the gradients if asked to, and update the weights."""

    @abstractmethod
    def mean_losses(self, losses: Tensor, all_reduce: AllReduce, ranks: int) -> list[float]:
        """The mean loss of each step from this rank's values of ``loss``; ``all_reduce`` sums over ranks."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What the steps so far have left here, as JSON."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to what ``state_dict`` gave."""

    def fingerprint(self, module: nn.Module, batch: MicroBatch, *, backwards: bool = False) -> dict[int, bytes]:  # noqa: ARG002
        """What each shard of a batch gives, fed in order or ``backwards``; nothing where that is not to be asked."""
        return {}

    def not_finite(self, module: nn.Module, batch: MicroBatch) -> list[str]:  # noqa: ARG002
        """What makes infinity or NaN of a batch, each in words; nothing where that is not known."""
        return []

    def arithmetic(self) -> Arithmetic | None:
        """What a record of the training says of its arithmetic; None where there is nothing to say."""
        return None

    @abstractmethod
    def reset(self, optimizer: Any) -> None:
        """Go back to the state before the first step."""
