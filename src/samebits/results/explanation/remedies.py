"""What to change for each cause, and the gain to expect, from the cost of a step as its parts give it."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Literal, NamedTuple

from samebits.files import Part
from samebits.strategies.ddp import DDP

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from samebits.results.explanation.causes import Cause, CauseKind
    from samebits.results.explanation.observed import Observed
    from samebits.results.explanation.parts import Parts

RemedyKind = Literal[
    "accumulate",
    "larger_batch",
    "sync_once",
    "keep_buffers",
    "balance_ranks",
    "feed_faster",
    "keep_on_device",
    "free_cores",
    "one_thread",
    "fewer_devices",
    "use_ddp",
    "share_no_device",
]

Change = dict[str, float | bool | str]
"""Keys of params.yaml and their values; of sizes of batches, and of accumulation, factors."""

TIMES = 4
"""By how much a batch is made larger, or gradients are accumulated, where that is the advice."""


class Gain(Part):
    """Samples per second with the advice over those without, predicted: the median, and the range over the turns."""

    median: float
    low: float
    high: float


class Remedy(NamedTuple):
    """What to do, the keys of params.yaml that it changes, and what it should bring; None where that is not known."""

    kind: RemedyKind
    change: Change
    gain: Gain | None


def remedy_for(cause: Cause, observed: Observed) -> Remedy:
    """The advice for a cause."""
    return _REMEDIES[cause.kind](cause, observed)


def _without(kind: RemedyKind, change: Change | None = None) -> Callable[[Cause, Observed], Remedy]:
    """Advice that takes away what the cause takes."""

    def remedy(cause: Cause, observed: Observed) -> Remedy:
        steps = [turn.parts.total for turn in observed.turns]
        lost = cause.lost_ms if len(cause.lost_ms) == len(steps) else [median(cause.lost_ms)] * len(steps)
        return Remedy(kind, change or {}, _gain([s / max(s - ms, 0.05 * s) for s, ms in zip(steps, lost, strict=True)]))

    return remedy


def _accumulate(cause: Cause, observed: Observed) -> Remedy:
    """Several micro-batches to an all-reduce and to a step of the optimizer; CUDA graphs do not go with them."""
    if observed.graphs:
        return _larger_batch(cause, observed)
    times, change = _enlarged(observed)
    gains = [times * p.total / (p.total + (times - 1) * _of_a_batch(p, observed)) for p in _parts(observed)]
    return Remedy("accumulate", {"train.grad_accum_steps": times, **change}, _gain(gains))


def _enlarged(observed: Observed) -> tuple[int, Change]:
    """How much larger a batch is to be, as far as the data have samples for it; or more of them, if for none."""
    if observed.batches is None or observed.batches >= TIMES:
        return TIMES, {"train.global_batch_size": TIMES}
    if observed.batches > 1:
        return observed.batches, {"train.global_batch_size": observed.batches}
    return TIMES, {"train.global_batch_size": TIMES, "data.num_samples": TIMES}


def _of_a_batch(parts: Parts, observed: Observed) -> float:
    """What each further micro-batch takes; nothing is sent meanwhile, whose threads would take its core."""
    work = parts.data + parts.forward + parts.backward + parts.scatter + parts.replicate + parts.gather
    return work if observed.quiet else work + parts.queued


def _larger_batch(_: Cause, observed: Observed) -> Remedy:
    """More samples in a step: what does not depend on their number is shared by more of them."""
    times, change = _enlarged(observed)
    half, slices = observed.breakdown.bounds.half_ms, observed.slices
    if half is not None:
        pairs = zip(half, observed.breakdown.plain_ms, strict=True)
        gains = [times * whole / (whole + 2 * (times - 1) * max(0.0, whole - h)) for h, whole in pairs]
        return Remedy("larger_batch", change, _gain(gains))
    if slices is None:
        return Remedy("larger_batch", change, None)
    devices = observed.devices
    fixed = max(0.0, devices * slices.share - slices.single) / (devices - 1)
    growing = max(0.0, slices.share - fixed)  # communication does not grow, either
    steps = [turn.parts.total for turn in observed.turns]
    return Remedy("larger_batch", change, _gain([times * s / (s + (times - 1) * growing) for s in steps]))


def _fewer_devices(_: Cause, observed: Observed) -> Remedy:
    """One device, which is faster."""
    speedup = observed.speedup
    assert speedup is not None, "contention is a cause where one device is shown to be faster"
    gain = Gain(median=1 / speedup.median, low=1 / speedup.high, high=1 / speedup.low)
    return Remedy("fewer_devices", {"train.num_devices": 1}, gain)


def _use_ddp(_: Cause, __: Observed) -> Remedy:
    """What ddp sends in their place is not known from a step under dp."""
    return Remedy("use_ddp", {"train.strategies": DDP.name}, None)


def _share_no_device(_: Cause, __: Observed) -> Remedy:
    """A worker for each device; what that brings is not known from steps that shared one."""
    return Remedy("share_no_device", {"train.oversubscribe": False, "train.num_devices": "auto"}, None)


def _parts(observed: Observed) -> list[Parts]:
    return [turn.parts for turn in observed.turns]


def _gain(gains: Sequence[float]) -> Gain:
    return Gain(median=median(gains), low=min(gains), high=max(gains))


_REMEDIES: dict[CauseKind, Callable[[Cause, Observed], Remedy]] = {
    "launch_bound": _larger_batch,
    "small_batch": _larger_batch,
    "optimizer": _accumulate,
    "communication": _accumulate,
    "slow_link": _accumulate,
    "reduced_often": _without("sync_once"),
    "buffers": _without("keep_buffers", {"train.ddp.forward_sync_buffers": False}),
    "straggler": _without("balance_ranks"),
    "data": _without("feed_faster"),
    "device_reads": _without("keep_on_device"),
    "busy_host": _without("free_cores"),
    "own_threads": _without("one_thread"),
    "contention": _fewer_devices,
    "oversubscribed": _share_no_device,
    "dp_copies": _use_ddp,
}
