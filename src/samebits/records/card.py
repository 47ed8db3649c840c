"""The data card ``data/card.json``, which describes a prepared dataset."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from samebits.errors import UserError
from samebits.files import Part, read_json
from samebits.hashes import sha256
from samebits.here import stage_command
from samebits.params import differences

if TYPE_CHECKING:
    from pathlib import Path

    from samebits.params import Params


class DataSplit(Part):
    """One safetensors file with tensors ``inputs`` and ``targets``.

    ``floor`` and ``teacher_loss`` are the teacher's losses, in nats or squared units; None for a user's own data.
    """

    file: str = Field(pattern=r"^\w[\w.-]*$")  # beside the card
    num_samples: int
    sha256: str
    floor: float | None
    teacher_loss: float | None


class Card(Part):
    """Task, shapes without the sample axis, floor and hashes of a dataset.

    Of a user's datasets, which are opened by trainings alone, it has the number of samples and no more. ``loss`` is
    then ``own``: the user's or the model's.

    A model gets ``(inputs - input_offset) * input_scale`` if the stored inputs are 8-bit. ``floor`` is the teacher's
    expected loss on the test split, which a model can only beat by luck; None for a user's own data. ``made_from`` is
    the params that determine the data. ``sha256`` covers both files, and ``fields_sha256`` all other fields.
    """

    task: str
    made_from: dict[str, Any]
    loss: Literal["cross_entropy", "mse", "own"]
    input_shape: tuple[int, ...]
    input_dtype: Literal["float32", "int64", "uint8", "unknown"]
    input_scale: float
    input_offset: float
    target_shape: tuple[int, ...]
    target_dtype: Literal["float32", "int64", "unknown"]
    num_classes: int | None
    floor: float | None
    sha256: str
    train: DataSplit
    test: DataSplit
    fields_sha256: str

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a model's output for one sample has this shape, as far as the number of classes is known."""
        if self.loss == "mse":
            return shape == self.target_shape
        return bool(shape) and shape[:-1] == self.target_shape and self.num_classes in (None, shape[-1])

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of a model's output for one sample; of an unknown number of classes without their axis."""
        return self.target_shape if self.num_classes is None else (*self.target_shape, self.num_classes)


def signed_card(**fields: Any) -> Card:
    """A card of these fields, with its two hashes."""
    card = Card.model_validate({**fields, "sha256": "", "fields_sha256": ""})
    card = card.model_copy(update={"sha256": _digest_of_files(card)})
    return card.model_copy(update={"fields_sha256": _digest(card)})


def card_for(file: Path, card: Card) -> Card:
    """The card after a change of one ``file``, with new hashes."""
    split = "train" if file.name == card.train.file else "test"
    return signed_card(**{**dict(card), split: getattr(card, split).model_copy(update={"sha256": sha256(file)})})


def read_card(path: Path, params: Params | None = None) -> Card:
    """Read a card.

    Raises:
        UserError: it is missing, damaged or not a card, or its data were made from other ``params``.
    """
    made_by = stage_command("prepare")
    hint = f"run `{made_by}` again"
    card = Card.parse(read_json(path, made_by=made_by), path, made_by=made_by)
    if card.fields_sha256 != _digest(card) or card.sha256 != _digest_of_files(card):
        raise UserError(f"{path}: not as it was written: another SHA-256", hint=hint)
    if params:
        for key, (was, now) in differences(card.made_from, params.data_identity).items():
            raise UserError(f"{path}: the data were made with {key} = {was}, and params say {now}", hint=hint)
    return card


def _digest_of_files(card: Card) -> str:
    return hashlib.sha256(f"{card.train.sha256}{card.test.sha256}".encode()).hexdigest()


def _digest(card: Card) -> str:
    fields = card.model_dump(mode="json", exclude={"fields_sha256"})
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
