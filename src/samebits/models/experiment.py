"""A training of one's own, as a factory returns it in the place of a model alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    Loss = Callable[[Any, Tensor], Tensor]

_LOSS = "_samebits_loss"


@dataclass(frozen=True)
class Experiment:
    """A model, and the loss that it is trained and evaluated with.

    ``loss(outputs, targets)`` gets what the model returned for some samples, which may be of any type, and their
    targets, (samples, ...). It returns a loss for each sample, (samples,); the training minimises their mean. It may be
    a module without parameters of its own. Without it, the data decide: cross-entropy for classes, else squared error.
    """

    model: nn.Module
    loss: Loss | None = None


def attach_loss(model: nn.Module, loss: Loss | None) -> None:
    """Have a model carry its loss, so that copies and replicas have it too. It is no part of the model's state."""
    if loss is not None:
        model.__dict__[_LOSS] = loss


def loss_of(model: nn.Module) -> Loss | None:
    """The loss that a model carries; None if the data decide."""
    loss: Loss | None = model.__dict__.get(_LOSS)
    return loss
