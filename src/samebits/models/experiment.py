"""A training of one's own, as a factory returns it in the place of a model alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor, nn
    from torch.utils.data import Dataset

    Loss = Callable[[Any, Any], Tensor]

    ParameterGroups = Callable[[nn.Module], Iterable[dict[str, Any]]]

_LOSS, _GROUPS = "_samebits_loss", "_samebits_parameter_groups"


@dataclass(frozen=True)
class Experiment:
    """A model, the loss that it is trained and evaluated with, groups of its parameters, and datasets.

    ``loss(outputs, targets)`` gets what the model returned for some samples, which may be of any type, and their
    targets, (samples, ...). It returns a loss for each sample, (samples,); the training minimises their mean. It may be
    a module without parameters of its own. Without it, the data decide: cross-entropy for classes, else squared error.

    ``parameter_groups(model)`` returns groups as ``torch.optim`` takes them: dictionaries with ``params`` and with
    arguments of the optimizer in place of those in ``train.optimizer``. A group's ``lr`` follows the schedule.

    ``train_data`` and ``test_data`` are map-style datasets, for ``data.task: dataset``. A sample is a tensor, an array,
    a number, or a dictionary, tuple or dataclass of such. If it is a tuple of two, the model gets the first, and the
    loss the second as targets. Otherwise both get the whole sample, and without a loss the model returns its own, as
    ``.loss``. A dictionary is given to the model by keywords if its ``forward`` takes them, and a tuple by position.
    """

    model: nn.Module
    loss: Loss | None = None
    parameter_groups: ParameterGroups | None = None
    train_data: Dataset[Any] | None = None
    test_data: Dataset[Any] | None = None


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
