"""The synthetic tasks by name, and a user's own data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Union

from pydantic import BeforeValidator, Field, PositiveInt

from samebits.section import Section
from samebits.tasks.images import IMAGES
from samebits.tasks.interface import DataSection
from samebits.tasks.regression import REGRESSION
from samebits.tasks.tokens import TOKENS
from samebits.tasks.vectors import VECTORS

if TYPE_CHECKING:
    from typing import TypeAlias

    from samebits.tasks.interface import TaskSpec

TASKS: dict[str, TaskSpec] = {task.name: task for task in (VECTORS, REGRESSION, IMAGES, TOKENS)}
"""Tasks by name, in the order in which messages list them; the first is the default."""


class FileKwargs(Section):
    """A user's own arrays: each is ``file.npy`` or ``file.safetensors:tensor``, its first axis counts samples."""

    inputs: str = Field(min_length=1)
    """Inputs of a model: floats (made float32), integers (made 64-bit), or bytes (scaled when they are fed)."""
    targets: str = Field(min_length=1)
    """Integers are classes from 0, with cross-entropy; floats are values, with mean squared error."""
    split: str | None = None
    """An array of 0 (training) and 1 (test) for each sample; null: the first rows train, those after them test."""
    classes: PositiveInt | None = None
    """Number of classes; null: one more than the largest."""
    input_scale: float = 1.0
    """Inputs that are bytes are fed as (byte - input_offset) * input_scale."""
    input_offset: float = 0.0
    """What is subtracted from a byte, see input_scale."""


class FileData(DataSection):
    """Training on a user's own arrays."""

    is_drawn = False
    task: Literal["file"]
    """The user's own arrays."""
    kwargs: FileKwargs
    """Which files they are in."""


class NoKwargs(Section):
    """Nothing."""


class DatasetData(DataSection):
    """Training on the datasets of a factory's samebits.Experiment, train_data and test_data."""

    is_drawn = False
    task: Literal["dataset"]
    """Datasets of the user's own, which the factory of model.name returns."""
    kwargs: NoKwargs = NoKwargs()
    """None: the factory has model.kwargs."""


def _with_default_task(value: object) -> object:
    return {"task": next(iter(TASKS)), **value} if isinstance(value, dict) else value


if TYPE_CHECKING:
    Data: TypeAlias = DataSection
else:
    Data = Annotated[
        Union[(*(task.section for task in TASKS.values()), FileData, DatasetData)],
        Field(discriminator="task"),
        BeforeValidator(_with_default_task),
    ]
