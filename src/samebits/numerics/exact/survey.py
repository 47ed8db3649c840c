"""Engines that note what they find, with its places, and go on: all refusals, or the sources of infinity and NaN."""

from __future__ import annotations

import sys
from math import isinf, isnan
from pathlib import Path
from traceback import walk_stack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from samebits.errors import RefusedError, few, is_own
from samebits.numerics.exact.engine import Engine, below

if TYPE_CHECKING:
    from collections.abc import Iterable


class Place(NamedTuple):
    """Place of an operation: its module as a refusal names it, and the innermost line of the user's own files."""

    what: str
    line: str


class Refusals:
    """Findings of one survey of a model, in the order in which they came."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, str], dict[Place, None]] = {}
        self.of_nodes: dict[int, Place] = {}
        """Place in the forward pass of each node of the backward pass, by the node's sequence number."""

    def note(self, error: RefusedError, place: Place | None = None) -> None:
        """Keep a refusal; ``place`` is more precise than the place that the error itself names."""
        place = place or Place(what_of(error), "")
        self._places.setdefault((error.why, error.hint), {})[place] = None

    def knows(self, error: RefusedError, place: Place) -> bool:
        """Whether this refusal is known at this place."""
        return place in self._places.get((error.why, error.hint), {})

    @property
    def count(self) -> int:
        """Number of different refusals."""
        return len(self._places)

    def told(self) -> list[tuple[str, str]]:
        """Each refusal with all its places in one text, and its hint."""
        return [(_text(why, places), hint) for (why, hint), places in self._places.items()]


class Survey(Engine):
    """An engine that notes refusals and then runs PyTorch's own operation."""

    def __init__(self, refusals: Refusals, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refusals = refusals

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.draws is not None:  # in a forward pass, this operation's node has the last number
            number = torch._C._autograd._get_sequence_nr() - 1
            self._refusals.of_nodes[number] = Place(what_of(self.refusal("", "")), line_here())
        try:
            return super().__torch_dispatch__(func, types, args, dict(kwargs or {}))
        except RefusedError as error:
            self.refuse(error)
        with below():
            return func(*args, **(kwargs or {}))

    def refuse(self, error: RefusedError) -> None:
        """Note a refusal."""
        node = torch._C._current_autograd_node()
        place = None if node is None else self._refusals.of_nodes.get(node._sequence_nr())
        if place is not None:
            if self._refusals.knows(error, place):  # the derivative of an operation that was refused in forward
                return
            error = RefusedError(f"{error.why} (in the backward pass)", hint=error.hint)
        self._refusals.note(error, place or Place(what_of(error), line_here()))


class NotFinite(Survey):
    """A survey of the operations that make infinity of finite numbers, or NaN of numbers."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known, level = self._refusals.count, _level((args, kwargs))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self._refusals.count == known and (now := _level(result)) > level:  # else an inner operation was the source
            made = "infinity of finite numbers" if now == _INFINITE else "NaN"
            self.refuse(self.refusal(f"{func.overloadpacket.__name__} makes {made}", ""))
        return result


_INFINITE, _NAN = 1, 2


def _level(values: object) -> int:
    """``_NAN`` if NaN is among the floating-point numbers, else ``_INFINITE`` if infinity is, else 0."""
    leaves = tree_leaves(values)
    numbers = [leaf for leaf in leaves if isinstance(leaf, float)]
    with below():
        sizes = [leaf.detach().abs().amax().item() for leaf in leaves
                 if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel()]  # fmt: skip
    levels = (_NAN if isnan(one) else _INFINITE if isinf(one) else 0 for one in (*numbers, *sizes))
    return max(levels, default=0)


def what_of(error: RefusedError) -> str:
    """The place that a refusal names; empty if it names none."""
    return error.what if error.at or error.kind else ""


def line_here() -> str:
    """The innermost running line of the user's own files; empty if there is none."""
    places = ((Path(frame.f_code.co_filename), line) for frame, line in walk_stack(sys._getframe(1)))
    return next((f"{file.name}:{line}" for file, line in places if is_own(file)), "")


def _text(why: str, places: Iterable[Place]) -> str:
    whats = _distinct(place.what for place in places)
    lines = _distinct(place.line for place in places)
    where = [f"{few(whats)}: " if whats else "", why, f" ({few(lines)})" if lines else ""]
    return "".join(where)


def _distinct(values: Iterable[str]) -> list[str]:
    return [value for value in dict.fromkeys(values) if value]
