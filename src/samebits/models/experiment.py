"""A training of one's own, as a factory returns it in the place of a model alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor, nn
    from torch.optim import Optimizer

    Loss = Callable[[Any, Any], Tensor]
    ParameterGroups = Callable[[nn.Module], Iterable[dict[str, Any]]]
    MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizer]
    Schedule = Callable[[int, int], float]
    Metrics = Mapping[str, Loss]

    class MapDataset(Protocol):
        """A dataset by number, such as ``torch.utils.data.Dataset``; it has a length too."""

        def __getitem__(self, index: Any, /) -> Any: ...


_CARRIED = ("loss", "parameter_groups", "optimizer", "schedule", "metrics")
_PREFIX = "_samebits_"  # of the names by which a model carries them


@dataclass(frozen=True)
class Experiment:
    """A model, its loss, groups of its parameters, its optimizer and schedule, datasets, and metrics.

    ``loss(outputs, targets)`` gets what the model returned for some samples, which may be of any type, and their
    targets, (samples, ...). It returns a loss for each sample, (samples,); the training minimises their mean. It may be
    a module without parameters of its own. Without it, the data decide: cross-entropy for classes, else squared error.

    ``parameter_groups(model)`` returns groups as ``torch.optim`` takes them: dictionaries with ``params`` and with
    arguments of the optimizer in place of those in ``train.optimizer``. A group's ``lr`` follows the schedule.

    ``optimizer(groups)`` returns a ``torch.optim.Optimizer`` of these groups, in place of the one of
    ``train.optimizer``. ``schedule(step, steps)`` returns the factor of the learning rates at a step, counted from 0,
    in place of ``train.schedule``.

    ``train_data`` and ``test_data`` are map-style datasets, for ``data.task: dataset``. A sample is a tensor, an array,
    a number, or a dictionary, tuple, list or dataclass of such. If it is a tuple of two, the model gets the first, and
    the loss the second as targets. Otherwise both get the whole sample, and without a loss the model returns its own,
    as ``.loss``. A dictionary is given to the model by keywords if its ``forward`` takes them, and a tuple by position.

    ``metrics`` are functions by name, which take what ``loss`` takes and return a number for each sample, (samples,).
    Their means over the test data stand in the report. One of the name ``accuracy`` is a share between 0 and 1.
    """

    model: nn.Module
    loss: Loss | None = None
    parameter_groups: ParameterGroups | None = None
    optimizer: MakeOptimizer | None = None
    schedule: Schedule | None = None
    train_data: MapDataset | None = None
    test_data: MapDataset | None = None
    metrics: Metrics | None = None


def attach(experiment: Experiment) -> None:
    """Have the model carry the rest, so that copies and replicas have it too. It is no part of the model's state."""
    for name in _CARRIED:
        if (value := getattr(experiment, name)) is not None:
            experiment.model.__dict__[_PREFIX + name] = value


def is_carried(name: str) -> bool:
    """Whether an attribute of a model is what ``attach`` has given to it."""
    return name.startswith(_PREFIX)


def loss_of(model: nn.Module) -> Loss | None:
    """The loss that a model carries; None if the data decide."""
    loss: Loss | None = model.__dict__.get(f"{_PREFIX}loss")
    return loss


def parameter_groups_of(model: nn.Module) -> ParameterGroups | None:
    """The function that groups a model's parameters; None if they are one group."""
    function: ParameterGroups | None = model.__dict__.get(f"{_PREFIX}parameter_groups")
    return function


def optimizer_of(model: nn.Module) -> MakeOptimizer | None:
    """The function that makes a model's optimizer; None if the params name it."""
    function: MakeOptimizer | None = model.__dict__.get(f"{_PREFIX}optimizer")
    return function


def metrics_of(model: nn.Module) -> Metrics:
    """The metrics that a model carries, by name."""
    metrics: Metrics = model.__dict__.get(f"{_PREFIX}metrics", {})
    return metrics


def schedule_of(model: nn.Module) -> Schedule | None:
    """The function that gives the factors of a model's learning rates; None if the params name the schedule."""
    function: Schedule | None = model.__dict__.get(f"{_PREFIX}schedule")
    return function
