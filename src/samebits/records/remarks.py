"""What a reader must or may know of a training, by kind: the words are in ``results.remarks``.

They are not kept here, so that to change them is no reason to train again.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from samebits.files import Part

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


MissingKind = Literal["one_repeat", "one_pair", "no_memory", "no_memory_left", "not_measured", "not_ended"]


class Fallback(Part):
    """DataParallel ran the plain module, on one GPU of ``gpus`` or on none."""

    kind: Literal["fallback"] = "fallback"
    gpus: int


class OneDevice(Part):
    """There was nothing to share the work with; ``strategy`` is named if it ran all the same, as one process."""

    kind: Literal["one_device"] = "one_device"
    strategy: str | None = None


class Oversubscribed(Part):
    """Workers shared devices, CPU cores or GPUs; ``node`` is the machine, where there are several."""

    kind: Literal["oversubscribed"] = "oversubscribed"
    workers: int
    devices: int
    device: str
    node: str | None = None


class UnusedDevices(Part):
    """DataParallel cut ``units`` samples or shards into fewer chunks than there are devices."""

    kind: Literal["unused_devices"] = "unused_devices"
    units: int
    unit: str
    chunks: int
    devices: int


class AnyOrder(Part):
    """NCCL chose in which order gradients are added."""

    kind: Literal["any_order"] = "any_order"


class FewerDevices(Part):
    """As many devices were used as share out ``units`` samples or shards equally."""

    kind: Literal["fewer_devices"] = "fewer_devices"
    devices: int
    available: int
    units: int
    unit: str
    nodes: int = 1


class BatchNorm(Part):
    """Each device normalises by its own part of the batch."""

    kind: Literal["batch_norm"] = "batch_norm"
    devices: int
    strategy: str


class IdleParameters(Part):
    """Parameters that no gradient reaches."""

    kind: Literal["idle_parameters"] = "idle_parameters"
    names: tuple[str, ...]


class Resumed(Part):
    """The training was stopped and went on, after each of ``steps``; ``elsewhere`` is another strategy or host."""

    kind: Literal["resumed"] = "resumed"
    steps: tuple[int, ...]
    elsewhere: bool = False


class Ring(Part):
    """NCCL was held to its ring algorithm."""

    kind: Literal["ring"] = "ring"


class Prolonged(Part):
    """Slices were timed ``count`` times in place of ``planned``, until the figure was known or a limit was reached."""

    kind: Literal["prolonged"] = "prolonged"
    planned: int
    count: int
    prolonged_seconds: float
    known: bool


class Unrepeated(Part):
    """Slices were timed once, which does not tell how far such measurements differ."""

    kind: Literal["unrepeated"] = "unrepeated"


class Missing(Part):
    """Why a figure is missing, where nothing else is to be said."""

    kind: MissingKind


ModelNote = BatchNorm | IdleParameters
"""What a training's first step finds in the model."""

Label = Annotated[Fallback | Oversubscribed | OneDevice | UnusedDevices | AnyOrder, Field(discriminator="kind")]
"""What a reader must know of a result."""

Note = Annotated[FewerDevices | ModelNote | Resumed | Ring | Prolonged | Unrepeated, Field(discriminator="kind")]
"""What a reader may want to know of a training."""

Reason = Annotated[Fallback | Oversubscribed | OneDevice | Missing, Field(discriminator="kind")]
"""Why a figure is missing: a label that says why, or nothing but that."""
