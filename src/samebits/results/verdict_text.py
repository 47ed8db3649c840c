"""Verdicts as sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from samebits.errors import printable
from samebits.results.verdict import ALLOWANCE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from samebits.results.verdict import Grade, LossVerdict, Verdict, WeightsVerdict


SIGNS: dict[Grade, str] = {"bitwise": "=", "within tolerance": "≈", "not comparable": "?", "diverged": "≠"}
"""What stands between two runs of a grade."""


def sentences(verdict: Verdict) -> tuple[str, str]:
    """One sentence on losses, and one on weights."""
    return f"losses: {_say_losses(verdict.losses)}", f"weights: {_say_weights(verdict.weights)}"


def say_comparison(verdict: Verdict, differences: Mapping[str, tuple[Any, Any]]) -> str:
    """The comparison of two runs for a terminal: the verdict, its parts, and differences of settings and hosts."""
    lines = [
        f"{SIGNS[verdict.grade]} {verdict.grade}",
        *(f"  {sentence}" for sentence in [*say_apart(verdict), *sentences(verdict)]),
    ]
    if differences:
        lines.append("what differs between the two")
        lines += [printable(f"  {name}: {a} | {b}") for name, (a, b) in differences.items()]
    return "\n".join(lines)


def say_apart(verdict: Verdict) -> list[str]:
    """Why two runs may differ, whether they differ with the same draws too, and whether their data differ."""
    told = verdict.other_data if verdict.grade == "bitwise" else verdict.data
    data = [told] if told else []
    if verdict.apart is None:
        return data
    lines = [f"{'' if verdict.grade == 'diverged' else 'not comparable: '}{verdict.apart}"]
    if same := verdict.same_draws:
        lines.append(f"with the same draws for the same samples, the first {same.steps} steps: {_say_losses(same)}")
    return lines + data


def _number(value: float | None, digits: int = 2) -> str:
    return "not finite" if value is None else f"{value:.{digits}g}"


def _say_losses(losses: LossVerdict) -> str:
    if losses.grade == "bitwise":
        return f"bitwise, all {losses.steps} steps"
    if losses.grade == "not comparable":
        largest = _number(losses.largest_relative)
        return f"not comparable: the largest relative difference is {largest} at step {losses.largest_at}"
    if losses.problem:
        shared = "the same bits" if not losses.first_difference else "not the same"
        return f"diverged: {losses.problem}; the first {losses.steps} are {shared}"
    if losses.tolerance == 0.0 and losses.values:
        a, b = losses.values
        return (
            f"diverged: first at step {losses.first_difference} of {losses.steps}, {a} and {b}; exact numerics "
            f"allow no difference; the largest is {_number(losses.largest_relative)} at step {losses.largest_at}"
        )
    measured = f"{ALLOWANCE} times what rounding alone did to this training"
    source = measured if losses.measured else "the table's, as no twin was trained for so many steps"
    if losses.first_beyond is not None and losses.values:
        a, b = losses.values
        return (
            f"diverged: first at step {losses.first_beyond} of {losses.steps}, {_number(a, 9)} and {_number(b, 9)}, "
            f"beyond a tolerance of {_number(losses.tolerance)} ({source}); largest relative difference "
            f"{_number(losses.largest_relative)} at step {losses.largest_at}"
        )
    return (
        f"within tolerance: first difference at step {losses.first_difference} of {losses.steps}, the largest is "
        f"{_number(losses.largest_relative)} at step {losses.largest_at}, tolerance there "
        f"{_number(losses.tolerance)} ({source})"
    )


def _say_weights(weights: WeightsVerdict) -> str:
    if weights.grade == "bitwise":
        return f"bitwise, all {weights.tensors} tensors"
    if weights.problem:
        return f"diverged: {weights.problem}"
    if weights.grade == "not comparable":
        largest = _number(weights.largest_relative)
        return f"not comparable: the largest relative difference of a tensor is {largest} in {weights.largest_in}"
    place = f"beyond its tolerance of {_number(weights.tolerance)} first of all {weights.beyond}"
    if not weights.beyond:
        place = f"tolerance there {_number(weights.tolerance)}"
    return (
        f"{weights.grade}: {weights.different} of {weights.tensors} tensors differ, the largest relative difference "
        f"is {_number(weights.largest_relative)} in {weights.largest_in}, {place}"
    )
