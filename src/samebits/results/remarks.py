"""Remarks as a comparison has them, in words, which its readers need no code for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from samebits.files import Part
from samebits.remarks import KINDS, NOT_APPLIED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from samebits.records.run import RunRecord
    from samebits.remarks import Remark

    Kind = str
else:
    Kind = Literal[KINDS]


class SpokenRemark(Part):
    """A remark in words."""

    kind: Kind
    text: str


def spoken(kind: str) -> str:
    """A kind of label, note or reason as words."""
    return kind.replace("_", " ")


def in_words(remark: Remark) -> SpokenRemark:
    """A remark with its sentence."""
    return SpokenRemark(kind=getattr(remark, "kind"), text=remark.sentence())  # noqa: B009 - each kind has its own type


def say_not_applied(record: RunRecord) -> dict[str, str]:
    """Why settings did nothing in a training, by their names."""
    return {setting: NOT_APPLIED[kind] for setting, kind in record.not_applied.items()}


def say_refused(runs: Iterable[tuple[str, str, str]]) -> list[str]:
    """Of runs that ``exact`` refused, each by its name, the reason and the hint: each reason once."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, text, hint in runs:
        names.setdefault((text, hint), []).append(name)
    return [
        f"Same model in exact numerics: refused, for {', '.join(refused)}: {text}. To get an answer, {hint}."
        for (text, hint), refused in names.items()
    ]
