"""Remarks on a training: classes with kind, figures and sentence. No record keeps sentences, so they may change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field

from samebits.errors import counted, few
from samebits.files import Part


class Remark(Part):
    """A remark. ``SAYS`` is its sentence with the names of its figures."""

    SAYS: ClassVar[str] = ""

    def sentence(self) -> str:
        """The sentence without a full stop."""
        return self.SAYS.format_map(dict(self))


class LabelOf(Remark):
    """A label, which a reader must know for a result. ``MEANS`` says what follows from it."""

    MEANS: ClassVar[str]


# -- labels that a training gives itself ------------------------------------------------------------------------


class Fallback(LabelOf):
    """DataParallel ran the plain module, on one GPU of ``gpus`` or on none."""

    MEANS: ClassVar[str] = (
        "PyTorch ran the plain module, as `single` does. Nothing was parallel, no speed-up is claimed, and no slices "
        "were timed."
    )
    kind: Literal["fallback"] = "fallback"
    gpus: int

    def sentence(self) -> str:
        why = "one GPU is used" if self.gpus else "no CUDA device is visible"
        return f"{why}, so DataParallel ran the plain module on one device"


class Oversubscribed(LabelOf):
    """Workers shared devices, CPU cores or GPUs. ``node`` is the machine, if there are several."""

    MEANS: ClassVar[str] = "Several workers shared one device. This shows that the strategy works, not what it gains."
    kind: Literal["oversubscribed"] = "oversubscribed"
    workers: int
    devices: int
    device: str
    node: str | None = None

    def sentence(self) -> str:
        where = f" of {self.node}" if self.node else ""
        return f"{self.workers} workers share {counted(self.devices, self.device)}{where}"


class OneDevice(LabelOf):
    """There was only one device. ``strategy`` is named if it ran as one process all the same."""

    MEANS: ClassVar[str] = "One device was used, so there was nothing to share the work with."
    kind: Literal["one_device"] = "one_device"
    strategy: str | None = None

    def sentence(self) -> str:
        told = f"{self.strategy} ran with a world size of 1: one process, nothing to reduce"
        return told if self.strategy else "one device was used"


class UnusedDevices(LabelOf):
    """DataParallel cut ``units`` samples or shards into fewer chunks than there are devices."""

    MEANS: ClassVar[str] = "Some devices got no samples, because DataParallel cuts a batch into equal chunks."
    kind: Literal["unused_devices"] = "unused_devices"
    units: int
    unit: str
    chunks: int
    devices: int

    def sentence(self) -> str:
        idle = f"{self.devices - self.chunks} of {self.devices} devices get none"
        return f"DataParallel cuts {self.units} {self.unit} into {self.chunks} chunks, so {idle}"


class AnyOrder(LabelOf):
    """NCCL chose the order in which gradients are added."""

    MEANS: ClassVar[str] = "train.ddp.deterministic is false, so NCCL may add gradients in another order each time."
    SAYS: ClassVar[str] = "NCCL chose its algorithm, so a repeat may give other bits"
    kind: Literal["any_order"] = "any_order"


# -- notes ------------------------------------------------------------------------------------------------------


class FewerDevices(Remark):
    """Fewer devices were used, so that each gets as many of ``units`` samples or shards."""

    kind: Literal["fewer_devices"] = "fewer_devices"
    devices: int
    available: int
    units: int
    unit: str
    nodes: int = 1

    def sentence(self) -> str:
        what = f"{self.units} {self.unit}"
        why = f"as {what} are shared out equally" if self.nodes > 1 else f"the most that divide {what} equally"
        if self.unit == "shards":
            why = f"at most one for each of the {self.units} shards of exact.shards"
        return f"{self.devices} of {self.available} devices, {why}"


class BatchNorm(Remark):
    """Each device normalises by its own part of the batch, or under ``exact`` each shard by its ``samples``.

    ``difference`` is how much the loss of two shards differs from that of both as one batch, relative to the latter.
    """

    HINT: ClassVar[str] = "use nn.GroupNorm, whose result depends on no batch, or in exact exact.batch_norm: global"
    kind: Literal["batch_norm"] = "batch_norm"
    devices: int
    strategy: str
    samples: int = 0
    difference: float | None = None

    def sentence(self) -> str:
        if self.samples:
            text = f"BatchNorm: each shard normalises by its own {counted(self.samples, 'sample')}, on whatever devices"
            more = f"; as one batch, two of them have a loss that differs by {self.difference or 0:.2g} before training"
            return text if self.difference is None else text + more
        return (
            f"BatchNorm: each of {self.devices} devices normalises by its own part of the batch, and the running "
            "statistics of the first are kept, so the model differs from single; GroupNorm does not have this"
        )


class BatchLoss(Remark):
    """The loss is one number for several samples, and gets only a part of a batch at a time."""

    HINT: ClassVar[str] = 'return a loss for each sample, as with reduction="none"'
    SAYS: ClassVar[str] = "the loss is one number for several samples: the {samples} of a {part}, in a batch of {batch}"
    kind: Literal["batch_loss"] = "batch_loss"
    part: Literal["device", "micro-batch", "shard"]
    samples: int
    batch: int


class MixedSamples(Remark):
    """Forward mixes the samples that it gets, beside BatchNorm.

    ``difference`` is how much losses change when half of the samples are left out, relative to the largest.
    """

    HINT: ClassVar[str] = "compute each sample by itself"
    SAYS: ClassVar[str] = (
        "the model mixes the samples of a batch, of which each {part} gets a part of its own: beside fewer samples, "
        "the losses of the same ones differ by {difference:.2g} before training"
    )
    kind: Literal["mixed_samples"] = "mixed_samples"
    part: Literal["device", "shard"]
    difference: float


class IdleParameters(Remark):
    """Parameters that get no gradient."""

    HINT: ClassVar[str] = "use it in forward, or set its requires_grad to False"
    kind: Literal["idle_parameters"] = "idle_parameters"
    names: tuple[str, ...]

    def sentence(self) -> str:
        return (
            f"no gradient reaches {few(self.names)}: ranks, as those of ddp, would wait for it, and under dp weight "
            "decay changes it"
        )


class Resumed(Remark):
    """The training was stopped and resumed after each of ``steps``, ``elsewhere`` under another strategy or host."""

    kind: Literal["resumed"] = "resumed"
    steps: tuple[int, ...]
    elsewhere: bool = False

    def sentence(self) -> str:
        after = ", ".join(map(str, self.steps))
        parts = "all parts, some of which had another strategy or other devices" if self.elsewhere else "all parts"
        return f"the training was stopped and continued after step {after}; its times are of {parts}"


class Ring(Remark):
    """NCCL was limited to its ring algorithm."""

    SAYS: ClassVar[str] = (
        "NCCL is held to its ring algorithm, so that the run can be repeated; where GPUs share an NVSwitch its own "
        "choice may be faster, with train.ddp.deterministic: false"
    )
    kind: Literal["ring"] = "ring"


class Prolonged(Remark):
    """Slices were timed ``count`` times instead of ``planned``, until the figure was known or a limit was reached."""

    kind: Literal["prolonged"] = "prolonged"
    planned: int
    count: int
    prolonged_seconds: float
    known: bool

    def sentence(self) -> str:
        # a test compares the 5% with ``records.statistics``
        known = "until the speed-up was known within 5%"
        until = known if self.known else "as often as allowed, and the speed-up is not known within 5%"
        more = f"({self.prolonged_seconds:.1f} s more)"
        return f"slices were timed {self.count} times in place of {self.planned}, {until} {more}"


class Unrepeated(Remark):
    """Slices were timed once, which does not show how far such measurements differ."""

    SAYS: ClassVar[str] = (
        "slices were timed once, so the interval does not hold how far such measurements differ; raise train.repeats "
        "or train.prolong_s"
    )
    kind: Literal["unrepeated"] = "unrepeated"


# -- why a figure is missing, or a setting does nothing ---------------------------------------------------------

MISSING = {
    "one_repeat": "train.repeats is 1",
    "one_pair": "one pair of times tells no interval, and train.repeats and train.prolong_s allow no more",
    "no_memory": "the references do not fit on one device beside the training",
    "no_memory_left": "memory ran out in the slices after the training",
    "not_measured": "it was not measured",
    "not_ended": "what comes after the training did not end",
}
"""Reasons for a missing figure that have no figures of their own."""

NOT_APPLIED = {
    "exact_is_not_compiled": "a compiler may fuse what the exact numerics round apart",
    "exact_is_fp32": "the exact numerics compute in float32 precision",
    "dp_is_not_compiled": "torch.compile is not combined with DataParallel",
    "no_tf32_on_cpu": "tf32 is a mode of NVIDIA GPUs; float32 was used",
    "gpu_before_tf32": "this GPU is older than tf32 (compute capability 8.0); float32 was used",
    "graphs_under_dp": "DataParallel makes new replicas at each step, and a graph is of one module's memory",
    "graphs_on_cpu": "CUDA graphs are of NVIDIA GPUs",
    "graphs_with_compile": "torch.compile makes kernels of its own, and the two are not combined",
    "graphs_with_sync": "BatchNorm over the whole batch waits for other ranks within a pass",
    "sync_on_cpu": "PyTorch's SyncBatchNorm is of GPUs; each rank normalised by its own part of the batch",
    "graphs_with_accumulation": "a replay writes its gradients over those of the micro-batch before",
    "static_graph_with_accumulation": "PyTorch cannot combine it with gradient accumulation",
    "adamw_has_no_momentum": "AdamW has no momentum setting",
    "momentum_of_sgd_alone": "only sgd takes it; train.optimizer.kwargs may have one for another optimizer",
    "single_has_one_device": "single always uses one device",
}
"""Reasons why a setting has no effect."""

if TYPE_CHECKING:
    MissingKind: TypeAlias = str
    NotAppliedKind: TypeAlias = str
else:
    MissingKind, NotAppliedKind = (Literal[tuple(reasons)] for reasons in (MISSING, NOT_APPLIED))


class Missing(Remark):
    """The reason for a missing figure, from ``MISSING``."""

    kind: MissingKind

    def sentence(self) -> str:
        return MISSING[self.kind]


ModelNote = BatchNorm | BatchLoss | MixedSamples | IdleParameters
"""A note on the model, from a training's first step."""

Label = Annotated[Fallback | Oversubscribed | OneDevice | UnusedDevices | AnyOrder, Field(discriminator="kind")]
"""A label that a training itself can give."""

Note = Annotated[FewerDevices | ModelNote | Resumed | Ring | Prolonged | Unrepeated, Field(discriminator="kind")]
"""A note on a training, which a reader may want to know."""

Reason = Annotated[Fallback | Oversubscribed | OneDevice | Missing, Field(discriminator="kind")]
"""Why a figure is missing: a label that explains it, or just the reason."""
