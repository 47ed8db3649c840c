"""The first section of the report: the main run's causes and remedies, and each figure with its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from samebits.records.run import precedence
from samebits.results.explanation.words import (
    LOSS_NAMES,
    NOTHING,
    advice_of,
    cause_of,
    figure_of,
    say_parts,
    say_unsteady,
)
from samebits.results.figures import milliseconds
from samebits.results.text import times_single

if TYPE_CHECKING:
    from samebits.results.comparison import Comparison, Row
    from samebits.results.explanation.explain import ExplainedCause, Explanation


LEAST_SHOWN = 0.02
"""Least share of a step for which a loss or a gain is shown."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure of evidence: anchor, name, value with its unit, and place in comparison.json."""

    id: str
    name: str
    value: str
    path: str


@dataclass(frozen=True)
class Said:
    """A finding as sentences, with its figures."""

    cause: str
    advice: str
    figures: tuple[Figure, ...]


@dataclass(frozen=True)
class WhySection:
    """The content of the section; ``distance`` is empty for a run on one device."""

    name: str
    findings: tuple[Said, ...]
    nothing: str
    distance: str
    figures: tuple[Figure, ...]


def why_section(comparison: Comparison) -> WhySection | None:
    """The section; None if no run was divided into parts."""
    number = main_row(comparison)
    if number is None:
        return None
    row = comparison.rows[number]
    explanation = row.explanation
    assert explanation
    path = f"rows[{number}].explanation"
    findings = tuple(
        Said(cause_of(finding), advice_of(finding), _evidence(finding, place, f"{path}.findings[{place}]"))
        for place, finding in enumerate(explanation.findings)
    )
    return WhySection(
        name=row.name,
        findings=findings,
        nothing=NOTHING,
        distance=say_distance(row, explanation),
        figures=(*(figure for finding in findings for figure in finding.figures), *_parts(explanation, path)),
    )


def main_row(comparison: Comparison) -> int | None:
    """The row that the section explains: the run with most devices among those that were divided into parts."""
    divided = [number for number, row in enumerate(comparison.rows) if row.explanation]

    def order(number: int) -> tuple[tuple[int, bool], bool]:
        row = comparison.rows[number]
        return precedence(row.devices_used, row.strategy, has_ranks=row.has_ranks), row.slice_step_ms is not None

    return max(divided, key=order, default=None)


def say_distance(row: Row, explanation: Explanation) -> str:
    """The distance of the speed-up from the number of devices, with the largest losses."""
    if explanation.unsteady:
        return say_unsteady(explanation.unsteady)
    losses = explanation.losses
    if losses is None or row.speedup is None:
        return ""
    step = losses.ideal_ms + losses.distance_ms
    text = (
        f"{row.name} has {times_single(row)}, and {row.devices_used} times would be ideal: a step takes "
        f"{milliseconds(step)} in place of {milliseconds(losses.ideal_ms)}."
    )
    lost = {name: getattr(losses, key) for key, name in LOSS_NAMES.items()}
    largest = sorted(((ms, name) for name, ms in lost.items() if ms >= LEAST_SHOWN * step), reverse=True)
    if losses.distance_ms < LEAST_SHOWN * step or not largest:
        return text
    parts = ", ".join(f"{milliseconds(ms)} {name}" for ms, name in largest[:3])
    rest = losses.distance_ms - sum(ms for ms, _ in largest[:3])
    if abs(rest) >= LEAST_SHOWN * step:
        parts += f", and {milliseconds(abs(rest))} {'gained' if rest < 0 else 'else'}"
    return f"{text} Lost: {parts}."


def _evidence(finding: ExplainedCause, number: int, path: str) -> tuple[Figure, ...]:
    return tuple(
        Figure(id=f"evidence-{number}-{place}", name=one.name, value=figure_of(one), path=f"{path}.evidence[{place}]")
        for place, one in enumerate(finding.evidence)
    )


def _parts(explanation: Explanation, path: str) -> list[Figure]:
    return [
        Figure(id=f"part-{key}", name=f"of a step: {name}", value=milliseconds(ms), path=f"{path}.parts.{key}")
        for key, name, ms in say_parts(explanation.parts)
        if not explanation.unsteady and ms >= 0.01 * explanation.step_ms
    ]
