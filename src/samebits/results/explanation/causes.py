"""Causes that make a step longer than necessary, each with the time that it takes and its evidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from samebits.results.explanation.cause import Cause, Evidence, NotJudged, in_ms, number
from samebits.results.explanation.observed import BUSY_CORES, FIXED_SHARE
from samebits.results.explanation.parts import COPIES
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
    from samebits.results.explanation.observed import Observed
    from samebits.results.explanation.remedies import Remedy

LEAST_SHARE = 0.10
"""Least share of a step for which a cause is named."""

SLOW_LINK = 0.005
"""Share of the rate of copies in a device's memory. Devices that all-reduce more slowly have a slow link."""

QUIET_CORES = 0.15
"""Cores that others may use for a slow rank to count as a straggler: more may have slowed it down."""


class CauseSpec(NamedTuple):
    """A cause in one sentence, which may name its ``rank`` and ``phase``, and the remedy.

    ``losses`` names those of ``LostTime`` that it is behind.
    """

    sentence: str
    remedy: Callable[[Cause, Observed], Remedy]
    losses: tuple[str, ...] = ()


_OF_SMALL = ("fixed", "communication", "wrapper")  # what a larger batch shares among more samples
_SENT = ("communication", "wrapper")
_QUEUED = ("contention", "waiting")

CAUSES = {
    "launch_bound": CauseSpec(
        "Python and the launching of operations take time that does not depend on the batch", fewer_launches, _OF_SMALL
    ),
    "small_batch": CauseSpec(
        "The batch is too small to share: this time does not shrink with a device's part of it",
        fewer_launches,
        _OF_SMALL,
    ),
    "optimizer": CauseSpec("The optimizer moves many parameters for few samples", accumulate, ("fixed",)),
    "communication": CauseSpec("Gradients are sent for longer than the backward pass can hide", accumulate, _SENT),
    "slow_link": CauseSpec("The link between the devices is slow for these gradients", accumulate, _SENT),
    "reduced_often": CauseSpec("Gradients are all-reduced more than once in a step", without("sync_once"), _SENT),
    "buffers": CauseSpec(
        "Buffers are sent before each forward pass, as those of BatchNorm",
        without("keep_buffers", {"train.ddp.forward_sync_buffers": False}),
        ("buffers",),
    ),
    "straggler": CauseSpec(
        "All wait for rank {rank}, whose {phase} takes longer than that of the others",
        without("balance_ranks"),
        ("waiting",),
    ),
    "data": CauseSpec("The devices wait for their input", feed_faster),
    "device_reads": CauseSpec(
        "The forward pass reads values of the device into Python, and waits for each", without("keep_on_device")
    ),
    "busy_host": CauseSpec("Other processes use the cores of this host", without("free_cores"), _QUEUED),
    "own_threads": CauseSpec(
        "The model's operations use more threads than the one that a device has here", without("one_thread"), _QUEUED
    ),
    "contention": CauseSpec(
        "Devices slow each other down without any communication: they share memory, caches or power",
        fewer_devices,
        ("contention",),
    ),
    "oversubscribed": CauseSpec("Several workers share a device", share_no_device, _QUEUED),
    "dp_copies": CauseSpec("DataParallel copies the model and the batch in each step", use_ddp, ("copies",)),
}
"""Causes by kind. ``_FINDERS`` finds them."""

if TYPE_CHECKING:
    CauseKind: TypeAlias = str
else:
    CauseKind = Literal[tuple(CAUSES)]

OF_THE_HOST = frozenset({"busy_host", "own_threads", "oversubscribed"})
"""Causes that make a host unsteady, and are judged on one."""

Looked = Sequence[Cause | NotJudged]
"""What was looked for: causes with the time that they take, however little, and those of which nothing can be said."""

UNREADABLE = "the cores that other processes use cannot be read here"


def look_for_causes(observed: Observed) -> Looked:
    """All causes, as every finder sees them."""
    return [found for find in _FINDERS for found in find(observed)]


def largest(looked: Looked, step_ms: float) -> list[Cause]:
    """The causes that take at least ``LEAST_SHARE`` of a step, the largest first."""
    causes = [one for one in looked if isinstance(one, Cause) and one.ms >= LEAST_SHARE * step_ms]
    if any(cause.kind == "straggler" for cause in causes):
        # the straggler slows down the step of all devices at once
        causes = [cause for cause in causes if cause.kind != "contention"]
    return sorted(causes, key=lambda cause: -cause.ms)


def _part(observed: Observed, name: str) -> tuple[float, ...]:
    return tuple(getattr(turn.parts, name) for turn in observed.turns)


def _own_phase(kind: CauseKind, part: str, what: str) -> Callable[[Observed], Looked]:
    def find(observed: Observed) -> Looked:
        lost = _part(observed, part)
        return [Cause(kind, lost, (in_ms(what, median(lost)),))]

    return find


_OF_ALL_REDUCES = ("slow_link", "reduced_often")


def _communication(observed: Observed) -> Looked:
    """Communication that is not hidden, as the cause that is behind it."""
    traffic, bounds = observed.breakdown.traffic, observed.breakdown.bounds
    if traffic is None:
        return []  # nothing is sent
    if observed.share_gpus:
        why = "several workers share a GPU, whose queue cannot be read"
        return [NotJudged(kind, why) for kind in ("communication", "slow_link", "reduced_often")]
    lost = _part(observed, "communication")
    if observed.quiet:  # then a rank waits for a core only because of the threads that send
        lost = tuple(turn.parts.communication + turn.parts.queued for turn in observed.turns)
    shown = [in_ms("communication that is not hidden", median(lost))]
    if not (traffic.buckets and bounds.all_reduces):
        why = "no all-reduce was timed by itself"
        return [Cause("communication", lost, tuple(shown)), *(NotJudged(kind, why) for kind in _OF_ALL_REDUCES)]
    times = observed.times_reduced
    causes = []
    if times > 1:
        with_waiting = zip(lost, _part(observed, "waiting"), strict=True)  # for the slowest rank, in each reduction
        needless = tuple((ms + waiting) * (times - 1) / times for ms, waiting in with_waiting)
        sent = number("times that all gradients are reduced in a step", times)
        causes.append(Cause("reduced_often", needless, (sent, *shown)))
        lost = tuple(ms / times for ms in lost)
    alone = bounds.all_reduces[-1]
    if observed.of_latency:
        return causes  # a larger batch does not make it longer: see ``_small_batch``
    shown += [
        in_ms("an all-reduce of the gradients alone", alone.ms),
        Evidence(name="its bus bandwidth", value=alone.bus_gb_per_s, unit="GB/s"),
    ]
    slow = max(one.bus_gb_per_s for one in bounds.all_reduces) < SLOW_LINK * bounds.copy_gb_per_s  # of any size
    return [*causes, Cause("slow_link" if slow else "communication", lost, tuple(shown))]


def _straggler(observed: Observed) -> Looked:
    """The rank that computes longest, if it is the same one in every turn. Chance would pick another one each time."""
    turns, others = observed.turns, observed.breakdown.other_cores
    if len(turns[0].computing_ms) < 2:
        return []
    if others is None:
        return [NotJudged("straggler", UNREADABLE)]
    if others > QUIET_CORES:  # a process that shares a core with a rank slows it down as well
        return [NotJudged("straggler", f"other processes used {others:.1f} cores, and may slow a rank down as well")]
    slowest = {turn.computing_ms.index(max(turn.computing_ms)) for turn in turns}
    if len(slowest) > 1:
        return []
    (rank,) = slowest
    others_ms = [fmean(ms for number, ms in enumerate(turn.computing_ms) if number != rank) for turn in turns]
    lost = tuple(max(turn.computing_ms) - ms for turn, ms in zip(turns, others_ms, strict=True))
    own = observed.breakdown.ranks[rank].alone
    rest = [phases for number, one in enumerate(observed.breakdown.ranks) if number != rank for phases in one.alone]
    if not own:
        return [NotJudged("straggler", "no rank was timed by itself")]
    differences = {
        name: fmean(getattr(phases, name) for phases in own) - fmean(getattr(phases, name) for phases in rest)
        for name in ("data", "forward", "backward", "optimizer", "host")
    }
    phase = max(differences, key=lambda name: differences[name])
    shown = (
        in_ms(f"rank {rank} computes", median(turn.computing_ms[rank] for turn in turns)),
        in_ms("others compute", median(others_ms)),
    )
    return [Cause("straggler", lost, shown, rank=rank, phase=phase)]


def _queued(observed: Observed) -> Looked:
    """Waits for a core, because of other processes, or because there are more workers than cores."""
    others = observed.breakdown.other_cores
    lost = tuple(turn.queued_ms for turn in observed.turns)
    shown = [in_ms("waiting for a core", median(lost))]
    if observed.share_gpus:  # the queue of a GPU cannot be read: its time shows as communication and waiting
        lost = tuple(turn.parts.of(("communication", "wrapper", "waiting")) for turn in observed.turns)
        shown = [in_ms("communication and waiting", median(lost))]
    if observed.oversubscribed:
        return [Cause("oversubscribed", lost, tuple(shown))]
    if others is None:
        return [NotJudged("busy_host", UNREADABLE)]
    if others < BUSY_CORES:
        return []
    return [Cause("busy_host", lost, (number("cores that others used", others), *shown))]


def _own_threads(observed: Observed) -> list[Cause]:
    """More threads than cores, shown by steps in which each rank was held to one thread."""
    breakdown = observed.breakdown
    if not breakdown.one_thread_ms:
        return []
    pairs = zip(breakdown.plain_ms, breakdown.one_thread_ms, strict=True)
    lost = tuple(observed.parts.total * max(0.0, 1 - held / plain) for plain, held in pairs)
    shown = (
        number("threads of a rank", max(rank.threads for rank in breakdown.ranks)),
        number("cores", breakdown.cores),
        in_ms("a step with one thread", median(observed.one_thread_ms)),
    )
    return [Cause("own_threads", lost, shown)]


def _fixed(observed: Observed) -> Looked:
    """The time of a step that does not depend on the batch: launches and Python."""
    parts, half = observed.parts, observed.breakdown.bounds.half_ms
    if half is not None:
        fixed = [max(0.0, 2 * h - w) for h, w in zip(half, observed.breakdown.plain_ms, strict=True)]
        if observed.moves_memory:
            return []
        named = parts.queued + parts.data + observed.reads_ms  # these have causes of their own
        launches = tuple(max(0.0, ms - named) for ms in sorted(fixed)[: len(observed.turns)])
        if median(launches) >= FIXED_SHARE * parts.total:
            shown = (in_ms("time of a step that no batch changes", median(fixed)), *_launches(observed))
            return [Cause("launch_bound", launches, shown)]
    return _small_batch(observed)


def _small_batch(observed: Observed) -> Looked:
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
        shown = [in_ms("a device's share of the batch, alone", share), in_ms("the whole batch on one device", single)]
    bounds, traffic = observed.breakdown.bounds, observed.breakdown.traffic
    if traffic and bounds.all_reduces and observed.of_latency:
        sending = (parts.communication + (parts.queued if observed.quiet else 0.0)) / observed.times_reduced
        lost += sending
        shown.append(in_ms("communication, as long for a larger batch", sending))
    if parts.wrapper and not observed.share_gpus:
        lost += parts.wrapper
        shown.append(in_ms("DDP's own work on the host, as long for a larger batch", parts.wrapper))
    return [Cause("small_batch", (lost,), (*shown, *_launches(observed)))]


def _launches(observed: Observed) -> list[Evidence]:
    """The launches of a step on a GPU, where some can be saved."""
    launches = observed.breakdown.launches
    if launches is None or not observed.may_capture:
        return []
    return [number("launches of a step", launches.total), number("of these, in the passes", launches.passes)]


def _optimizer(observed: Observed) -> Looked:
    """An optimizer that moves many parameters for few samples."""
    if not observed.moves_memory:
        return []
    lost = _part(observed, "optimizer")
    floor = in_ms("its floor, by the memory's rate", observed.breakdown.bounds.optimizer_floor_ms)
    return [Cause("optimizer", lost, (in_ms("the optimizer", median(lost)), floor))]


def _contention(observed: Observed) -> Looked:
    """Devices that slow each other down without any communication, by memory, caches or power."""
    slices, speedup = observed.slices, observed.speedup
    if observed.devices < 2:
        return []
    if slices is None or slices.together is None:
        return [NotJudged("contention", "the devices were not timed at once without communication, on a steady host")]
    if speedup is None or speedup.high >= 1:
        return [NotJudged("contention", "nothing can be set for it where one device is not shown to be faster")]
    shown = (
        in_ms("all devices at once, without communication", slices.together),
        in_ms("one of them alone", slices.share),
    )
    queued = median(_part(observed, "queued"))
    return [Cause("contention", (max(0.0, slices.together - slices.share - queued),), shown)]


def _dp_copies(observed: Observed) -> Looked:
    lost = tuple(turn.parts.of(COPIES) for turn in observed.turns)
    return [Cause("dp_copies", lost, (in_ms("scatter, replicate and gather", median(lost)),))]


def _device_reads(observed: Observed) -> Looked:
    reads = observed.breakdown.reads
    shown = (
        number("reads of the device in the forward passes of a step", reads.count),
        in_ms("what they take", observed.reads_ms),
    )
    return [Cause("device_reads", (observed.reads_ms,), shown)]


_FINDERS: tuple[Callable[[Observed], Looked], ...] = (
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
