"""Labels, notes and reasons in words: a record keeps their kinds and figures alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, assert_never

from samebits.errors import counted, few
from samebits.files import Part
from samebits.records.remarks import (
    AnyOrder,
    BatchNorm,
    Fallback,
    FewerDevices,
    IdleParameters,
    Missing,
    MissingKind,
    OneDevice,
    Oversubscribed,
    Prolonged,
    Resumed,
    Ring,
    Unrepeated,
    UnusedDevices,
)
from samebits.records.statistics import NARROW

if TYPE_CHECKING:
    from collections.abc import Iterable

    from samebits.records.remarks import Label, NotAppliedKind, Note, Reason
    from samebits.records.run import RunRecord

LabelKind = Literal[
    "fallback",
    "oversubscribed",
    "one_device",
    "unused_devices",
    "noisy",
    "disturbed",
    "not_repeatable",
    "different_start",
    "any_order",
    "different_hosts",
    "one_machine",
]
"""Those that a training gives itself, and those that only a comparison can."""

NoteKind = Literal["fewer_devices", "batch_norm", "idle_parameters", "resumed", "ring", "prolonged", "unrepeated"]

LABELS: dict[LabelKind, str] = {
    "fallback": "PyTorch ran the plain module, as `single` does. Nothing was parallel, no speed-up is claimed, and no "
    "slices were timed.",
    "oversubscribed": "Several workers shared one device. This shows that the strategy works, not what it gains.",
    "one_device": "One device was used, so there was nothing to share the work with.",
    "unused_devices": "Some devices got no samples, because DataParallel cuts a batch into equal chunks.",
    "noisy": "Repeats differed by more than 15%, or the speed-up could not be told within 5%, often because something "
    "else used the host. Seconds are uncertain; paired speed-ups are less so, as their interval shows.",
    "disturbed": "A device was slowed down, or others used it too. Its figures may be lower than without that.",
    "different_start": "It began from other weights than the run it is compared with, so it is another training.",
    "different_hosts": "The slowest machine sets the pace of all; a figure holds for this mixture alone.",
    "one_machine": "More machines of this kind would not share cores and memory.",
    "any_order": "train.ddp.deterministic is false, so NCCL may add gradients in another order each time.",
    "not_repeatable": "Training again on this host gave other losses: an operation of the model is not deterministic.",
}
"""What each label means for a reader."""

NOT_APPLIED: dict[NotAppliedKind, str] = {
    "exact_is_not_compiled": "a compiler may fuse what the exact numerics round apart",
    "exact_is_fp32": "the exact numerics compute in float32 precision",
    "dp_is_not_compiled": "torch.compile is not combined with DataParallel",
    "no_tf32_on_cpu": "tf32 is a mode of NVIDIA GPUs; float32 was used",
    "gpu_before_tf32": "this GPU is older than tf32 (compute capability 8.0); float32 was used",
    "graphs_in_exact": "the exact numerics look at values while a step runs",
    "graphs_under_dp": "DataParallel makes new replicas at each step, and a graph is of one module's memory",
    "graphs_on_cpu": "CUDA graphs are of NVIDIA GPUs",
    "graphs_with_compile": "torch.compile makes kernels of its own, and the two are not combined",
    "graphs_with_accumulation": "a replay writes its gradients over those of the micro-batch before",
    "static_graph_with_accumulation": "PyTorch cannot combine it with gradient accumulation",
    "adamw_has_no_momentum": "AdamW has no momentum setting",
    "single_has_one_device": "single always uses one device",
}
"""Why a setting does nothing."""

_MISSING: dict[MissingKind, str] = {
    "one_repeat": "train.repeats is 1",
    "one_pair": "one pair of times tells no interval, and train.repeats and train.prolong_s allow no more",
    "no_memory": "the references do not fit on one device beside the training",
    "no_memory_left": "memory ran out in the slices after the training",
    "not_measured": "it was not measured",
    "not_ended": "what comes after the training did not end",
}


class SpokenRemark(Part):
    """A remark in words."""

    kind: LabelKind | NoteKind | MissingKind
    text: str


def spoken(kind: str) -> str:
    """A kind of label, note or reason as words."""
    return kind.replace("_", " ")


def in_words(remark: Label | Note | Reason) -> SpokenRemark:
    """A remark of a record, with its sentence."""
    return SpokenRemark(kind=remark.kind, text=say(remark))


def say(remark: Label | Note | Reason) -> str:
    """The sentence of a remark, without a full stop."""
    match remark:
        case Fallback(gpus=gpus):
            why = "one GPU is used" if gpus else "no CUDA device is visible"
            return f"{why}, so DataParallel ran the plain module on one device"
        case OneDevice(strategy=None):
            return "one device was used"
        case OneDevice(strategy=strategy):
            return f"{strategy} ran with a world size of 1: one process, nothing to reduce"
        case Oversubscribed(workers=workers, devices=devices, device=device, node=node):
            return f"{workers} workers share {counted(devices, device)}" + (f" of {node}" if node else "")
        case UnusedDevices(units=units, unit=unit, chunks=chunks, devices=devices):
            idle = f"{devices - chunks} of {devices} devices get none"
            return f"DataParallel cuts {units} {unit} into {chunks} chunks, so {idle}"
        case AnyOrder():
            return "NCCL chose its algorithm, so a repeat may give other bits"
        case FewerDevices(devices=devices, available=available, units=units, unit=unit, nodes=nodes):
            used = f"{devices} of {available} devices"
            if nodes > 1:
                return f"{used}, as {units} {unit} are shared out equally"
            return f"{used}, the most that divide {units} {unit} equally"
        case BatchNorm(devices=devices, strategy=strategy):
            kept = "the first device" if strategy == "dp" else "rank 0"
            return (
                f"BatchNorm: each of {devices} devices normalises by its own part of the batch, and the running "
                f"statistics of {kept} are kept, so the model differs from single; GroupNorm does not have this"
            )
        case IdleParameters(names=names):
            return (
                f"no gradient reaches {few(names)}: ranks, as those of ddp, would wait for it, and under dp weight "
                "decay changes it"
            )
        case Resumed(steps=steps, elsewhere=elsewhere):
            after = ", ".join(map(str, steps))
            parts = "all parts, some of which had another strategy or other devices" if elsewhere else "all parts"
            return f"the training was stopped and continued after step {after}; its times are of {parts}"
        case Ring():
            return (
                "NCCL is held to its ring algorithm, so that the run can be repeated; where GPUs share an NVSwitch its "
                "own choice may be faster, with train.ddp.deterministic: false"
            )
        case Unrepeated():
            return (
                "slices were timed once, so the interval does not hold how far such measurements differ; raise "
                "train.repeats or train.prolong_s"
            )
        case Prolonged(planned=planned, count=count, prolonged_seconds=seconds, known=known):
            until = f"until the speed-up was known within {NARROW:.0%}"
            if not known:
                until = f"as often as allowed, and the speed-up is not known within {NARROW:.0%}"
            return f"slices were timed {count} times in place of {planned}, {until} ({seconds:.1f} s more)"
        case Missing(kind=kind):
            return _MISSING[kind]
        case _:
            assert_never(remark)


def say_not_applied(record: RunRecord) -> dict[str, str]:
    """Why settings did nothing in a training, by their names."""
    return {setting: NOT_APPLIED[kind] for setting, kind in record.not_applied.items()}


def say_refused(runs: Iterable[tuple[str, str, str]]) -> list[str]:
    """Of runs that ``exact`` refused, each by its name, the reason and the hint: each reason once."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, text, hint in runs:
        names.setdefault((text, hint), []).append(name)
    return [
        f"Same model in exact numerics: refused, for {', '.join(refused)}: {text}. To get an answer, {hint}."
        for (text, hint), refused in names.items()
    ]
