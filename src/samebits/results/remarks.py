"""Remarks as sentences: readers of ``comparison.json`` need no code to understand them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

from samebits.files import Part
from samebits.remarks import MISSING, NOT_APPLIED, LabelOf, Missing, Remark
from samebits.results import labels  # noqa: F401 - whose classes are labels too

if TYPE_CHECKING:
    from collections.abc import Iterable

    from samebits.records.run import Run, RunRecord

T = TypeVar("T")


class ShardsApart(Remark):
    """Shards did not go through the model in one pass."""

    HINT: ClassVar[str] = "read what runs in one pass in docs/concepts/exact.md"
    SAYS: ClassVar[str] = "shards run one by one, with the same bits, which takes longer than one pass: {why}"
    kind: Literal["shards_apart"] = "shards_apart"
    why: str


class NotReplayed(Remark):
    """Passes were not replayed as CUDA graphs, though they were to be."""

    HINT: ClassVar[str] = "take .item(), .cpu(), print and branches on a tensor's values out of forward"
    SAYS: ClassVar[str] = "passes are launched kernel by kernel and not as CUDA graphs: {why}"
    kind: Literal["not_replayed"] = "not_replayed"
    why: str


class NoKernels(Remark):
    """Python's functions answered in place of compiled kernels."""

    SAYS: ClassVar[str] = (
        "exact ran without compiled kernels, which changes no bit and takes longer; `samebits doctor` says why, unless "
        "SAMEBITS_KERNELS is set to python"
    )
    kind: Literal["no_kernels"] = "no_kernels"


class LargeLoss(Remark):
    """The first loss is much larger than that of equal odds for all classes."""

    SAYS: ClassVar[str] = (
        "its first loss is {loss:.4g}, where equal odds for {classes} classes cost {even:.3g}: the inputs or the first "
        "weights are too large; give each column of the inputs a mean of 0 and a deviation of 1"
    )
    kind: Literal["large_loss"] = "large_loss"
    loss: float
    classes: int
    even: float


LABELS = {str(label.model_fields["kind"].default): label.MEANS for label in LabelOf.__subclasses__()}
"""The meaning of each label for a reader, by its kind."""
_NOTES = (note.model_fields["kind"].default for note in Remark.__subclasses__() if note not in (LabelOf, Missing))
KINDS = (*LABELS, *map(str, _NOTES), *MISSING)
"""The kinds of all remarks."""

if TYPE_CHECKING:
    Kind = str
else:
    Kind = Literal[KINDS]


class SpokenRemark(Part):
    """A remark as a sentence."""

    kind: Kind
    text: str


def names_by(said: Iterable[tuple[str, T]]) -> dict[T, list[str]]:
    """The names of the runs of which each thing is said, in their order."""
    names: dict[T, list[str]] = {}
    for name, what in said:
        names.setdefault(what, []).append(name)
    return names


def spoken(kind: str) -> str:
    """The kind of a label, note or reason as words, without underscores."""
    return kind.replace("_", " ")


def in_words(remark: Remark) -> SpokenRemark:
    """The remark as its kind and its sentence."""
    return SpokenRemark(kind=getattr(remark, "kind"), text=remark.sentence())  # noqa: B009 - each kind has its own type


_LARGE = 10.0
"""Times the loss of equal odds, above which a first loss is large."""


def all_notes(run: Run) -> list[Remark]:
    """The notes on a training, and those that follow from its figures."""
    record, card, loss = run.record, run.record.data, run.losses[0]
    notes: list[Remark] = [*record.notes]
    if exact := record.arithmetic:
        if exact.shards_apart:
            notes.append(ShardsApart(why=exact.shards_apart))
        train = record.params.train
        if exact.not_replayed and train.cuda_graphs and "train.cuda_graphs" not in record.not_applied:
            notes.append(NotReplayed(why=exact.not_replayed))
        told = "compiled_kernels" in exact.model_fields_set  # older records do not say
        if told and not exact.compiled_kernels:
            notes.append(NoKernels())
    classes = card.num_classes or 1
    usual = card.loss == "cross_entropy" and not record.own_loss
    if usual and loss > _LARGE * (even := math.log(classes)) > 0:
        notes.append(LargeLoss(loss=loss, classes=classes, even=even))
    return notes


def say_not_applied(record: RunRecord) -> dict[str, str]:
    """Reasons why settings had no effect in a training, by the setting's name."""
    return {setting: NOT_APPLIED[kind] for setting, kind in record.not_applied.items()}


def say_refused(runs: Iterable[tuple[str, str, str]]) -> list[str]:
    """One sentence for each reason why ``exact`` refused runs, which are given as name, reason and hint."""
    return [
        f"Same model in exact numerics: refused, for {', '.join(refused)}: {text}. To get an answer, {hint}."
        for (text, hint), refused in names_by((name, (text, hint)) for name, text, hint in runs).items()
    ]
