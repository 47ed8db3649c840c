"""What a reader must or may know of a training, by kind: the words are in ``results.remarks``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from samebits.files import Part

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
NoteKind = Literal["fewer_devices", "batch_norm", "idle_parameters", "resumed", "ring", "prolonged"]
ReasonKind = Literal[
    "fallback",
    "oversubscribed",
    "one_device",
    "one_repeat",
    "one_pair",
    "no_memory",
    "no_memory_left",
    "not_measured",
    "not_ended",
]
NotAppliedKind = Literal[
    "exact_is_not_compiled",
    "exact_is_fp32",
    "dp_is_not_compiled",
    "no_tf32_on_cpu",
    "gpu_before_tf32",
    "graphs_in_exact",
    "graphs_under_dp",
    "graphs_on_cpu",
    "graphs_with_compile",
    "graphs_with_accumulation",
    "static_graph_with_accumulation",
    "adamw_has_no_momentum",
    "single_has_one_device",
]


class Remark(Part):
    """Something about a training: its kind, and the names and figures that ``results.remarks`` puts into words.

    The words are not kept here, so that to change them is no reason to train again.
    """

    kind: str
    values: dict[str, int | float | str | tuple[int, ...] | tuple[str, ...]] = Field(default_factory=dict)


class Label(Remark):
    """What a reader must know of a result."""

    kind: LabelKind


class Note(Remark):
    """What a reader may want to know of a training."""

    kind: NoteKind


class Reason(Remark):
    """Why a figure is missing; the kinds that are also labels' say the same as the label."""

    kind: ReasonKind
