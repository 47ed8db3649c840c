"""Remedies for causes, with the gain that the parts of a step predict."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from samebits.files import Part
from samebits.strategies.ddp import DDP

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from samebits.results.explanation.cause import Cause
    from samebits.results.explanation.observed import Observed
    from samebits.results.explanation.parts import Parts


class RemedySpec(NamedTuple):
    """What to do, in a few words and as a sentence's part, with the values of the change that it names.

    ``another_training`` says that losses will differ, as a step then has other samples.
    """

    short: str
    text: str
    another_training: bool = False


REMEDIES = {
    "accumulate": RemedySpec(
        "send gradients once for {grad_accum_steps:g} micro-batches",
        "let each step do {grad_accum_steps:g} times the samples in as many micro-batches "
        "(train.grad_accum_steps and train.global_batch_size, both {grad_accum_steps:g} times as large), and adapt the "
        "learning rate",
        another_training=True,
    ),
    "larger_batch": RemedySpec(
        "make the batch {global_batch_size:g} times as large",
        "make train.global_batch_size {global_batch_size:g} times as large, and adapt the learning rate",
        another_training=True,
    ),
    "fewer_launches": RemedySpec(
        "launch the passes as a CUDA graph",
        "set train.cuda_graphs: true, which launches forward and backward as a whole, or train.compile: true, which "
        "makes fewer kernels of them",
    ),
    "sync_once": RemedySpec(
        "send gradients in the last backward pass of a step alone",
        "report it: all backward passes but the last of a step are to run under no_sync",
    ),
    "keep_buffers": RemedySpec(
        "let each rank keep its own buffers",
        "set train.ddp.forward_sync_buffers: false, so that each rank keeps its own; rank 0's are saved",
    ),
    "balance_ranks": RemedySpec(
        "give all ranks the same work and the same device",
        "give that rank the same work and the same device as the others; --trace of stage train shows what it does",
    ),
    "feed_faster": RemedySpec(
        "prepare the input before the training", "prepare the input before the training, or in memory"
    ),
    "more_loaders": RemedySpec(
        "load samples with {num_workers:g} processes for each rank",
        "load samples with {num_workers:g} processes for each rank (train.loader.num_workers: {num_workers:g})",
    ),
    "cheaper_samples": RemedySpec(
        "make samples cheaper to load",
        "make samples cheaper, as by decoded or smaller files: a loading process more has no core here",
    ),
    "keep_on_device": RemedySpec(
        "take .item() and `if tensor:` out of the forward pass",
        "remove .item(), .tolist() and `if tensor:` from the forward pass",
    ),
    "free_cores": RemedySpec(
        "stop what else runs on this host", "stop what else runs on this host, or train elsewhere"
    ),
    "one_thread": RemedySpec(
        "leave out torch.set_num_threads", "leave out torch.set_num_threads: each worker has its cores already"
    ),
    "fewer_devices": RemedySpec("use one device", "use one device: it is faster here"),
    "use_ddp": RemedySpec("use ddp", "use ddp, which copies the model once"),
    "share_no_device": RemedySpec(
        "let no two workers share a device",
        "let no two workers share a device (train.oversubscribe: false, train.num_devices: auto)",
    ),
}
"""Remedies by kind."""

if TYPE_CHECKING:
    RemedyKind: TypeAlias = str
else:
    RemedyKind = Literal[tuple(REMEDIES)]

Change = dict[str, float | bool | str]
"""Keys of params.yaml with their new values, or with factors in place of values, if they are among ``FACTORS``."""

FACTORS = ("train.global_batch_size", "train.grad_accum_steps", "data.num_samples")

REPLAYED_MS = 0.002
"""Least milliseconds of a kernel in a graph, with the gap before the next one. What a launch costs beyond is saved."""

LEAST_GAIN = 1.1
"""Predicted gain from which fewer launches are advised in place of a larger batch."""

TIMES = 4
"""The factor for a larger batch and for gradient accumulation."""


class Gain(Part):
    """Predicted ratio of samples per second with the remedy to those without: median and range over the turns."""

    median: float
    low: float
    high: float


class Remedy(NamedTuple):
    """What to do, the keys of params.yaml that it changes, and the predicted gain; None if that is unknown."""

    kind: RemedyKind
    change: Change
    gain: Gain | None


def without(kind: RemedyKind, change: Change | None = None) -> Callable[[Cause, Observed], Remedy]:
    """A remedy that removes the time of the cause."""

    def remedy(cause: Cause, observed: Observed) -> Remedy:
        steps = [turn.parts.total for turn in observed.turns]
        lost = cause.lost_ms if len(cause.lost_ms) == len(steps) else [median(cause.lost_ms)] * len(steps)
        return Remedy(kind, change or {}, _gain([s / max(s - ms, 0.05 * s) for s, ms in zip(steps, lost, strict=True)]))

    return remedy


def feed_faster(cause: Cause, observed: Observed) -> Remedy:
    """More processes that load a dataset's samples, as many as the training needs and free cores can run.

    A step then takes what loading takes them together, or what is left of it without the wait, whichever is longer.
    Loading keeps each process there is busy for the whole step; with none, the wait is the loading.
    """
    loaders, free = observed.loaders, observed.cores_of_a_rank - 1
    if loaders is None:
        return without("feed_faster")(cause, observed)
    turns = [(turn.parts.total, turn.parts.total - ms) for turn, ms in zip(observed.turns, cause.lost_ms, strict=True)]
    loading = [loaders * step if loaders else step - rest for step, rest in turns]
    needed = max(math.ceil(load / max(rest, 0.05 * step)) for load, (step, rest) in zip(loading, turns, strict=True))
    more = min(needed, free)
    if more <= loaders:
        return without("cheaper_samples")(cause, observed)
    gains = [step / max(rest, load / more) for load, (step, rest) in zip(loading, turns, strict=True)]
    return Remedy("more_loaders", {"train.loader.num_workers": more}, _gain(gains))


def accumulate(cause: Cause, observed: Observed) -> Remedy:
    """Several micro-batches for each all-reduce and optimizer step. CUDA graphs do not allow them."""
    if observed.graphs:
        return larger_batch(cause, observed)
    times, change = _enlarged(observed)
    parts = [turn.parts for turn in observed.turns]
    gains = [times * p.total / (p.total + (times - 1) * _of_a_batch(p, observed)) for p in parts]
    return Remedy("accumulate", {"train.grad_accum_steps": times, **change}, _gain(gains))


def _enlarged(observed: Observed) -> tuple[int, Change]:
    """The factor for the batch that the data allow, and the changes. Data of a single batch grow by the factor too."""
    if observed.batches >= TIMES:
        return TIMES, {"train.global_batch_size": TIMES}
    if observed.batches > 1:
        return observed.batches, {"train.global_batch_size": observed.batches}
    return TIMES, {"train.global_batch_size": TIMES, "data.num_samples": TIMES}


def _of_a_batch(parts: Parts, observed: Observed) -> float:
    """Milliseconds of each further micro-batch. It waits for no core because of threads that send: nothing is sent."""
    work = parts.data + parts.forward + parts.backward + parts.scatter + parts.replicate + parts.gather
    return work if observed.quiet else work + parts.queued


def larger_batch(_: Cause, observed: Observed) -> Remedy:
    """A larger batch: its fixed time is shared by more samples."""
    times, change = _enlarged(observed)
    half, slices = observed.breakdown.bounds.half_ms, observed.slices
    if half is not None:
        pairs = zip(half, observed.breakdown.plain_ms, strict=True)
        gains = [times * whole / (whole + 2 * (times - 1) * max(0.0, whole - h)) for h, whole in pairs]
        return Remedy("larger_batch", change, _gain(gains))
    if slices is None:
        return Remedy("larger_batch", change, None)
    growing = max(0.0, slices.share - _fixed_of_a_share(observed))  # communication does not grow with the batch either
    steps = [turn.parts.total for turn in observed.turns]
    return Remedy("larger_batch", change, _gain([times * s / (s + (times - 1) * growing) for s in steps]))


def fewer_launches(cause: Cause, observed: Observed) -> Remedy:
    """CUDA graphs or compiled kernels, which change no batch, if they can be had and would help; else a larger batch.

    The gain is that of graphs: the time that no batch changes is shared by all launches, and graphs save those of the
    passes.
    """
    launches = observed.breakdown.launches
    if not observed.may_capture or launches is None or not launches.passes:
        return larger_batch(cause, observed)
    steps = [turn.parts.total for turn in observed.turns]
    of_all = observed.breakdown.bounds.half_ms is None
    fixed = [_fixed_of_a_share(observed)] * len(steps) if of_all else cause.lost_ms
    saved = [launches.passes * max(0.0, ms / launches.total - REPLAYED_MS) for ms in fixed]
    gain = _gain([step / max(step - ms, 0.05 * step) for step, ms in zip(steps, saved, strict=True)])
    if gain.median < LEAST_GAIN:
        return larger_batch(cause, observed)
    return Remedy("fewer_launches", {"train.cuda_graphs": True}, gain)


def _fixed_of_a_share(observed: Observed) -> float:
    """Milliseconds that a device's share of the batch takes whatever its size; 0 without slices."""
    slices, devices = observed.slices, observed.devices
    return max(0.0, devices * slices.share - slices.single) / (devices - 1) if slices else 0.0


def fewer_devices(_: Cause, observed: Observed) -> Remedy:
    """One device, because it is faster."""
    speedup = observed.speedup
    assert speedup is not None, "contention is a cause where one device is shown to be faster"
    gain = Gain(median=1 / speedup.median, low=1 / speedup.high, high=1 / speedup.low)
    return Remedy("fewer_devices", {"train.num_devices": 1}, gain)


def use_ddp(_: Cause, __: Observed) -> Remedy:
    """Training with ddp. The gain is unknown: a step under dp does not show what ddp would send."""
    return Remedy("use_ddp", {"train.strategies": DDP.name}, None)


def share_no_device(_: Cause, __: Observed) -> Remedy:
    """One worker for each device. The gain is unknown: steps on shared devices do not show it."""
    return Remedy("share_no_device", {"train.oversubscribe": False, "train.num_devices": "auto"}, None)


def _gain(gains: Sequence[float]) -> Gain:
    return Gain(median=median(gains), low=min(gains), high=max(gains))


def values_after(change: Change, params: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a change with their new values, by the flat ``params`` that they were."""
    values = {key: params[key] * value if key in FACTORS else value for key, value in change.items()}
    return {
        key: int(value) if isinstance(value, float) and value.is_integer() else value for key, value in values.items()
    }
