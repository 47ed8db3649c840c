"""Building blocks of params.yaml: frozen sections, and mappings with dotted names."""

from __future__ import annotations

import difflib
import json
import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError, PydanticKnownError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pydantic.fields import FieldInfo

Effect = Literal[
    "exact",  # the bits of an exact training
    "fast",  # the bits of a fast one
    "time",  # the figures that are timed
    "devices",  # which devices a training gets
    "own_devices",  # and may differ between trainings, and between machines of one training
    "runs",  # which trainings exist
    "evaluation",  # what an evaluation computes
    "evaluation_batch",  # the batch size of an evaluation
    "tracking",  # what MLflow records
]
"""An effect that a key of params.yaml can have."""


class Affects:
    """Metadata of a key: its effects. A key without this metadata changes no file that is kept."""

    def __init__(self, *effects: Effect) -> None:
        self.effects = frozenset(effects)


class Section(BaseModel):
    """A frozen part of params.yaml that refuses unknown keys and silent conversions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, raw: Any) -> Any:
        """Name the accepted keys, which pydantic's own refusal does not."""
        for key in raw if isinstance(raw, dict) else ():
            if key not in cls.model_fields:
                near = difflib.get_close_matches(str(key), cls.model_fields, n=1) or _below(cls, key)
                context = {"key": str(key), "accepts": ", ".join(cls.model_fields), "near": near}
                raise PydanticCustomError("unknown_key", "Unknown key", context)
        return raw


def _below(section: type[Section], key: object) -> list[str]:
    """A key of that name in a subsection, with its path."""
    parts = ((name, _subsection(field)) for name, field in section.model_fields.items())
    return [f"{name}.{key}" for name, part in parts if part and key in part.model_fields][:1]


def _subsection(field: FieldInfo) -> type[Section] | None:
    """The section that a key holds; None if it holds a value."""
    held = field.annotation
    return held if isinstance(held, type) and issubclass(held, Section) else None


class _Arguments(dict[str, Any]):
    """A mapping that can be hashed, and is not changed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(json.dumps(self, sort_keys=True, default=str))


def _arguments(values: dict[str, Any]) -> _Arguments:
    """Refuse what a record would not give back: a date, which comes back as a text, NaN, and a key that is no text."""
    _require_recordable(values, "")
    return _Arguments(values)


def _require_recordable(value: object, name: str) -> None:
    if isinstance(value, dict):
        for key, one in value.items():
            below = f"{name}.{key}" if name else str(key)
            if not isinstance(key, str):
                raise _unrecordable(f"the key {key!r} of {name}", key)
            _require_recordable(one, below)
    elif isinstance(value, list | tuple):
        for one in value:
            _require_recordable(one, name)
    elif not (value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))):
        raise _unrecordable(name, value)


def _unrecordable(what: str, value: object) -> PydanticCustomError:
    kind = str(value) if isinstance(value, float) else type(value).__name__
    context = {"what": what, "kind": kind}
    return PydanticCustomError("unrecordable", "{what} is {kind}, which records do not keep", context)


Arguments = Annotated[dict[str, Any], AfterValidator(_arguments)]
"""Keyword arguments of somebody's function: what JSON holds, and otherwise its own business."""


def effects_of(section: type[Section], prefix: str = "") -> Iterator[tuple[str, frozenset[Effect]]]:
    """The dotted keys of a section with their effects. A subsection with effects of its own counts as one key."""
    for name, field in section.model_fields.items():
        said = next((one for one in field.metadata if isinstance(one, Affects)), None)
        below = _subsection(field)
        if said is None and below:
            yield from effects_of(below, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", said.effects if said else frozenset()


def as_tuple(value: object) -> tuple[object, ...]:
    """A YAML list as a tuple, so that the frozen objects are hashable."""
    if not isinstance(value, list | tuple):
        raise PydanticKnownError("list_type")
    return tuple(value)


Place = tuple[Any, ...]
"""The keys that lead to a value in nested mappings."""


def leaves(tree: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """The values of nested mappings, each with its place. No two places are one, whatever the keys are."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from leaves(value, (*place, key))
    else:
        yield place, tree


def dotted(place: Place) -> str:
    """The name of a place. Keys that hold dots can give two places one name."""
    return ".".join(map(str, place))


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings as one mapping with dotted names."""
    return {dotted(place): value for place, value in leaves(values) if place}


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted names with different values in two nested mappings, and both values; a missing value is None.

    An empty mapping is none: the other one may have it with values, each of which has a name of its own.
    """
    first, second = ({place: value for place, value in leaves(tree) if value != {}} for tree in (a, b))
    places = sorted(first.keys() | second.keys(), key=dotted)
    pairs = {place: (first.get(place), second.get(place)) for place in places if place}
    return {dotted(place): pair for place, pair in pairs.items() if pair[0] != pair[1]}
