"""The keys of params.yaml as typed, frozen objects."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Tag,
)

StrategyName = Literal["single", "dp", "ddp"]
NumericsName = Literal["fast"]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]


class Section(BaseModel):
    """A frozen part of params.yaml that refuses unknown keys and silent conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _as_tuple(value: object) -> object:
    """Take a YAML list as a tuple, so that the frozen objects are hashable."""
    return tuple(value) if isinstance(value, list) else value


def _distinct(value: object) -> object:
    if isinstance(value, list) and len({str(item) for item in value}) < len(value):
        raise ValueError("a list without repeats")
    return _as_tuple(value)


def _auto_or_count(value: object) -> object:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise ValueError("'auto' or an integer from 1")


# -- data ---------------------------------------------------------------------------------------------------


class VectorsKwargs(Section):
    """Widths of the ``vectors`` task."""

    features: int = Field(128, ge=1, le=4096)
    classes: int = Field(10, ge=2, le=1024)


class RegressionKwargs(Section):
    """Widths of the ``regression`` task."""

    features: int = Field(128, ge=1, le=4096)
    outputs: int = Field(4, ge=1, le=64)


class ImagesKwargs(Section):
    """Classes of the ``images`` task and how many labels of a hundred are flipped."""

    classes: int = Field(10, ge=2, le=256)
    flip_percent: int = Field(10, ge=1, le=50)


class TokensKwargs(Section):
    """Vocabulary and sequence length of the ``tokens`` task."""

    vocab_size: int = Field(32, ge=2, le=256)
    seq_len: int = Field(32, ge=2, le=1024)


class _Data(Section):
    num_samples: PositiveInt = 65536
    test_samples: PositiveInt = 8192


class VectorsData(_Data):
    """Classification of vectors by a noisy linear teacher."""

    task: Literal["vectors"] = "vectors"
    kwargs: VectorsKwargs = VectorsKwargs()


class RegressionData(_Data):
    """Regression on a linear teacher with noise of known variance."""

    task: Literal["regression"]
    kwargs: RegressionKwargs = RegressionKwargs()


class ImagesData(_Data):
    """Classification of 3x32x32 images with flipped labels."""

    task: Literal["images"]
    kwargs: ImagesKwargs = ImagesKwargs()


class TokensData(_Data):
    """Next-token prediction on a Markov source."""

    task: Literal["tokens"]
    kwargs: TokensKwargs = TokensKwargs()


def _data_tag(value: object) -> str:
    task = value.get("task", "vectors") if isinstance(value, dict) else getattr(value, "task", "vectors")
    return str(task)


Data = Annotated[
    Annotated[VectorsData, Tag("vectors")]
    | Annotated[RegressionData, Tag("regression")]
    | Annotated[ImagesData, Tag("images")]
    | Annotated[TokensData, Tag("tokens")],
    Discriminator(_data_tag),
]


# -- model --------------------------------------------------------------------------------------------------


class MLPKwargs(Section):
    """Hidden widths and dropout of ``mlp`` and ``wide_mlp``; None takes the model's own widths."""

    hidden: Annotated[tuple[PositiveInt, ...], BeforeValidator(_as_tuple)] | None = None
    dropout: float = Field(0.0, ge=0.0, lt=1.0)


class ConvNetKwargs(Section):
    """Channels of the first stage and residual blocks in each of the three stages."""

    width: int = Field(16, ge=4, multiple_of=4)
    blocks: PositiveInt = 1


class GPTKwargs(Section):
    """Size of the decoder."""

    layers: PositiveInt = 2
    heads: PositiveInt = 2
    width: PositiveInt = 64
    dropout: float = Field(0.0, ge=0.0, lt=1.0)


class _Builtin(Section):
    source: None = None


class MLPModel(_Builtin):
    """The two perceptrons."""

    name: Literal["mlp", "wide_mlp"] = "mlp"
    kwargs: MLPKwargs = MLPKwargs()


class ConvNetModel(_Builtin):
    """The small residual net."""

    name: Literal["convnet"]
    kwargs: ConvNetKwargs = ConvNetKwargs()


class GPTModel(_Builtin):
    """The small decoder."""

    name: Literal["gpt"]
    kwargs: GPTKwargs = GPTKwargs()


class UserModel(Section):
    """A factory of the user's own; ``source`` is its file or folder."""

    name: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    kwargs: dict[str, Any] = Field(default_factory=dict)
    source: str


def _model_tag(value: object) -> str:
    name = value.get("name", "mlp") if isinstance(value, dict) else getattr(value, "name", "mlp")
    if isinstance(name, str) and ":" in name:
        return "user"
    return {"mlp": "mlp", "wide_mlp": "mlp", "convnet": "convnet", "gpt": "gpt"}.get(str(name), "")


Model = Annotated[
    Annotated[MLPModel, Tag("mlp")]
    | Annotated[ConvNetModel, Tag("convnet")]
    | Annotated[GPTModel, Tag("gpt")]
    | Annotated[UserModel, Tag("user")],
    Discriminator(_model_tag),
]


# -- train --------------------------------------------------------------------------------------------------


class Optimizer(Section):
    """The optimizer; ``momentum`` concerns ``sgd`` alone."""

    name: Literal["sgd", "adamw"] = "sgd"
    lr: PositiveFloat = 0.1
    momentum: float = Field(0.9, ge=0.0, lt=1.0)
    weight_decay: NonNegativeFloat = 0.0


class Schedule(Section):
    """The learning rate over the steps; a linear warm-up comes first."""

    name: Literal["constant", "cosine"] = "cosine"
    warmup_steps: NonNegativeInt = 0


class DDPOptions(Section):
    """Flags handed to ``DistributedDataParallel``."""

    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    bucket_cap_mb: int = Field(25, ge=1, le=1024)


class Train(Section):
    """How the model is trained and how that is timed."""

    strategies: Annotated[tuple[StrategyName, ...], BeforeValidator(_distinct)] = Field(
        ("single", "dp", "ddp"), min_length=1
    )
    numerics: Annotated[tuple[NumericsName, ...], BeforeValidator(_distinct)] = Field(("fast",), min_length=1)
    num_devices: Annotated[Literal["auto"] | int, BeforeValidator(_auto_or_count)] = "auto"
    oversubscribe: bool = False
    global_batch_size: PositiveInt = 256
    grad_accum_steps: PositiveInt = 1
    epochs: PositiveInt = 2
    precision: Precision = "fp32"
    compile: bool = False
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    clip_grad_norm: PositiveFloat | None = None
    ddp: DDPOptions = DDPOptions()
    timeout_s: int = Field(120, ge=1, le=86400)
    repeats: int = Field(3, ge=1, le=100)


class Tracking(Section):
    """Where runs are recorded."""

    experiment: str = Field("samebits", min_length=1)


class Params(Section):
    """The whole of params.yaml."""

    seed: int = Field(0, ge=0, lt=2**63)
    data: Data = VectorsData()
    model: Model = MLPModel()
    train: Train = Train()
    tracking: Tracking = Tracking()

    @property
    def steps_per_epoch(self) -> int:
        """Whole global batches in the training split; the rest of an epoch's order is left out."""
        return self.data.num_samples // self.train.global_batch_size

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole training."""
        return self.steps_per_epoch * self.train.epochs
