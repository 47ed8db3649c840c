"""The ``data`` section of params.yaml."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, PositiveInt, Tag

from samebits.params.section import Section


class VectorsKwargs(Section):
    """Widths of the ``vectors`` task."""

    features: int = Field(128, ge=1, le=4096)
    """Width of an input."""
    classes: int = Field(10, ge=2, le=1024)
    """Classes of a label."""


class RegressionKwargs(Section):
    """Widths of the ``regression`` task."""

    features: int = Field(128, ge=1, le=4096)
    """Width of an input."""
    outputs: int = Field(4, ge=1, le=64)
    """Width of a target."""


class ImagesKwargs(Section):
    """Classes of the ``images`` task and how many labels of a hundred are flipped."""

    classes: int = Field(10, ge=2, le=256)
    """Classes of a label."""
    flip_percent: int = Field(10, ge=1, le=50)
    """Labels of a hundred that are replaced by another class."""


class TokensKwargs(Section):
    """Vocabulary and sequence length of the ``tokens`` task."""

    vocab_size: int = Field(32, ge=2, le=256)
    """Tokens there are."""
    seq_len: int = Field(32, ge=2, le=1024)
    """Tokens of an input."""


class _Data(Section):
    num_samples: PositiveInt = 65536
    """Samples of the training split."""
    test_samples: PositiveInt = 8192
    """Samples of the test split."""


class VectorsData(_Data):
    """Classification of vectors by a noisy linear teacher."""

    task: Literal["vectors"] = "vectors"
    """Which synthetic task."""
    kwargs: VectorsKwargs = VectorsKwargs()
    """Widths of the task."""


class RegressionData(_Data):
    """Regression on a linear teacher with noise of known variance."""

    task: Literal["regression"]
    """Which synthetic task."""
    kwargs: RegressionKwargs = RegressionKwargs()
    """Widths of the task."""


class ImagesData(_Data):
    """Classification of 3x32x32 images with flipped labels."""

    task: Literal["images"]
    """Which synthetic task."""
    kwargs: ImagesKwargs = ImagesKwargs()
    """Widths of the task."""


class TokensData(_Data):
    """Next-token prediction on a Markov source."""

    task: Literal["tokens"]
    """Which synthetic task."""
    kwargs: TokensKwargs = TokensKwargs()
    """Widths of the task."""


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
    """See input_scale."""


class FileData(_Data):
    """A user's own data."""

    task: Literal["file"]
    """Own data."""
    kwargs: FileKwargs
    """Where it is."""


def _data_tag(value: object) -> str:
    task = value.get("task", "vectors") if isinstance(value, dict) else getattr(value, "task", "vectors")
    return str(task)


Data = Annotated[
    Annotated[VectorsData, Tag("vectors")]
    | Annotated[RegressionData, Tag("regression")]
    | Annotated[ImagesData, Tag("images")]
    | Annotated[TokensData, Tag("tokens")]
    | Annotated[FileData, Tag("file")],
    Discriminator(_data_tag),
]
