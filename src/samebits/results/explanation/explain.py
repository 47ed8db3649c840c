"""Explain one run: the parts of its step, where its distance from ideal goes, its causes, and what to change."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Literal

from samebits.files import Part
from samebits.records.breakdown import Bounds
from samebits.results.explanation.causes import CAUSES, CauseKind, Evidence, find_causes
from samebits.results.explanation.observed import Observed
from samebits.results.explanation.parts import Parts, plain_ms
from samebits.results.explanation.remedies import Change, Gain, RemedyKind

if TYPE_CHECKING:
    from samebits.records.run import Ratio, RunRecord
    from samebits.results.comparison import SliceSteps
    from samebits.results.explanation.causes import Cause


class ExplainedCause(Part):
    """A cause with its share of a step, its evidence, and the advice.

    ``gain`` is predicted, in samples per second; neither it nor a share is said of an unsteady host.
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


class LostTime(Part):
    """The distance between a step and the ideal one, in ms; the parts add up to it.

    ``ideal_ms`` is a step of one device divided by their number. ``fixed`` is what a device's share takes longer than
    that, ``contention`` what devices slow each other down, but for ``waiting`` for the slowest; what is left is the
    strategy's: for ``ddp`` divided as the marked pass divided it, for ``dp`` its copies and the rest.
    """

    ideal_ms: float
    fixed: float
    contention: float
    communication: float
    waiting: float
    buffers: float
    copies: float
    unexplained: float

    @property
    def distance_ms(self) -> float:
        """All that is lost, less what was gained."""
        names = LostTime.model_fields.keys() - {"ideal_ms"}
        return float(sum(getattr(self, name) for name in names))


AGREE = 1.25
"""Steps of slices and of the profiling pass differ by less than this factor, or the host was another one meanwhile."""

AGREE_SENDING = 0.1
"""Of a step: what is sent takes as much in both, give or take that, or the host was another one meanwhile."""


class Unsteady(Part):
    """What the slices say, and the profiling pass a moment later, in ms: of a whole step, or of what is sent in it.

    Of a ``share`` of the batch they are its step and that of the whole batch, both of the slices.
    """

    kind: Literal["step", "sending", "share"]
    ms: float
    other_ms: float


class Explanation(Part):
    """Why a run's step takes as long as it does.

    ``step_ms`` is a step of the slices, which every other figure of the report has as its base, and ``parts`` are
    scaled to it; where there are no slices, or the host was unsteady, both are the profiling pass's, as ``plain_ms``.
    """

    step_ms: float
    plain_ms: float
    parts: Parts
    losses: LostTime | None
    unsteady: Unsteady | None = None
    findings: tuple[ExplainedCause, ...]
    bounds: Bounds


def explain(record: RunRecord, slices: SliceSteps | None, speedup: Ratio | None) -> Explanation | None:
    """The explanation of a run, None if its steps were not divided."""
    if record.breakdown is None:
        return None
    observed = Observed(
        record.breakdown,
        record.placement,
        batches=record.params.data.num_samples // record.params.train.global_batch_size,
        graphs=record.params.train.cuda_graphs,
    )
    unsteady = _unsteady(slices, observed, record) if slices else None
    if not unsteady:
        observed = replace(observed, slices=slices, speedup=speedup)
    step = observed.parts.total
    return Explanation(
        step_ms=step,
        plain_ms=plain_ms(record.breakdown),
        parts=observed.parts,
        losses=_losses(observed),
        unsteady=unsteady,
        bounds=record.breakdown.bounds,
        findings=tuple(_finding(cause, observed, None if unsteady else step) for cause in find_causes(observed)),
    )


def _unsteady(slices: SliceSteps, observed: Observed, record: RunRecord) -> Unsteady | None:
    """How the slices contradict the profiling pass, or themselves."""
    step, plain = slices.strategy, median(observed.breakdown.plain_ms)
    if not plain / AGREE <= step <= plain * AGREE:
        return Unsteady(kind="step", ms=step, other_ms=plain)
    parts = observed.parts
    if slices.together is not None and (sent := parts.of(observed.sending)):
        left = max(0.0, step - slices.together)
        if abs(left / step - sent / parts.total) > AGREE_SENDING:
            return Unsteady(kind="sending", ms=left, other_ms=sent)
    train = record.params.train  # under ``dp`` one device alone may have its step compiled or captured
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
    copies = parts.of(("scatter", "replicate", "gather"))
    sent = parts.of(observed.sending)
    return LostTime(
        ideal_ms=ideal,
        fixed=slices.share - ideal,
        contention=together - slices.share - parts.waiting,
        communication=sent - parts.buffers,
        waiting=parts.waiting,
        buffers=parts.buffers,
        copies=copies,
        unexplained=slices.strategy - together - sent - copies,  # under dp device 0's own, and Python's
    )
