"""The explanation of a run: parts of its step, losses against the ideal speed-up, causes and remedies."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from samebits.files import Part
from samebits.records.breakdown import Bounds
from samebits.results.explanation.cause import Cause, Evidence, NotJudged
from samebits.results.explanation.causes import CAUSES, OF_THE_HOST, CauseKind, largest, look_for_causes
from samebits.results.explanation.observed import Observed
from samebits.results.explanation.parts import COPIES, Parts, plain_ms
from samebits.results.explanation.remedies import Change, Gain, RemedyKind
from samebits.results.waterfall import STAGES
from samebits.strategies import STRATEGIES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from samebits.records.run import Ratio, RunRecord
    from samebits.results.comparison import SliceSteps
    from samebits.results.explanation.causes import Looked


class ExplainedCause(Part):
    """A cause with its share of a step, its evidence, and the remedy.

    ``gain`` is the predicted ratio of samples per second. An unsteady host has neither a gain nor a share.
    """

    cause: CauseKind
    lost_ms: float
    share: float | None
    rank: int | None
    phase: str | None
    evidence: tuple[Evidence, ...]
    remedy: RemedyKind
    change: Change
    gain: Gain | None


class LookedFor(Part):
    """Whether a cause was found: it takes ``ms`` of a step, or there is a reason ``why`` nothing can be said of it.

    A cause that is not found takes too little of a step to be named, or does not occur: then ``ms`` is None.
    """

    cause: CauseKind
    state: Literal["found", "not_found", "not_judged"]
    ms: float | None = None
    why: str | None = None


class LostTime(Part):
    """The difference between a step and the ideal one, in ms, divided into parts that add up to it.

    ``ideal_ms`` is a step of one device divided by the number of devices. ``fixed`` is how much longer one device takes
    for its share. ``contention`` is how much devices slow each other down, without ``waiting`` for the slowest. The
    rest belongs to the strategy: ``ddp`` divides it as the profiling pass did, ``dp`` into its copies and the rest.
    """

    ideal_ms: float
    fixed: float
    contention: float
    communication: float
    wrapper: float
    waiting: float
    buffers: float
    copies: float
    unexplained: float

    def stages(self) -> dict[str, float]:
        """What each adds to the ideal step, in the order in which they are told."""
        return {name: getattr(self, name) for name in STAGES if name in LostTime.model_fields}

    @property
    def distance_ms(self) -> float:
        """All losses, less the gains."""
        return float(sum(self.stages().values()))


AGREE = 1.25
"""Largest factor between steps of the slices and of the profiling pass. Beyond it, the host is unsteady."""

AGREE_SENDING = 0.1
"""Largest difference between the shares that sending takes of a step in both. Beyond it, the host is unsteady."""


_UNSTEADY = "this host was too unsteady"


class Unsteady(Part):
    """Two times in ms that contradict each other: from the slices, and from the profiling pass a moment later.

    They are of a whole ``step``, or of ``sending`` in it. For ``share`` both are from the slices: the step of a
    device's share of the batch, and that of the whole batch.
    """

    kind: Literal["step", "sending", "share"]
    ms: float
    other_ms: float


class Explanation(Part):
    """Why a run's step takes as long as it does.

    ``step_ms`` is a step of the slices, the base of every figure in the report, and ``parts`` are scaled to it. Without
    slices, or on an unsteady host, both are from the profiling pass. ``plain_ms`` always is.
    """

    step_ms: float
    plain_ms: float
    parts: Parts
    losses: LostTime | None
    unsteady: Unsteady | None = None
    findings: tuple[ExplainedCause, ...]
    looked_for: tuple[LookedFor, ...] = ()
    bounds: Bounds


def explain(record: RunRecord, slices: SliceSteps | None, speedup: Ratio | None) -> Explanation | None:
    """The explanation of a run; None if its steps were not divided into parts."""
    if record.breakdown is None:
        return None
    train, placement = record.params.train, record.placement
    may_capture = STRATEGIES[record.strategy].compiles and train.why_no_graphs(placement.device_type) is None
    observed = Observed(
        record.breakdown,
        placement,
        batches=record.params.data.num_samples // train.global_batch_size,
        graphs=train.cuda_graphs,
        may_capture=may_capture and not train.cuda_graphs,
        loaders=train.loader.num_workers if record.params.data.task == "dataset" else None,
    )
    unsteady = _unsteady(slices, observed, record) if slices else None
    if not unsteady:
        observed = replace(observed, slices=slices, speedup=speedup)
    step = observed.parts.total
    looked = look_for_causes(observed)
    found = [cause for cause in largest(looked, step) if not unsteady or cause.kind in OF_THE_HOST]
    return Explanation(
        step_ms=step,
        plain_ms=plain_ms(record.breakdown),
        parts=observed.parts,
        losses=_losses(observed),
        unsteady=unsteady,
        bounds=record.breakdown.bounds,
        findings=tuple(_finding(cause, observed, None if unsteady else step) for cause in found),
        looked_for=_looked_for(looked, [cause.kind for cause in found], unsteady=unsteady is not None),
    )


def _looked_for(looked: Looked, found: Sequence[str], *, unsteady: bool) -> tuple[LookedFor, ...]:
    """What became of each cause, in the order of ``CAUSES``. On an unsteady host the host's own alone are judged."""
    looked = [NotJudged(one.kind, _UNSTEADY) if unsteady and one.kind not in OF_THE_HOST else one for one in looked]
    told = {
        one.kind: LookedFor(cause=one.kind, state="found" if one.kind in found else "not_found", ms=one.ms)
        if isinstance(one, Cause)
        else LookedFor(cause=one.kind, state="not_judged", why=one.why)
        for one in looked
    }
    unseen: dict[str, Any] = {"state": "not_found"}
    if unsteady:
        unseen = {"state": "not_judged", "why": _UNSTEADY}
    return tuple(told.get(kind) or LookedFor(cause=kind, **unseen) for kind in CAUSES)


def _unsteady(slices: SliceSteps, observed: Observed, record: RunRecord) -> Unsteady | None:
    """How the slices contradict the profiling pass or each other; None if they do not."""
    step, plain = slices.strategy, median(observed.breakdown.plain_ms)
    if not plain / AGREE <= step <= plain * AGREE:
        return Unsteady(kind="step", ms=step, other_ms=plain)
    parts = observed.parts
    if slices.together is not None and (sent := parts.of(observed.sending)):
        left = max(0.0, step - slices.together)
        if abs(left / step - sent / parts.total) > AGREE_SENDING:
            return Unsteady(kind="sending", ms=left, other_ms=sent)
    train = record.params.train  # ``dp`` compiles or captures the step of one device alone
    alike = record.placement.has_ranks or not (train.compile or train.cuda_graphs)
    if alike and slices.share > AGREE * min(step, slices.single):
        return Unsteady(kind="share", ms=slices.share, other_ms=min(step, slices.single))
    return None


def _finding(cause: Cause, observed: Observed, step: float | None) -> ExplainedCause:
    remedy = CAUSES[cause.kind].remedy(cause, observed)
    return ExplainedCause(
        cause=cause.kind,
        lost_ms=cause.ms,
        share=cause.ms / step if step else None,
        rank=cause.rank,
        phase=cause.phase,
        evidence=cause.evidence,
        remedy=remedy.kind,
        change=remedy.change,
        gain=remedy.gain if step else None,
    )


def _losses(observed: Observed) -> LostTime | None:
    slices, parts = observed.slices, observed.parts
    if slices is None:
        return None
    ideal = slices.single / observed.devices
    together = slices.share if slices.together is None else slices.together
    copies = parts.of(COPIES)
    sent = parts.of(observed.sending)
    return LostTime(
        ideal_ms=ideal,
        fixed=slices.share - ideal,
        contention=together - slices.share - parts.waiting,
        communication=sent - parts.buffers - parts.wrapper,
        wrapper=parts.wrapper,
        waiting=parts.waiting,
        buffers=parts.buffers,
        copies=copies,
        unexplained=slices.strategy - together - sent - copies,  # under dp: the work of device 0 alone, and Python
    )
