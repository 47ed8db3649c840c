"""Makes the optimizer that ``train.optimizer`` names, one of ``torch.optim``."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from samebits.errors import UserError, few, first_line, place_of
from samebits.models.experiment import optimizer_of, parameter_groups_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from samebits.params.schema import Optimizer

_CHOSEN_HERE = ("params", "lr", "weight_decay", "foreach", "fused", "capturable", "differentiable")


def optimizer_for(
    model: nn.Module, chosen: Optimizer, groups: Sequence[dict[str, Any]], **implementation: bool
) -> torch.optim.Optimizer:
    """The model's own optimizer over groups of ``grouped``, or else the chosen one: see ``make_optimizer``.

    Raises:
        UserError: the user's function fails, or returns no optimizer of these parameters.
    """
    function = optimizer_of(model)
    if function is None:
        return make_optimizer(chosen, groups, **implementation)
    try:
        optimizer: Any = function([{**group} for group in groups])
    except Exception as error:
        what = f"optimizer: {type(error).__name__}: {first_line(str(error))}"
        raise UserError(what, hint=f"see {place_of(error) or 'that function'}") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        what = f"optimizer: it returned {type(optimizer).__name__}, expected a torch.optim.Optimizer"
        raise UserError(what, hint="make one of the groups that it gets")
    if inspect.signature(optimizer.step).parameters["closure"].default is inspect.Parameter.empty:
        what = f"optimizer: {type(optimizer).__name__} calls the model several times in a step"
        raise UserError(what, hint="choose one whose step needs no closure")
    held, given = ([[id(p) for p in one["params"]] for one in many] for many in (optimizer.param_groups, groups))
    if held != given:
        what = "optimizer: its groups are not those that it got"
        raise UserError(what, hint="give them all to it, in their order, and no others")
    return optimizer


def make_optimizer(
    chosen: Optimizer, groups: Sequence[dict[str, Any]], **implementation: bool
) -> torch.optim.Optimizer:
    """The optimizer over groups of ``grouped``. ``implementation`` are arguments such as ``foreach``, if it has them.

    Raises:
        UserError: the optimizer does not take an argument, or its value.
    """
    made = {cls.__name__.lower(): cls for cls in vars(torch.optim).values() if isinstance(cls, type)}[chosen.name]
    takes = inspect.signature(made).parameters
    keys = [name for name in ("lr", "weight_decay") if name in takes] + ["momentum"] * (chosen.name == "sgd")
    accepts = [name for name in takes if name not in {*_CHOSEN_HERE, *keys}]
    kwargs = {name: tuple(value) if isinstance(value, list) else value for name, value in chosen.kwargs.items()}
    for name in kwargs:
        if name not in accepts:
            hint = f"{made.__name__} takes {', '.join(accepts)}" + (
                ", and others by keys of their own" * (name in takes)
            )
            raise UserError(f"train.optimizer.kwargs.{name}: unknown key", hint=hint)
    for name in (name for group in groups for name in group):
        if name not in ("params", *keys, *accepts):
            hint = f"{made.__name__} takes {', '.join([*keys, *accepts])}"
            raise UserError(f"parameter_groups: {name}: unknown key of a group", hint=hint)
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
        optimizer: torch.optim.Optimizer = made([{**group} for group in groups], **settings)
    except (TypeError, ValueError, RuntimeError) as error:
        text = f"train.optimizer.kwargs: {made.__name__} does not take {kwargs}: {first_line(str(error))}"
        raise UserError(text, hint=f"see the documentation of torch.optim.{made.__name__}") from None
    return optimizer


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """The parameters that are trained, in the groups of the user's own function if the model carries one.

    Raises:
        UserError: the function fails, or leaves out a parameter, or has one twice.
    """
    trained = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    function = parameter_groups_of(model)
    if function is None:
        return [{"params": [p for p in model.parameters() if p.requires_grad]}]
    try:
        groups = [{**group, "params": [*group["params"]]} for group in function(model)]
        held = Counter(id(p) for group in groups for p in group["params"])
    except Exception as error:
        what = f"parameter_groups: {type(error).__name__}: {first_line(str(error))}"
        raise UserError(what, hint=f"see {place_of(error) or 'that function'}") from error
    lacks = [f"model.{name}" for key, name in trained.items() if held[key] != 1]
    if lacks or held.total() != len(trained):
        what = (
            f"parameter_groups: {few(lacks) or 'a tensor'} {'is not' if lacks else 'that is no parameter to train is'}"
        )
        hint = "give each parameter with requires_grad to one group, and no other"
        raise UserError(f"{what} in one group", hint=hint)
    return groups
