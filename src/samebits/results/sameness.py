"""The third answer: whether runs are the same model, in one word and in one line for each numerics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from samebits.results.figures import fine_percent
from samebits.results.text import by_numerics, exact_first, listed
from samebits.results.verdict import GRADES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from samebits.results.comparison import Comparison, Row
    from samebits.results.verdict import LossVerdict, WeightsVerdict


@dataclass(frozen=True, kw_only=True)
class Same:
    """Whether it is the same model: in one word, and in one line for each numerics."""

    state: Literal["yes", "no", "not judged", "one run"]
    told: dict[str, str]


def is_it_the_same(comparison: Comparison) -> Same:
    """The third answer."""
    groups = by_numerics(comparison.rows)
    own_dataset = comparison.params.data.task == "dataset"
    told = {name: text for name in exact_first(groups) if (text := _same(name, groups[name], own_dataset))}
    for refused in comparison.refused:
        told.setdefault(refused.numerics, f"refused, because of {refused.what}; {refused.hint}")
    grades = [row.verdict.grade for row in comparison.rows if row.verdict]
    if "diverged" in grades:
        return Same(state="no", told=told)
    if "not comparable" in grades:
        return Same(state="not judged", told=told)
    if grades:
        return Same(state="yes", told=told)
    return Same(
        state="one run",
        told=told or dict.fromkeys(exact_first(groups), "there is nothing to compare it with"),
    )


def _same(numerics: str, rows: Sequence[Row], own_dataset: bool) -> str:
    """One line on the runs of one numerics; empty if there is only one."""
    verdicts = [(row, row.verdict) for row in rows if row.verdict]
    if not verdicts:
        return ""
    row, worst = max(verdicts, key=lambda one: GRADES.index(one[1].grade))
    strategies = [one.strategy for one in rows if not one.fallback]
    under = f"under {listed(strategies)}" if len(strategies) > 1 else "but nothing was parallel"
    if worst.grade == "bitwise":
        other_data = next((verdict.other_data for _, verdict in verdicts if verdict.other_data), None)
        if numerics != "exact" or other_data:
            return f"every bit, {under}" + (f", but {other_data}" if other_data else "")
        given = ", where the dataset gives the same samples" if own_dataset else ""
        return f"every bit, {under}, on any host{given}"
    losses, weights = worst.losses, worst.weights
    if worst.grade == "diverged":
        return f"{row.name} left {worst.against}{_where(losses, weights)}"
    if worst.grade == "not comparable":
        told, same = f"{row.name} cannot be compared: {worst.apart}", worst.same_draws
        agree = same is not None and same.grade in ("bitwise", "within tolerance")
        return f"{told}; with the same draws, the first {same.steps} steps agree" if same and agree else told
    largest = max((verdict.losses.largest_relative or 0.0 for _, verdict in verdicts), default=0.0)
    if largest:
        return f"losses differ by {fine_percent(largest)}, as rounding explains"
    return (
        f"losses are the same, weights differ in {weights.different} of {weights.tensors} tensors, as rounding explains"
    )


def _where(losses: LossVerdict, weights: WeightsVerdict) -> str:
    """Where a run diverged, and by how much: by its losses, or else by its weights."""
    step = losses.first_beyond or losses.first_difference
    largest, allowed, what = losses.largest_relative, losses.tolerance, f"{f' at step {step}' if step else ''}: losses"
    if not step and not largest:
        largest, allowed, what = weights.largest_relative, weights.tolerance, f": {weights.largest_in or 'weights'}"
    if not largest:
        return what.partition(":")[0]
    passes = f", where {fine_percent(allowed)} passes" if allowed else ""
    return f"{what} differ by {fine_percent(largest)}{passes}"
