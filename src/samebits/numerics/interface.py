"""What a training loop asks of its numerics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

    from samebits.numerics.batch import MicroBatch

    OverRanks = Callable[[Tensor], Tensor]


class Optimizer(Protocol):
    """As much of ``torch.optim.Optimizer`` as a training needs."""

    param_groups: list[dict[str, Any]]

    @property
    def state(self) -> MutableMapping[Tensor, dict[str, Any]]:
        """What the steps so far have left, by parameter."""
        ...

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        ...


class Numerics(Protocol):
    """Arithmetic of one training: the module that a strategy wraps, the loss, gradients and their use."""

    @property
    def name(self) -> Literal["fast", "exact"]:
        """As in params.yaml."""
        ...

    @property
    def reduction(self) -> Literal["mean", "sum"]:
        """What becomes of the gradients of several ranks."""
        ...

    def configure(self) -> None:
        """Set this process's switches; called once in a worker."""
        ...

    def building(self) -> AbstractContextManager[object]:
        """A block in which a model is built."""
        ...

    def adopt(self, model: nn.Module) -> None:
        """Change a model that was built into one that can be trained; called once for each model."""
        ...

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """The model's state as it is saved, under the names and types that it was built with."""
        ...

    def module(self, model: nn.Module) -> nn.Module:
        """What a strategy wraps; fed by ``outputs`` alone."""
        ...

    def compile(self, module: nn.Module) -> nn.Module:
        """The wrapped module compiled, if that is possible."""
        ...

    def outputs(self, module: nn.Module, batch: MicroBatch) -> Tensor:
        """The model's outputs, (samples, ...)."""
        ...

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """What ``backward`` is called with."""
        ...

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each target, (targets,), in float32."""
        ...

    def optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer of params.yaml."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients."""
        ...

    def settled(self, largest: OverRanks) -> bool:
        """Whether the step's gradients stand; if not, the step is made again. ``largest`` is a maximum over ranks."""
        ...

    def step(self, optimizer: Any) -> None:  # what ``optimizer`` gave
        """Clip the gradients if asked to, and update the weights."""
        ...

    def mean_losses(self, losses: Tensor, total: OverRanks, ranks: int) -> list[float]:
        """The mean loss of each step from this rank's values of ``loss``; ``total`` is a sum over ranks."""
        ...

    def state(self) -> dict[str, Any]:
        """What the steps so far have left here, as JSON."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Go back to what ``state`` gave."""
        ...

    def facts(self) -> dict[str, Any]:
        """What a record of the training says of its arithmetic."""
        ...

    def reset(self, optimizer: Any) -> None:
        """Forget what the steps so far have left."""
        ...
