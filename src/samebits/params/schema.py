"""The keys of params.yaml as typed, frozen objects."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic_core import PydanticCustomError

from samebits.batch_split import BatchSplit
from samebits.models import Model
from samebits.models.mlp import MLPModel
from samebits.section import Affects, Arguments, Effect, Section, as_tuple, effects_of, flatten
from samebits.strategies import StrategyName
from samebits.strategies.ddp import DDPOptions
from samebits.tasks import Data
from samebits.tasks.vectors import VectorsData

NumericsName = Literal["fast", "exact"]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]

OptimizerName = Literal[
    "sgd", "adamw", "adam", "adadelta", "adafactor", "adagrad", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop"
]
"""Optimizers of torch.optim that need one evaluation of the loss in a step, and no sparse gradients."""

ScheduleName = Literal[
    "constant", "cosine", "StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR", "PolynomialLR",
    "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "OneCycleLR",
]  # fmt: skip
"""Schedules of ours and of torch.optim.lr_scheduler, as far as their rates follow from the number of the step."""

_RUNS = Affects("runs")
_ALL = Affects("exact", "fast", "time", "evaluation")
_TRAINING = Affects("exact", "fast", "time")
_FAST = Affects("fast", "time")
_TIME = Affects("time")
_OWN_DEVICES = Affects("devices", "own_devices", "time")


def _each_once(value: object) -> tuple[object, ...]:
    items = as_tuple(value)
    if not items or len({str(item) for item in items}) < len(items):
        raise PydanticCustomError("each_once", "List should have at least one item, and none twice")
    return items


def _auto_or_count(value: object) -> object:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise PydanticCustomError("auto_or_count", "Input should be 'auto' or an integer from 1")


def _lower_case(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


_EACH_ONCE = BeforeValidator(_each_once)


class Optimizer(Section):
    """The optimizer; ``momentum`` concerns ``sgd`` alone."""

    name: Annotated[OptimizerName, BeforeValidator(_lower_case)] = "sgd"
    """One of torch.optim's, in any case."""
    lr: PositiveFloat = 0.5
    """Learning rate at the top of the schedule."""
    momentum: float = Field(0.9, ge=0.0, lt=1.0)
    """Of sgd."""
    weight_decay: NonNegativeFloat = 0.0
    """L2 penalty, or the decoupled decay of adamw."""
    kwargs: Arguments = Field({}, validate_default=True)
    """Further arguments of that optimizer, such as {betas: [0.9, 0.95]} of adamw or {nesterov: true} of sgd."""


class Schedule(Section):
    """The learning rate over the steps; a linear warm-up comes first."""

    name: ScheduleName = "cosine"
    """Constant, a half cosine from lr to near zero, or a class of torch.optim.lr_scheduler."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up before it; fewer than the training has."""
    kwargs: Arguments = Field({}, validate_default=True)
    """Arguments of that class, such as {step_size: 10, gamma: 0.5} of StepLR."""


class Loader(Section):
    """How the samples of a dataset are loaded, by PyTorch's DataLoader; they change no bits."""

    num_workers: NonNegativeInt = 2
    """Processes of each rank that load samples; 0 loads them in the training's own."""
    prefetch_factor: PositiveInt = 2
    """Batches that each of them loads in advance."""


class Train(Section):
    """How the model is trained and how that is timed."""

    strategies: Annotated[tuple[StrategyName, ...], _EACH_ONCE, _RUNS] = ("single", "dp", "ddp")
    """Strategies to run, in this order; ratios are against ``single``."""
    numerics: Annotated[tuple[NumericsName, ...], _EACH_ONCE, _RUNS] = ("fast", "exact")
    """fast is PyTorch's own arithmetic; exact gives the same bits on any host and number of devices."""
    num_devices: Annotated[Literal["auto"] | int, BeforeValidator(_auto_or_count), _OWN_DEVICES] = "auto"
    """Devices of dp and ddp; auto takes all GPUs, or up to two CPU cores, as far as the batch divides."""
    oversubscribe: Annotated[bool, Affects("devices", "time")] = False
    """Let several workers share a device; labelled, and never counted as a speed-up."""
    global_batch_size: Annotated[PositiveInt, Affects("exact", "fast", "time", "evaluation_batch")] = 4096
    """Samples of one optimizer step over all devices; at most data.num_samples."""
    grad_accum_steps: Annotated[PositiveInt, Affects("fast", "time", "evaluation_batch")] = 1
    """Micro-batches that a step is made of; divides global_batch_size."""
    epochs: Annotated[PositiveInt, _TRAINING] = 2
    """Passes over the training split, in whole global batches; what is left over is not used."""
    precision: Annotated[Precision, Affects("fast", "time", "evaluation")] = "fp32"
    """fp32, or tf32, bf16, fp16 (with a gradient scaler); of fast alone."""
    compile: Annotated[bool, _FAST] = False
    """torch.compile; of fast alone, and not under dp, where its row says so."""
    cuda_graphs: Annotated[bool, _FAST] = False
    """Replay forward and backward as CUDA graphs; on GPUs, not under dp, with compile or grad_accum_steps."""
    optimizer: Annotated[Optimizer, _TRAINING] = Optimizer()
    """The optimizer."""
    schedule: Annotated[Schedule, _TRAINING] = Schedule()
    """The learning rate over the steps."""
    clip_grad_norm: Annotated[PositiveFloat | None, _TRAINING] = None
    """Largest norm of the gradient of all parameters, null for none."""
    ddp: Annotated[DDPOptions, _FAST] = DDPOptions()
    """Flags of DistributedDataParallel."""
    loader: Annotated[Loader, _TIME] = Loader()
    """The loading of samples, of data.task: dataset."""
    checkpoint_every_steps: NonNegativeInt = 100
    """Steps between checkpoints from which a stopped training goes on; 0 writes one only when it is asked to stop."""
    timeout_s: int = Field(120, ge=1, le=86400)
    """Seconds that a rank waits for the others before it fails."""
    repeats: Annotated[int, _TIME] = Field(3, ge=1, le=100)
    """The training, then repeats - 1 timed slices from the initial state."""
    prolong_s: Annotated[float, _TIME] = Field(5.0, ge=0.0, le=86400.0)
    """Seconds for more slices on a noisy host, until half the interval of the speed-up is 5% of it; 0 allows none."""

    def why_no_graphs(
        self, device_type: str, batch_norm: Literal["device", "shard", "global"] = "device"
    ) -> Literal["graphs_on_cpu", "graphs_with_compile", "graphs_with_accumulation", "graphs_with_sync"] | None:
        """Why these settings rule out CUDA graphs, with that over which BatchNorm is; None if they do not."""
        if device_type != "cuda":
            return "graphs_on_cpu"
        if self.compile and batch_norm == "device":
            return "graphs_with_compile"
        if batch_norm == "global" or (self.ddp.sync_batchnorm and batch_norm == "device"):
            return "graphs_with_sync"
        # a replay would overwrite the gradients of the previous one: https://github.com/pytorch/pytorch/issues/181723
        return "graphs_with_accumulation" if self.grad_accum_steps > 1 else None


class Exact(Section):
    """How the exact numerics cut a global batch."""

    shards: int = Field(8, ge=1, le=4096)
    """Parts of a global batch, which they divide; one device takes each whole, so there are at least as many."""
    batch_norm: Literal["shard", "global"] = "shard"
    """What BatchNorm normalises by: a shard's samples, or with communication in each pass the whole batch's."""


class Tracking(Section):
    """Under which name MLflow files runs."""

    experiment: str = Field("samebits", min_length=1)
    """Name of MLflow's experiment."""


class Params(Section):
    """The whole of params.yaml."""

    seed: Annotated[int, _ALL] = Field(0, ge=0, lt=2**63)
    """Seed of the data, the initial weights, the order and dropout."""
    data: Annotated[Data, Affects("exact", "fast", "time", "evaluation_batch")] = VectorsData()
    """What is learnt."""
    model: Annotated[Model, _ALL] = MLPModel()
    """What learns."""
    train: Train = Train()
    """How the model is trained and timed."""
    exact: Annotated[Exact, Affects("exact", "time", "evaluation")] = Exact()
    """How the exact numerics cut a batch."""
    tracking: Annotated[Tracking, Affects("tracking")] = Tracking()
    """Where runs are recorded."""

    @property
    def steps_per_epoch(self) -> int:
        """Whole global batches in the training split. An epoch leaves out the remaining samples."""
        return self.data.num_samples // self.train.global_batch_size

    def batch_split(self, numerics: NumericsName) -> BatchSplit:
        """The whole global batch on one device."""
        train, shards = self.train, self.exact.shards if numerics == "exact" else None
        return BatchSplit(samples=train.global_batch_size, shards=shards, grad_accum_steps=train.grad_accum_steps)

    @property
    def data_identity(self) -> dict[str, Any]:
        """The params that determine the bytes of the dataset. A user's own files appear by name, not by content."""
        seed = {"seed": self.seed} if self.data.is_drawn else {}
        return seed | {"data": self.data.model_dump(mode="json")}

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole training."""
        return self.steps_per_epoch * self.train.epochs


def keys_affecting(*effects: Effect) -> tuple[str, ...]:
    """The keys of params.yaml that change one of these effects, in their order. A whole section has one key."""
    return tuple(key for key, changes in effects_of(Params) if changes & {*effects})


def values_affecting(params: Params, *effects: Effect, numerics: NumericsName | None = None) -> dict[str, Any]:
    """The values of these keys by dotted names; with ``numerics``, only of keys that change those numerics' bits."""
    keys = [key for key in keys_affecting(*effects) if numerics is None or key in keys_affecting(numerics)]
    flat = flatten(params.model_dump(mode="json"))
    return {name: value for name, value in flat.items() if any(f"{name}.".startswith(f"{key}.") for key in keys)}
