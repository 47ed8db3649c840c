"""Interface of a synthetic task: its section of params.yaml, and the teacher that draws its samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from pydantic import PositiveInt

from samebits.section import Section

if TYPE_CHECKING:
    from collections.abc import Callable

    from samebits.tasks.teacher import Teacher


class DataSection(Section):
    """The base of the sections; each adds ``task``, the name that chooses it, and ``kwargs``."""

    if TYPE_CHECKING:
        task: str
        kwargs: Any

    is_drawn: ClassVar[bool] = True
    """Whether the kit draws the samples; others are the user's own, and there are so many."""
    num_samples: PositiveInt = 40960
    """Samples of the training split."""
    test_samples: PositiveInt = 8192
    """Samples of the test split."""


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """A synthetic task.

    Its bytes are a function of seed and kwargs alone: integer draws of ``portable.random``, exact integer products in
    float64, and the functions of ``portable.elementary``. NumPy is imported where it is used, so that the command line
    does not wait for it.
    """

    section: type[DataSection]
    teacher: Callable[[int, Any], Teacher]
    """The teacher of a seed and of the section's kwargs."""

    @property
    def name(self) -> str:
        """The name that chooses the task."""
        (name,) = get_args(self.section.model_fields["task"].annotation)
        return str(name)
