"""A training of one's own, as a factory returns it in the place of a model alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor, nn

    Loss = Callable[[Any, Tensor], Tensor]

    ParameterGroups = Callable[[nn.Module], Iterable[dict[str, Any]]]

_LOSS, _GROUPS = "_samebits_loss", "_samebits_parameter_groups"


@dataclass(frozen=True)
class Experiment:
    """A model, the loss that it is trained and evaluated with, and groups of its parameters.

    ``loss(outputs, targets)`` gets what the model returned for some samples, which may be of any type, and their
    targets, (samples, ...). It returns a loss for each sample, (samples,); the training minimises their mean. It may be
    a module without parameters of its own. Without it, the data decide: cross-entropy for classes, else squared error.

    ``parameter_groups(model)`` returns groups as ``torch.optim`` takes them: dictionaries with ``params`` and with
    arguments of the optimizer in place of those in ``train.optimizer``. A group's ``lr`` follows the schedule.
    """

    model: nn.Module
    loss: Loss | None = None
    parameter_groups: ParameterGroups | None = None


def attach(experiment: Experiment) -> None:
    """Have the model carry the rest, so that copies and replicas have it too. It is no part of the model's state."""
    for name, value in ((_LOSS, experiment.loss), (_GROUPS, experiment.parameter_groups)):
        if value is not None:
            experiment.model.__dict__[name] = value


def loss_of(model: nn.Module) -> Loss | None:
    """The loss that a model carries; None if the data decide."""
    loss: Loss | None = model.__dict__.get(_LOSS)
    return loss


def parameter_groups_of(model: nn.Module) -> ParameterGroups | None:
    """The function that groups a model's parameters; None if they are one group."""
    function: ParameterGroups | None = model.__dict__.get(_GROUPS)
    return function
