"""Samples of any nesting: dictionaries, tuples, lists and dataclasses of tensors, whose first axis counts samples."""

from __future__ import annotations

import dataclasses
import inspect
from functools import cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from numpy import ndarray
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import nn

Nested = Any
"""A tensor, or a dictionary, tuple, list or dataclass of such; None where there is nothing."""


_LEAVES = {Tensor, ndarray, int, float, bool}
"""The usual ones."""


def children(nested: Nested) -> list[tuple[str, Nested]] | None:
    """The parts of a container with their names; None for anything else."""
    if isinstance(nested, dict):
        return [(str(key), value) for key, value in nested.items()]
    if isinstance(nested, tuple | list):
        return [(str(index), value) for index, value in enumerate(nested)]
    if dataclasses.is_dataclass(nested) and not isinstance(nested, type):
        return [(field.name, getattr(nested, field.name)) for field in dataclasses.fields(nested)]
    return None


def mapped(function: Callable[[Any], Any], nested: Nested) -> Nested:
    """The same containers with what ``function`` makes of each part that is none. None stays."""
    if nested is None:
        return None
    if isinstance(nested, Tensor) or (parts := children(nested)) is None:
        return function(nested)
    made = [mapped(function, part) for _, part in parts]
    if isinstance(nested, dict):
        filled = dict(zip(nested, made, strict=True))
        return filled if type(nested) is dict else type(nested)(filled)
    if isinstance(nested, tuple | list):
        return type(nested)(*made) if hasattr(nested, "_fields") else type(nested)(made)
    return dataclasses.replace(nested, **{name: part for (name, _), part in zip(parts, made, strict=True)})


def leaves_of(nested: Nested, name: str = "") -> Iterator[tuple[str, Any]]:
    """Whatever is neither a container nor None, each with its name, such as ``image`` or ``0.mask``."""
    parts = None if isinstance(nested, Tensor) else children(nested)
    if parts is None and nested is not None:
        yield name, nested
    for key, part in parts or ():
        yield from leaves_of(part, f"{name}.{key}" if name else key)


def form_of(nested: Nested) -> tuple[Any, list[Any]]:
    """What samples of the same containers share, and the leaves in the order of ``leaves_of``."""
    leaves: list[Any] = []
    return _form(nested, leaves), leaves


def _form(nested: Nested, leaves: list[Any]) -> Any:
    kind = type(nested)
    if kind is tuple or kind is list:
        return tuple([_form(part, leaves) for part in nested])
    if nested is None:
        return None
    if kind in _LEAVES or isinstance(nested, Tensor) or (parts := children(nested)) is None:
        leaves.append(nested)
        return True
    return tuple([(name, _form(part, leaves)) for name, part in parts])


def refilled(nested: Nested, leaves: Iterable[Any]) -> Nested:
    """The same containers with other leaves, in the order of ``leaves_of``."""
    rest = iter(leaves)
    return mapped(lambda _: next(rest), nested)


def rows_of(nested: Nested) -> int:
    """The number of samples."""
    return next(len(tensor) for _, tensor in leaves_of(nested))


def unbound(nested: Nested) -> list[Nested]:
    """The parts along the first axis."""
    return [mapped(itemgetter(index), nested) for index in range(rows_of(nested))]


def called(model: nn.Module, inputs: Nested) -> Any:
    """What a model returns for its inputs.

    A dictionary is given by keywords if ``forward`` takes each of them, and a tuple or list by position if it takes so
    many arguments; else they are one argument, as everything else is.
    """
    if isinstance(inputs, dict) and _takes(type(model).forward, 0, tuple(inputs)):
        return model(**inputs)
    if isinstance(inputs, tuple | list) and _takes(type(model).forward, len(inputs), ()):
        return model(*inputs)
    return model(inputs)


@cache
def _takes(forward: Callable[..., Any], count: int, keys: tuple[Any, ...]) -> bool:
    if not all(isinstance(key, str) for key in keys):
        return False
    try:
        inspect.signature(forward).bind(None, *[None] * count, **dict.fromkeys(keys))
    except TypeError:
        return False
    return True
