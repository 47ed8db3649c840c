"""The keys of params.yaml as typed, frozen objects."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Tag,
)

from samebits.params.data import Data, VectorsData
from samebits.params.section import Section

StrategyName = Literal["single", "dp", "ddp"]
NumericsName = Literal["fast", "exact"]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]


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


# -- model --------------------------------------------------------------------------------------------------


class MLPKwargs(Section):
    """Hidden widths and dropout of ``mlp`` and ``wide_mlp``; None takes the model's own widths."""

    hidden: Annotated[tuple[PositiveInt, ...], BeforeValidator(_as_tuple)] | None = None
    """Hidden widths; null takes the model's own, [256, 128] for mlp and [4096, 4096] for wide_mlp."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Probability of dropping a hidden unit."""


class ConvNetKwargs(Section):
    """Channels of the first stage and residual blocks in each of the three stages."""

    width: int = Field(16, ge=4, multiple_of=4)
    """Channels of the first stage; doubled in the second and again in the third."""
    blocks: PositiveInt = 1
    """Residual blocks in each of the three stages."""


class GPTKwargs(Section):
    """Size of the decoder."""

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
    """A factory of the user's own; ``source`` is its file or folder."""

    name: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """package.module:factory, importable from the repository's root."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """What the factory is called with; it also gets ``card=`` if it has such a parameter."""
    source: str
    """File or folder of the factory, so that an edit retrains."""


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


def _members(union: object) -> dict[str, type[Section]]:
    """The sections of a tagged union, by tag."""
    annotated = (get_args(member) for member in get_args(get_args(union)[0]))
    return {tag.tag: section for section, tag in annotated}


UNIONS = {"data": _members(Data), "model": _members(Model)}
"""Sections that ``data.task`` and ``model.name`` choose between, by tag."""


# -- train --------------------------------------------------------------------------------------------------


class Optimizer(Section):
    """The optimizer; ``momentum`` concerns ``sgd`` alone."""

    name: Literal["sgd", "adamw"] = "sgd"
    """sgd or adamw."""
    lr: PositiveFloat = 0.1
    """Learning rate at the top of the schedule."""
    momentum: float = Field(0.9, ge=0.0, lt=1.0)
    """Of sgd."""
    weight_decay: NonNegativeFloat = 0.0
    """L2 penalty of sgd, decoupled decay of adamw."""


class Schedule(Section):
    """The learning rate over the steps; a linear warm-up comes first."""

    name: Literal["constant", "cosine"] = "cosine"
    """Constant, or a half cosine from lr to near zero."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up before it."""


class DDPOptions(Section):
    """Flags handed to ``DistributedDataParallel``."""

    gradient_as_bucket_view: bool = True
    """Let gradients share memory with the communication buckets."""
    static_graph: bool = False
    """Promise that every step uses the same parameters."""
    bucket_cap_mb: int = Field(25, ge=1, le=1024)
    """Size of a communication bucket in MiB."""


class Train(Section):
    """How the model is trained and how that is timed."""

    strategies: Annotated[tuple[StrategyName, ...], BeforeValidator(_distinct)] = Field(
        ("single", "dp", "ddp"), min_length=1
    )
    """Strategies to run, in this order; ratios are against ``single``."""
    numerics: Annotated[tuple[NumericsName, ...], BeforeValidator(_distinct)] = Field(("fast", "exact"), min_length=1)
    """fast is PyTorch's own arithmetic; exact gives the same bits on any host and number of devices."""
    num_devices: Annotated[Literal["auto"] | int, BeforeValidator(_auto_or_count)] = "auto"
    """Devices of dp and ddp; auto takes all GPUs, or up to two CPU cores, as far as the batch divides."""
    oversubscribe: bool = False
    """Let several workers share a device; labelled, and never counted as a speed-up."""
    global_batch_size: PositiveInt = 256
    """Samples of one optimizer step over all devices."""
    grad_accum_steps: PositiveInt = 1
    """Micro-batches that a step is made of."""
    epochs: PositiveInt = 2
    """Passes over the training split."""
    precision: Precision = "fp32"
    """fp32, or tf32, bf16, fp16 (with a gradient scaler); of fast alone."""
    compile: bool = False
    """torch.compile; of fast alone, and not under dp, where its row says so."""
    optimizer: Optimizer = Optimizer()
    """The optimizer."""
    schedule: Schedule = Schedule()
    """The learning rate over the steps."""
    clip_grad_norm: PositiveFloat | None = None
    """Largest norm of the gradient of all parameters, null for none."""
    ddp: DDPOptions = DDPOptions()
    """Flags of DistributedDataParallel."""
    checkpoint_every_steps: NonNegativeInt = 100
    """Steps between checkpoints from which a stopped training goes on; 0 writes none."""
    timeout_s: int = Field(120, ge=1, le=86400)
    """Seconds that a rank waits for the others before it fails."""
    repeats: int = Field(3, ge=1, le=100)
    """The training, then repeats - 1 timed slices from the initial state."""


class Exact(Section):
    """The exact numerics."""

    shards: int = Field(8, ge=1, le=4096)
    """Logical parts of a global batch, each of which one device takes whole; at least as many as devices."""


class Tracking(Section):
    """Where runs are recorded."""

    experiment: str = Field("samebits", min_length=1)
    """Name of MLflow's experiment."""


class Params(Section):
    """The whole of params.yaml."""

    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the data, the initial weights, the order and dropout."""
    data: Data = VectorsData()
    """What is learnt."""
    model: Model = MLPModel()
    """What learns."""
    train: Train = Train()
    """How the model is trained and timed."""
    exact: Exact = Exact()
    """How the exact numerics cut a batch."""
    tracking: Tracking = Tracking()
    """Where runs are recorded."""

    @property
    def steps_per_epoch(self) -> int:
        """Whole global batches in the training split; the rest of an epoch's order is left out."""
        return self.data.num_samples // self.train.global_batch_size

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole training."""
        return self.steps_per_epoch * self.train.epochs

    def shards(self, numerics: NumericsName) -> int | None:
        """Logical shards of a global batch; None for numerics that have none."""
        return self.exact.shards if numerics == "exact" else None
