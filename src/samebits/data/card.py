"""The data card: what a prepared data set holds, as ``data/card.json``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from samebits.errors import UserError
from samebits.files import read_json

if TYPE_CHECKING:
    from pathlib import Path


class Split(BaseModel):
    """One safetensors file with tensors ``inputs`` and ``targets``.

    ``floor`` and ``teacher_loss`` are the teacher's, in nats or squares; None for a user's own data.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str
    num_samples: int
    sha256: str
    floor: float | None
    teacher_loss: float | None


class Card(BaseModel):
    """Task, shapes without the sample axis, floor and hashes of a data set.

    A model is fed ``(inputs - input_offset) * input_scale`` where the stored inputs are 8-bit. ``floor`` is
    the loss that the teacher expects of itself on the test split; no model can do better but by luck. It is None
    for a user's own data.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    loss: Literal["cross_entropy", "mse"]
    input_shape: tuple[int, ...]
    input_dtype: Literal["float32", "int64", "uint8"]
    input_scale: float
    input_offset: float
    target_shape: tuple[int, ...]
    target_dtype: Literal["float32", "int64"]
    num_classes: int | None
    floor: float | None
    sha256: str
    train: Split
    test: Split

    @property
    def output_shape(self) -> tuple[int, ...]:
        """What a model must return for one sample."""
        return self.target_shape if self.num_classes is None else (*self.target_shape, self.num_classes)


def read_card(path: Path) -> Card:
    """Read a card.

    Raises:
        UserError: it is missing or not a card; the hint says how to make it.
    """
    raw = read_json(path, made_by="python pipeline/prepare.py")
    try:
        return Card.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path}: {where}: {first['msg']}", hint="run `python pipeline/prepare.py` again") from None
