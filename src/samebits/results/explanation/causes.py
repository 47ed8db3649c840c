"""Causes that make a step longer than necessary, each with the time that it takes and its evidence."""

from __future__ import annotations

from statistics import fmean, median
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from samebits.files import Part
from samebits.results.explanation.observed import BUSY_CORES
from samebits.results.explanation.remedies import (
    accumulate,
    feed_faster,
    fewer_devices,
    fewer_launches,
    share_no_device,
    use_ddp,
    without,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from samebits.records.breakdown import Bounds, Traffic
    from samebits.results.explanation.observed import Observed
    from samebits.results.explanation.remedies import Remedy

LEAST_SHARE = 0.10
"""Least share of a step for which a cause is named."""

FIXED_SHARE = 0.25
"""Share of a step on one device. A step is launch-bound if more of it does not depend on the batch."""

FLOOR_SHARE = 0.15
"""Share of an optimizer's time. If its floor is less, the optimizer spends its time on launching operations."""

SLOW_LINK = 0.005
"""Share of the rate of copies in a device's memory. Devices that all-reduce more slowly have a slow link."""

QUIET_CORES = 0.15
"""Cores that other processes may use for a slow rank to count as a straggler: more may have slowed it down."""

MORE_THAN_ONCE = 1.5
"""Reduced bytes over the bytes of all gradients, above which gradients are reduced more than once."""

LATENCY_TIMES = 3
"""Time of an all-reduce over that of the smallest message, below which latency dominates, and not bandwidth."""


class CauseSpec(NamedTuple):
    """A cause in one sentence, which may name its ``rank`` and ``phase``, and the remedy."""

    sentence: str
    remedy: Callable[[Cause, Observed], Remedy]


CAUSES = {
    "launch_bound": CauseSpec(
        "This time does not depend on the batch: Python and the launching of operations", fewer_launches
    ),
    "small_batch": CauseSpec(
        "The batch is too small to share: this time does not shrink with a device's part of it", fewer_launches
    ),
    "optimizer": CauseSpec("The optimizer moves many parameters for few samples", accumulate),
    "communication": CauseSpec("Gradients are sent for longer than the backward pass can hide", accumulate),
    "slow_link": CauseSpec("The link between the devices is slow for these gradients", accumulate),
    "reduced_often": CauseSpec("Gradients are all-reduced more than once in a step", without("sync_once")),
    "buffers": CauseSpec(
        "Buffers are sent before each forward pass, as those of BatchNorm",
        without("keep_buffers", {"train.ddp.forward_sync_buffers": False}),
    ),
    "straggler": CauseSpec(
        "All wait for rank {rank}, whose {phase} takes longer than that of the others", without("balance_ranks")
    ),
    "data": CauseSpec("The devices wait for their input", feed_faster),
    "device_reads": CauseSpec(
        "The forward pass reads values of the device into Python, and waits for each", without("keep_on_device")
    ),
    "busy_host": CauseSpec("Other processes use the cores of this host", without("free_cores")),
    "own_threads": CauseSpec(
        "The model's operations use more threads than the one that a device has here", without("one_thread")
    ),
    "contention": CauseSpec(
        "Devices slow each other down without any communication: they share memory, caches or power", fewer_devices
    ),
    "oversubscribed": CauseSpec("Several workers share a device", share_no_device),
    "dp_copies": CauseSpec("DataParallel copies the model and the batch in each step", use_ddp),
}
"""Causes by kind. ``_FINDERS`` finds them."""

if TYPE_CHECKING:
    CauseKind: TypeAlias = str
else:
    CauseKind = Literal[tuple(CAUSES)]


class Evidence(Part):
    """A figure that shows a cause, with its unit."""

    name: str
    value: float
    unit: str


class Cause(NamedTuple):
    """A cause: the milliseconds of a step that it takes in each turn; ``rank`` and ``phase`` are a straggler's."""

    kind: CauseKind
    lost_ms: tuple[float, ...]
    evidence: tuple[Evidence, ...]
    rank: int | None = None
    phase: str | None = None

    @property
    def ms(self) -> float:
        """The median over the turns."""
        return median(self.lost_ms)


def find_causes(observed: Observed) -> list[Cause]:
    """The causes that take at least ``LEAST_SHARE`` of a step, the largest first."""
    step = fmean(turn.parts.total for turn in observed.turns)
    causes = [cause for find in _FINDERS for cause in find(observed)]
    if any(cause.kind == "straggler" and cause.ms >= LEAST_SHARE * step for cause in causes):
        # the straggler slows down the step of all devices at once
        causes = [cause for cause in causes if cause.kind != "contention"]
    return sorted((cause for cause in causes if cause.ms >= LEAST_SHARE * step), key=lambda cause: -cause.ms)


def _ms(name: str, value: float) -> Evidence:
    return Evidence(name=name, value=value, unit="ms")


def _number(name: str, value: float) -> Evidence:
    return Evidence(name=name, value=value, unit="")


def _part(observed: Observed, name: str) -> tuple[float, ...]:
    return tuple(getattr(turn.parts, name) for turn in observed.turns)


def _own_phase(kind: CauseKind, part: str, what: str) -> Callable[[Observed], list[Cause]]:
    def find(observed: Observed) -> list[Cause]:
        lost = _part(observed, part)
        return [Cause(kind, lost, (_ms(what, median(lost)),))]

    return find


def _communication(observed: Observed) -> list[Cause]:
    """Communication that is not hidden, as the cause that is behind it."""
    traffic, bounds = observed.breakdown.traffic, observed.breakdown.bounds
    if traffic is None or observed.share_gpus:
        return []
    lost = _part(observed, "communication")
    if observed.quiet:  # then a rank waits for a core only because of the threads that send
        lost = tuple(turn.parts.communication + turn.parts.queued for turn in observed.turns)
    shown = [_ms("communication that is not hidden", median(lost))]
    if not (traffic.buckets and bounds.all_reduces):
        return [Cause("communication", lost, tuple(shown))]
    times = _times_reduced(traffic)
    causes = []
    if times > 1:
        with_waiting = zip(
            lost, _part(observed, "waiting"), strict=True
        )  # ranks wait for the slowest one in each reduction
        needless = tuple((ms + waiting) * (times - 1) / times for ms, waiting in with_waiting)
        sent = _number("times that all gradients are reduced in a step", times)
        causes.append(Cause("reduced_often", needless, (sent, *shown)))
        lost = tuple(ms / times for ms in lost)
    alone = bounds.all_reduces[-1]
    if _of_latency(bounds):
        return causes  # a larger batch does not make it longer: see ``_small_batch``
    shown += [
        _ms("an all-reduce of the gradients alone", alone.ms),
        Evidence(name="its bus bandwidth", value=alone.bus_gb_per_s, unit="GB/s"),
    ]
    slow = max(one.bus_gb_per_s for one in bounds.all_reduces) < SLOW_LINK * bounds.copy_gb_per_s  # of any size
    return [*causes, Cause("slow_link" if slow else "communication", lost, tuple(shown))]


def _times_reduced(traffic: Traffic) -> float:
    """How often a step reduces all gradients; 1 also if it leaves some out or pads them."""
    times = traffic.bytes_per_step / max(traffic.gradient_bytes, 1)
    return times if times > MORE_THAN_ONCE else 1.0


def _of_latency(bounds: Bounds) -> bool:
    """Whether an all-reduce of the gradients takes little longer than one of the smallest message."""
    first, last = bounds.all_reduces[0], bounds.all_reduces[-1]
    return first is last or last.ms < LATENCY_TIMES * first.ms


def _straggler(observed: Observed) -> list[Cause]:
    """The rank that computes longest, if it is the same one in every turn. Chance would pick another one each time."""
    turns, others = observed.turns, observed.breakdown.other_cores
    if len(turns[0].computing_ms) < 2 or others is None or others > QUIET_CORES:
        return []  # a process that shares a core with a rank slows it down as well
    slowest = {turn.computing_ms.index(max(turn.computing_ms)) for turn in turns}
    if len(slowest) > 1:
        return []
    (rank,) = slowest
    others_ms = [fmean(ms for number, ms in enumerate(turn.computing_ms) if number != rank) for turn in turns]
    lost = tuple(max(turn.computing_ms) - ms for turn, ms in zip(turns, others_ms, strict=True))
    own = observed.breakdown.ranks[rank].alone
    rest = [phases for number, one in enumerate(observed.breakdown.ranks) if number != rank for phases in one.alone]
    if not own:
        return []
    differences = {
        name: fmean(getattr(phases, name) for phases in own) - fmean(getattr(phases, name) for phases in rest)
        for name in ("data", "forward", "backward", "optimizer", "host")
    }
    phase = max(differences, key=lambda name: differences[name])
    shown = (
        _ms(f"rank {rank} computes", median(turn.computing_ms[rank] for turn in turns)),
        _ms("others compute", median(others_ms)),
    )
    return [Cause("straggler", lost, shown, rank=rank, phase=phase)]


def _queued(observed: Observed) -> list[Cause]:
    """Waits for a core, because of other processes, or because there are more workers than cores."""
    others = observed.breakdown.other_cores
    lost = tuple(turn.queued_ms for turn in observed.turns)
    shown = [_ms("waiting for a core", median(lost))]
    if observed.share_gpus:  # the queue of a GPU cannot be read: its time shows as communication and waiting
        lost = tuple(turn.parts.of(("communication", "wrapper", "waiting")) for turn in observed.turns)
        shown = [_ms("communication and waiting", median(lost))]
    if observed.oversubscribed:
        return [Cause("oversubscribed", lost, tuple(shown))]
    if others is None or others < BUSY_CORES:
        return []
    return [Cause("busy_host", lost, (_number("cores that others used", others), *shown))]


def _own_threads(observed: Observed) -> list[Cause]:
    """More threads than cores, shown by steps in which each rank was held to one thread."""
    breakdown = observed.breakdown
    if not breakdown.one_thread_ms:
        return []
    pairs = zip(breakdown.plain_ms, breakdown.one_thread_ms, strict=True)
    lost = tuple(observed.parts.total * max(0.0, 1 - held / plain) for plain, held in pairs)
    shown = (
        _number("threads of a rank", max(rank.threads for rank in breakdown.ranks)),
        _number("cores", breakdown.cores),
        _ms("a step with one thread", median(observed.one_thread_ms)),
    )
    return [Cause("own_threads", lost, shown)]


def _fixed(observed: Observed) -> list[Cause]:
    """The time of a step that does not depend on the batch: launches and Python."""
    parts, half = observed.parts, observed.breakdown.bounds.half_ms
    if half is not None:
        fixed = [max(0.0, 2 * h - w) for h, w in zip(half, observed.breakdown.plain_ms, strict=True)]
        if _moves_memory(observed):
            return []
        named = parts.queued + parts.data + observed.reads_ms  # these have causes of their own
        launches = tuple(max(0.0, ms - named) for ms in sorted(fixed)[: len(observed.turns)])
        if median(launches) >= FIXED_SHARE * parts.total:
            shown = (_ms("time of a step that no batch changes", median(fixed)), *_launches(observed))
            return [Cause("launch_bound", launches, shown)]
    return _small_batch(observed)


def _small_batch(observed: Observed) -> list[Cause]:
    """The time that a smaller share of the batch does not shorten: of computation, and of latency in all-reduces."""
    if observed.devices < 2:
        return []
    lost, shown, parts = 0.0, [], observed.parts
    if observed.slices is not None:
        share, single = observed.slices.share, observed.slices.single
        named = parts.data + observed.reads_ms  # these have causes of their own, and do not shrink with the share
        lost = max(0.0, share - single / observed.devices - named * (1 - 1 / observed.devices))
        # Threads beyond the cores cost time in each operation, whatever the share.
        lost = max(0.0, lost - sum(cause.ms for cause in _own_threads(observed)))
        shown = [_ms("a device's share of the batch, alone", share), _ms("the whole batch on one device", single)]
    bounds, traffic = observed.breakdown.bounds, observed.breakdown.traffic
    if traffic and bounds.all_reduces and _of_latency(bounds):
        sending = (parts.communication + (parts.queued if observed.quiet else 0.0)) / _times_reduced(traffic)
        lost += sending
        shown.append(_ms("communication, as long for a larger batch", sending))
    if parts.wrapper and not observed.share_gpus:
        lost += parts.wrapper
        shown.append(_ms("DDP's own work on the host, as long for a larger batch", parts.wrapper))
    return [Cause("small_batch", (lost,), (*shown, *_launches(observed)))]


def _launches(observed: Observed) -> list[Evidence]:
    """The launches of a step on a GPU, where some can be saved."""
    launches = observed.breakdown.launches
    if launches is None or not observed.may_capture:
        return []
    return [_number("launches of a step", launches.total), _number("of these, in the passes", launches.passes)]


def _optimizer(observed: Observed) -> list[Cause]:
    """An optimizer that moves many parameters for few samples."""
    if not _moves_memory(observed):
        return []
    lost = _part(observed, "optimizer")
    floor = _ms("its floor, by the memory's rate", observed.breakdown.bounds.optimizer_floor_ms)
    return [Cause("optimizer", lost, (_ms("the optimizer", median(lost)), floor))]


def _moves_memory(observed: Observed) -> bool:
    """Whether the optimizer takes much of a step, and mostly for moving data instead of launching operations."""
    parts, floor_ms = observed.parts, observed.breakdown.bounds.optimizer_floor_ms
    return parts.optimizer >= FIXED_SHARE * parts.total and floor_ms >= FLOOR_SHARE * parts.optimizer


def _contention(observed: Observed) -> list[Cause]:
    """Devices that slow each other down without any communication, by memory, caches or power."""
    slices, speedup = observed.slices, observed.speedup
    if slices is None or slices.together is None:
        return []
    if speedup is None or speedup.high >= 1:
        return []  # the time is lost, but no setting helps
    shown = (_ms("all devices at once, without communication", slices.together), _ms("one of them alone", slices.share))
    queued = median(_part(observed, "queued"))
    return [Cause("contention", (max(0.0, slices.together - slices.share - queued),), shown)]


def _dp_copies(observed: Observed) -> list[Cause]:
    """The copies that DataParallel makes in each step."""
    lost = tuple(t.parts.scatter + t.parts.replicate + t.parts.gather for t in observed.turns)
    return [Cause("dp_copies", lost, (_ms("scatter, replicate and gather", median(lost)),))]


def _device_reads(observed: Observed) -> list[Cause]:
    reads = observed.breakdown.reads
    shown = (
        _number("reads of the device in the forward passes of a step", reads.count),
        _ms("what they take", observed.reads_ms),
    )
    return [Cause("device_reads", (observed.reads_ms,), shown)]


_FINDERS: tuple[Callable[[Observed], list[Cause]], ...] = (
    _communication,
    _straggler,
    _queued,
    _own_threads,
    _fixed,
    _optimizer,
    _contention,
    _dp_copies,
    _device_reads,
    _own_phase("data", "data", "making a batch ready"),
    _own_phase("buffers", "buffers", "synchronising buffers in the forward pass"),
)
