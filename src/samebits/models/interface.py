"""Interface of a built-in model: its section of params.yaml, the data that it fits, and how it is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, get_args

from samebits.section import Section

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn

Contradiction = tuple[str, object, str, str]
"""Key, value, accepted values, and hint."""


class BuiltinModel(Section):
    """The base of the sections; each adds ``name``, the names that choose it, and ``kwargs``."""

    if TYPE_CHECKING:
        name: str
        kwargs: Section

    source: None = None
    """Null for a built-in model."""


class DataShape(Protocol):
    """Shapes and types of a model's data, as on the card."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one sample."""

    @property
    def input_dtype(self) -> str:
        """Of what is stored: float32, int64, or uint8, which is fed as float32."""

    @property
    def target_shape(self) -> tuple[int, ...]:
        """Of one sample's targets."""

    @property
    def num_classes(self) -> int | None:
        """None where targets are real numbers."""

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Of what the model returns for one sample."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A built-in model."""

    section: type[BuiltinModel]
    tasks: tuple[str, ...]
    """Synthetic tasks that it fits; the first feeds it where a program chooses the data."""
    needs: str
    """Its accepted data in words; ``fits`` checks a card."""
    fits: Callable[[DataShape], bool]
    build: Callable[[Any, DataShape], nn.Module]
    """The untrained module of a section, for the data of a card."""
    contradictions: Callable[[Any], Iterable[Contradiction]] = lambda _: ()
    """Settings of a section that are valid alone but not together."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names that choose it."""
        names: tuple[str, ...] = get_args(self.section.model_fields["name"].annotation)
        return names
