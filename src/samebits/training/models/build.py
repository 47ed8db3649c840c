"""Builds the model that params.yaml names; its first weights are the same on every host."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import signal
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from samebits.errors import UserError, first_line, place_of
from samebits.models import MODELS, UserModel
from samebits.models.experiment import Experiment, attach
from samebits.numerics.initialization import portable_initialization
from samebits.training.models.sources import search_path

_METRIC = re.compile(r"[A-Za-z0-9_.-]{1,40}")

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from samebits.models import Model
    from samebits.records.card import Card


def build_model(
    model: Model,
    card: Card,
    seed: int,
    within: AbstractContextManager[object] | None = None,
    *,
    rough: bool = False,
) -> nn.Module:
    """The model of ``build_experiment``, which carries its loss and its groups of parameters."""
    return build_experiment(model, card, seed, within, rough=rough).model


def build_experiment(
    model: Model,
    card: Card,
    seed: int,
    within: AbstractContextManager[object] | None = None,
    *,
    rough: bool = False,
) -> Experiment:
    """Build a model on the CPU in the block ``within``; its random weights are drawn under ``seed``.

    ``rough`` weights repeat a few numbers, which is fast. A user's factory is called with ``model.kwargs``, and with
    ``card=`` if it has such a parameter.

    Raises:
        UserError: the factory cannot be imported or called, does not return a module, or draws random numbers in a way
            that differs between hosts.
    """
    within = within or nullcontext()
    if isinstance(model, UserModel):
        with within, portable_initialization(seed, rough=rough):
            return _call_factory(model, card)
    spec = MODELS[model.name]
    if not spec.fits(card):
        got = f"{card.input_dtype} {card.input_shape} to {card.target_dtype} {card.target_shape}"
        hint = "choose another model, or your own factory"
        raise UserError(f"model.name: {model.name} needs {spec.needs}; the data is {got}", hint=hint)
    with within, portable_initialization(seed, rough=rough):
        return Experiment(spec.build(model, card))


def _call_factory(model: UserModel, card: Card) -> Experiment:
    factory = import_factory(model.name, Path(model.source) if model.source else None)
    kwargs: dict[str, Any] = dict(model.kwargs)
    try:
        signature = inspect.signature(factory)
        if "card" in signature.parameters and "card" not in kwargs:
            kwargs["card"] = card
        _check_names(model.name, signature, kwargs)
        signature.bind(**kwargs)
    except TypeError as error:
        raise UserError(f"model.kwargs: {model.name}: {error}", hint="give what the factory takes") from None
    try:
        built = factory(**kwargs)
    except UserError:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is not signal.SIG_DFL:
            raise  # Ctrl-C; in a worker, whose handler is the default, Ctrl-C raises no exception
        raise UserError(
            f"model.name: {model.name} raised {type(error).__name__}: {first_line(str(error))}",
            hint=f"see {place_of(error) or 'the factory'}",
        ) from error
    experiment: Any = built if isinstance(built, Experiment) else Experiment(built)
    built = experiment.model  # of any type
    if not isinstance(built, nn.Module):
        what = f"model.name: {model.name} returned {type(built).__name__}, expected a torch.nn.Module"
        raise UserError(what, hint="return the model, or samebits.Experiment(model, loss)")
    _check_functions(model.name, experiment)
    _check_data(model.name, experiment, card)
    attach(experiment)
    if lazy := [name for name, value in chain(built.named_parameters(), built.named_buffers()) if is_lazy(value)]:
        what = f"model.name: {model.name} returned a model whose {lazy[0]} has no shape yet"
        raise UserError(what, hint="run one sample through it in the factory, or give sizes in place of Lazy modules")
    if odd := [name for name, value in built.state_dict().items() if not isinstance(value, Tensor)]:
        what = f"model.name: {model.name} returned a model whose state_dict holds {odd[0]}, which is no tensor"
        raise UserError(what, hint="keep it out of get_extra_state: weights are saved as tensors alone")
    return experiment  # type: ignore[no-any-return]


def _check_data(name: str, experiment: Any, card: Card) -> None:
    for field in ("train_data", "test_data"):
        given = getattr(experiment, field) is not None
        if given != (card.task == "dataset"):
            what = f"model.name: {name}: it has {'a' if given else 'no'} {field}, and data.task is {card.task}"
            hint = "set data.task: dataset, or leave it out" if given else f"give samebits.Experiment a {field}"
            raise UserError(what, hint=hint)


def _check_functions(name: str, experiment: Any) -> None:
    takes = {"loss": "outputs and targets", "parameter_groups": "the model", "optimizer": "groups of parameters",
             "schedule": "a step and the number of steps"}  # fmt: skip
    for kind in takes:
        function = getattr(experiment, kind)
        if function is not None and not callable(function):
            what = f"model.name: {name}: its {kind} is {type(function).__name__}, expected a function"
            raise UserError(what, hint=f"give a function of {takes[kind]}")
    metrics = {} if experiment.metrics is None else experiment.metrics
    if not isinstance(metrics, Mapping):
        what = f"model.name: {name}: its metrics is {type(metrics).__name__}, expected a dictionary of functions"
        raise UserError(what, hint='give metrics={"name": function}')
    for metric, function in metrics.items():
        if not callable(function):
            what = f"model.name: {name}: its metric {metric!r} is {type(function).__name__}, expected a function"
            raise UserError(what, hint="give a function of outputs and targets")
        if not (isinstance(metric, str) and _METRIC.fullmatch(metric)) or metric == "loss":
            what = (
                f"model.name: {name}: its metric {metric!r}: expected up to 40 letters, digits and _ . -, and not loss"
            )
            raise UserError(what, hint="name it otherwise")
    loss = experiment.loss
    if isinstance(loss, nn.Module) and next(loss.parameters(), None) is not None:
        what = f"model.name: {name}: its loss has parameters of its own, which nothing would train"
        raise UserError(what, hint="put them into the model, and return from forward what the loss needs")


def _check_names(name: str, signature: inspect.Signature, kwargs: dict[str, Any]) -> None:
    parameters = signature.parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for key in kwargs.keys() - parameters.keys():
        near = difflib.get_close_matches(key, parameters, n=1, cutoff=0.7)
        hint = f"did you mean {near[0]}?" if near else "remove it"
        accepts = ", ".join(parameters) or "nothing"
        raise UserError(f"model.kwargs.{key}: unknown key, {name} takes {accepts}", hint=hint)


def import_factory(name: str, source: Path | None) -> Any:
    """Import ``package.module:factory`` with the working directory on the path, and check that it lies in ``source``.

    Raises UserError: there is no such factory, or it lies elsewhere.
    """
    if source and not source.exists():
        hint = "give the path from the repository's root"
        raise UserError(f"model.source: {source}: no such file or folder", hint=hint)
    module_name, _, attribute = name.partition(":")
    if (top := module_name.partition(".")[0]) in {*sys.stdlib_module_names, "samebits"}:
        whose = "samebits" if top == "samebits" else "Python"
        raise UserError(f"model.name: {name}: a module of {whose}'s makes no model", hint="name a factory of your own")
    sys.path[:] = search_path()
    try:
        module = importlib.import_module(module_name)
        factory = getattr(module, attribute)
    except SyntaxError as error:
        where = f"{error.filename}:{error.lineno}"
        raise UserError(
            f"model.name: {name} cannot be imported: {where}: {error.msg}", hint="correct that line"
        ) from error
    except (ImportError, AttributeError) as error:
        hint = "write package.module:factory as seen from the repository's root"
        raise UserError(f"model.name: {name} cannot be imported: {error}", hint=hint) from error
    file = Path(module.__file__ or "").resolve()
    if source and not file.is_relative_to(source.resolve()):
        hint = "remove model.source, or name the file or folder that the factory is imported from"
        raise UserError(f"model.source: {source} does not hold {file}", hint=hint)
    return factory
