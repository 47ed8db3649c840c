"""The sections of params.yaml that ``data.task`` and ``model.name`` choose between."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, PositiveInt, Tag

from samebits.section import Section, as_tuple

# -- data ---------------------------------------------------------------------------------------------------


class VectorsKwargs(Section):
    """Widths of the ``vectors`` task."""

    features: int = Field(32, ge=1, le=4096)
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
    num_samples: PositiveInt = 40960
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
    """What is subtracted from a byte, see input_scale."""


class FileData(_Data):
    """Training on a user's own arrays."""

    task: Literal["file"]
    """The user's own arrays."""
    kwargs: FileKwargs
    """Which files they are in."""


def _with_default_task(value: object) -> object:
    return {"task": "vectors", **value} if isinstance(value, dict) else value


Data = Annotated[
    VectorsData | RegressionData | ImagesData | TokensData | FileData,
    Field(discriminator="task"),
    BeforeValidator(_with_default_task),
]


# -- model --------------------------------------------------------------------------------------------------


class MLPKwargs(Section):
    """Hidden widths and dropout of ``mlp`` and ``wide_mlp``; None takes the model's own widths."""

    hidden: Annotated[tuple[PositiveInt, ...], BeforeValidator(as_tuple)] | None = None
    """Hidden widths; null takes the model's own, [384, 256] for mlp and [4096, 4096] for wide_mlp."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Probability of dropping a hidden unit."""


class ConvNetKwargs(Section):
    """Channels of the first stage and residual blocks in each of the three stages."""

    width: int = Field(16, ge=4, multiple_of=4)
    """Channels of the first stage; doubled in the second and again in the third."""
    blocks: PositiveInt = 1
    """Residual blocks in each of the three stages."""


class GPTKwargs(Section):
    """Depth, heads, width and dropout of ``gpt``."""

    layers: PositiveInt = 2
    """Decoder blocks."""
    heads: PositiveInt = 2
    """Attention heads; they divide the width."""
    width: PositiveInt = 64
    """Width of the residual stream."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Probability of dropout."""


class _Builtin(Section):
    source: None = None
    """Null for a built-in model."""


class MLPModel(_Builtin):
    """The two perceptrons."""

    name: Literal["mlp", "wide_mlp"] = "mlp"
    """Which model."""
    kwargs: MLPKwargs = MLPKwargs()
    """Arguments of the model."""


class ConvNetModel(_Builtin):
    """The small residual net."""

    name: Literal["convnet"]
    """Which model."""
    kwargs: ConvNetKwargs = ConvNetKwargs()
    """Arguments of the model."""


class GPTModel(_Builtin):
    """The small decoder."""

    name: Literal["gpt"]
    """Which model."""
    kwargs: GPTKwargs = GPTKwargs()
    """Arguments of the model."""


class UserModel(Section):
    """A factory of the user's own; what it imports is found, and ``source`` adds a file or folder to it."""

    name: str
    """package.module:factory, importable from the repository's root."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """What the factory is called with; it also gets ``card=`` if it has such a parameter."""
    source: str | None = None
    """Null, or a file or folder that holds the factory, all of whose files retrain when they are edited."""


FACTORY = "package.module:factory"


def _model_tag(value: object) -> str:
    """A built-in model's tag is its name."""
    name = str(value.get("name", "mlp") if isinstance(value, dict) else getattr(value, "name", "mlp"))
    return FACTORY if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name) else name


Model = Annotated[
    Annotated[MLPModel, Tag("mlp")]
    | Annotated[MLPModel, Tag("wide_mlp")]
    | Annotated[ConvNetModel, Tag("convnet")]
    | Annotated[GPTModel, Tag("gpt")]
    | Annotated[UserModel, Tag(FACTORY)],
    Discriminator(_model_tag),
]
