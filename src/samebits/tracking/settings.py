"""Params of a recorded run beside those of its commit."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from samebits.errors import UserError
from samebits.params import parse_params, read_yaml
from samebits.section import leaves

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

Values = dict[str, Any]
"""Values by keys with dots, of which no two places share one."""


class _Absent:
    """The value of a key that is not there, which no text of a params.yaml is equal to."""

    def __repr__(self) -> str:
        return "(absent)"


_ABSENT = _Absent()


def values_of(text: str) -> Values:
    """The values of a ``params.yaml``."""
    return _by_key(read_yaml(text))


def values_of_commit(text: str, recorded: Values) -> Values:
    """The values of a commit's ``params.yaml``, with the defaults and types with which a run records them."""
    found = {**values_of(text), **_as_recorded(text, recorded)}
    return {key: value for key, value in found.items() if value != {} or not _any_below(key, recorded)}


def settings_changed(committed: Values, recorded: Values) -> list[str]:
    """A line for each value that differs, in itself or by its type, and one if the model's keys have another order."""
    keys = [*recorded, *(key for key in committed if key not in recorded)]
    pairs = {key: (committed.get(key, _ABSENT), recorded.get(key, _ABSENT)) for key in keys}
    lines = [f"{key}: {then} -> {now}" for key, (then, now) in pairs.items() if repr(then) != repr(now)]
    if _order(recorded, committed) != _order(committed, recorded):
        lines.append("model.kwargs: the same keys in another order")
    return lines


def _as_recorded(text: str, keys: Container[str]) -> Values:
    """These keys with their defaults and types; empty if this version cannot read the file."""
    with suppress(UserError):
        whole = _by_key(parse_params(read_yaml(text)).model_dump(mode="json"))
        return {key: value for key, value in whole.items() if key in keys}
    return {}


def _by_key(tree: Any) -> Values:
    return {".".join(map(_plain, place)): value for place, value in leaves(tree) if place}


def _plain(key: object) -> str:
    """A part of a key as text, in quotes unless it is a word that stands for nothing else."""
    word = isinstance(key, str) and re.fullmatch(r"(?!(True|False|None|nan|inf)$)[^\W\d][\w-]*", key)
    return str(key) if word else repr(key)


def _any_below(key: str, keys: Iterable[str]) -> bool:
    return any(other.startswith(f"{key}.") for other in keys)


def _order(keys: Iterable[str], shared: Container[str]) -> list[str]:
    """The model's own keys that both have. A model can depend on their order."""
    return [key for key in keys if key.startswith("model.kwargs.") and key in shared]
