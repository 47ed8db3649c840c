"""Explain one run: the parts of its step, where its distance from ideal goes, its causes, and what to change."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from samebits.files import Part
from samebits.records.breakdown import Bounds
from samebits.results.explanation.causes import CauseKind, Evidence, find_causes
from samebits.results.explanation.observed import Observed
from samebits.results.explanation.parts import Parts, mean_parts, plain_ms
from samebits.results.explanation.remedies import Change, Gain, RemedyKind, remedy_for

if TYPE_CHECKING:
    from samebits.records.run import Ratio, RunRecord
    from samebits.results.comparison import SliceSteps
    from samebits.results.explanation.causes import Cause


class ExplainedCause(Part):
    """A cause with its share of a step, its evidence, and the advice.

    ``gain`` is predicted, in samples per second.
    """

    cause: CauseKind
    lost_ms: float
    share: float
    rank: int | None
    phase: str | None
    evidence: tuple[Evidence, ...]
    remedy: RemedyKind
    change: Change
    gain: Gain | None


class LostTime(Part):
    """The distance between a step and the ideal one, in ms; the parts add up to it.

    ``ideal_ms`` is a step of one device divided by their number. ``fixed`` is what a device's share takes longer than
    that, ``contention`` what devices slow each other down; what is left is the strategy's: for ``ddp`` divided as the
    marked pass divided it, for ``dp`` its copies and the rest.
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


AGREE = 1.5
"""Steps of slices and of the profiling pass differ by less than this factor, or the host was another one meanwhile."""


class Explanation(Part):
    """Why a run's step takes as long as it does; ``step_ms`` and ``parts`` are of the profiling pass, as ``plain_ms``.

    ``unsteady_ms`` is a step in the slices where that differs so much from the profiling pass that they were not used.
    """

    step_ms: float
    plain_ms: float
    parts: Parts
    losses: LostTime | None
    unsteady_ms: float | None = None
    findings: tuple[ExplainedCause, ...]
    bounds: Bounds


def explain(record: RunRecord, slices: SliceSteps | None, speedup: Ratio | None) -> Explanation | None:
    """The explanation of a run, None if its steps were not divided."""
    if record.breakdown is None:
        return None
    plain = plain_ms(record.breakdown)
    steady = slices is None or (agree(slices.strategy, plain) and _shrinks(slices, record))
    unsteady = None if slices is None or steady else slices.strategy
    observed = Observed(
        record.breakdown,
        record.placement,
        slices if steady else None,
        speedup if steady else None,
        batches=record.params.data.num_samples // record.params.train.global_batch_size,
        graphs=record.params.train.cuda_graphs,
    )
    turns = observed.turns
    parts = mean_parts(turns)
    step = fmean(turn.parts.total for turn in turns)
    return Explanation(
        step_ms=step,
        plain_ms=plain,
        parts=parts,
        losses=_losses(observed, parts),
        unsteady_ms=unsteady,
        bounds=record.breakdown.bounds,
        findings=tuple(_finding(cause, observed, step) for cause in find_causes(observed)),
    )


def agree(slices_ms: float, step_ms: float) -> bool:
    """Whether a step of the slices was about as long as one of the profiling pass."""
    return step_ms / AGREE <= slices_ms <= step_ms * AGREE


def _shrinks(slices: SliceSteps, record: RunRecord) -> bool:
    """Whether a share of the batch is no longer than the batch; under ``dp`` one alone may be compiled or captured."""
    train = record.params.train
    alike = record.placement.has_ranks or not (train.compile or train.cuda_graphs)
    return slices.share <= AGREE * min(slices.strategy, slices.single) or not alike


def _finding(cause: Cause, observed: Observed, step: float) -> ExplainedCause:
    remedy = remedy_for(cause, observed)
    return ExplainedCause(
        cause=cause.kind,
        lost_ms=cause.ms,
        share=cause.ms / step,
        rank=cause.rank,
        phase=cause.phase,
        evidence=cause.evidence,
        remedy=remedy.kind,
        change=remedy.change,
        gain=remedy.gain,
    )


def _losses(observed: Observed, parts: Parts) -> LostTime | None:
    slices = observed.slices
    if slices is None:
        return None
    ideal = slices.single / observed.devices
    together = slices.share if slices.together is None else slices.together
    left = slices.strategy - together
    between = {"communication": parts.communication, "waiting": parts.waiting, "buffers": parts.buffers,
               "copies": parts.scatter + parts.replicate + parts.gather}  # fmt: skip
    whole = sum(between.values())
    shared = {name: left * ms / whole if whole else 0.0 for name, ms in between.items()}
    if slices.together is None:  # dp: what its copies do not explain is its device 0's, and Python's
        shared = between
    return LostTime(
        ideal_ms=ideal,
        fixed=slices.share - ideal,
        contention=together - slices.share,
        **shared,
        unexplained=left - sum(shared.values()),
    )
