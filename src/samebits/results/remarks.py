"""Labels, notes and reasons in words: a record keeps their kinds and values alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from samebits.errors import few
from samebits.files import Part
from samebits.records.remarks import LabelKind, NoteKind, ReasonKind
from samebits.records.statistics import NARROW

if TYPE_CHECKING:
    from collections.abc import Mapping

    from samebits.records.remarks import NotAppliedKind, Remark
    from samebits.records.run import RunRecord

LABELS: dict[LabelKind, str] = {
    "fallback": "PyTorch ran the plain module: nothing was parallel, and no speed-up is claimed.",
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

_ALWAYS_THE_SAME = {
    "any_order": "NCCL chose its algorithm, so a repeat may give other bits",
    "ring": "NCCL is held to its ring algorithm, so that the run can be repeated; where GPUs share an NVSwitch its own "
    "choice may be faster, with train.ddp.deterministic: false",
    "one_repeat": "train.repeats is 1",
    "one_pair": "one pair of times tells no interval, and train.repeats and train.prolong_s allow no more",
    "no_memory": "the references do not fit on one device beside the training",
    "no_memory_left": "memory ran out in the slices after the training",
    "not_measured": "it was not measured",
    "not_ended": "what comes after the training did not end",
}


class SpokenRemark(Part):
    """A remark in words."""

    kind: LabelKind | NoteKind | ReasonKind
    text: str


def spoken(kind: str) -> str:
    """A kind of label, note or reason as words."""
    return kind.replace("_", " ")


def in_words(remark: Remark) -> SpokenRemark:
    """A remark of a record, with its sentence."""
    return SpokenRemark.model_validate({"kind": remark.kind, "text": say(remark)})


def say(remark: Remark) -> str:
    """The sentence of a remark, without a full stop."""
    kind = remark.kind
    return _SENTENCES[kind](remark.values) if kind in _SENTENCES else _ALWAYS_THE_SAME[kind]


def say_not_applied(record: RunRecord) -> dict[str, str]:
    """Why settings did nothing in a training, by their names."""
    return {setting: NOT_APPLIED[kind] for setting, kind in record.not_applied.items()}


def _fallback(values: Mapping[str, Any]) -> str:
    why = "one GPU is used" if values["gpus"] else "no CUDA device is visible"
    return f"{why}, so DataParallel ran the plain module on one device"


def _one_device(values: Mapping[str, Any]) -> str:
    if "strategy" not in values:
        return "one device was used"
    return f"{values['strategy']} ran with a world size of 1: one process, nothing to reduce"


def _oversubscribed(values: Mapping[str, Any]) -> str:
    devices = f"{values['devices']} {values['device']}{'s' if values['devices'] > 1 else ''}"
    return f"{values['workers']} workers share {devices}" + (f" of {values['node']}" if "node" in values else "")


def _unused_devices(values: Mapping[str, Any]) -> str:
    return (
        f"DataParallel cuts {values['units']} {values['unit']} into {values['chunks']} chunks, so "
        f"{values['devices'] - values['chunks']} of {values['devices']} devices get none"
    )


def _fewer_devices(values: Mapping[str, Any]) -> str:
    counted, units = f"{values['devices']} of {values['available']} devices", f"{values['units']} {values['unit']}"
    if values["nodes"] > 1:
        return f"{counted}, as {units} are shared out equally"
    return f"{counted}, the most that divide {units} equally"


def _batch_norm(values: Mapping[str, Any]) -> str:
    kept = "the first device" if values["strategy"] == "dp" else "rank 0"
    return (
        f"BatchNorm: each of {values['devices']} devices normalises by its own part of the batch, and the running "
        f"statistics of {kept} are kept, so the model differs from single; GroupNorm does not have this"
    )


def _idle_parameters(values: Mapping[str, Any]) -> str:
    return f"no gradient reaches {few(values['names'])}; ddp would refuse this model"


def _resumed(values: Mapping[str, Any]) -> str:
    after = ", ".join(map(str, values["steps"]))
    return f"the training was stopped and continued after step {after}; its times are of all parts"


def _prolonged(values: Mapping[str, Any]) -> str:
    known = "as far as allowed"
    if values["stopped"] == "narrow":
        known = f"until the speed-up was known within {NARROW:.0%}"
    return (
        f"the host is noisy: slices were timed {values['count']} times in place of {values['planned']}, {known} "
        f"({values['prolonged_seconds']:.1f} s more)"
    )


_SENTENCES = {
    "fallback": _fallback,
    "one_device": _one_device,
    "oversubscribed": _oversubscribed,
    "unused_devices": _unused_devices,
    "fewer_devices": _fewer_devices,
    "batch_norm": _batch_norm,
    "idle_parameters": _idle_parameters,
    "resumed": _resumed,
    "prolonged": _prolonged,
}
