"""Makes the optimizer that ``train.optimizer`` names, one of ``torch.optim``."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from samebits.errors import UserError, first_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from samebits.params.schema import Optimizer

_CHOSEN_HERE = ("params", "lr", "weight_decay", "foreach", "fused", "capturable", "differentiable")


def make_optimizer(chosen: Optimizer, parameters: Sequence[Tensor], **implementation: bool) -> torch.optim.Optimizer:
    """The optimizer over ``parameters``. ``implementation`` are arguments such as ``foreach``, left out if it has none.

    Raises:
        UserError: the optimizer does not take an argument, or its value.
    """
    made = {cls.__name__.lower(): cls for cls in vars(torch.optim).values() if isinstance(cls, type)}[chosen.name]
    takes = inspect.signature(made).parameters
    reserved = {*_CHOSEN_HERE, *(["momentum"] if chosen.name == "sgd" else [])}
    accepts = [name for name in takes if name not in reserved]
    kwargs = {name: tuple(value) if isinstance(value, list) else value for name, value in chosen.kwargs.items()}
    for name in kwargs:
        if name not in accepts:
            hint = f"{made.__name__} takes {', '.join(accepts)}" + (" by keys of its own" * (name in reserved))
            raise UserError(f"train.optimizer.kwargs.{name}: unknown key", hint=hint)
    settings: dict[str, Any] = {"lr": chosen.lr, **kwargs}
    if "weight_decay" in takes:
        settings["weight_decay"] = chosen.weight_decay
    elif chosen.weight_decay:
        what = f"train.optimizer.weight_decay: got {chosen.weight_decay}, and {made.__name__} has none"
        raise UserError(what, hint="set it to 0")
    if chosen.name == "sgd":
        settings["momentum"] = chosen.momentum
    settings |= {name: value for name, value in implementation.items() if name in takes}
    try:
        optimizer: torch.optim.Optimizer = made([*parameters], **settings)
    except (TypeError, ValueError, RuntimeError) as error:
        text = f"train.optimizer.kwargs: {made.__name__} does not take {kwargs}: {first_line(str(error))}"
        raise UserError(text, hint=f"see the documentation of torch.optim.{made.__name__}") from None
    return optimizer
