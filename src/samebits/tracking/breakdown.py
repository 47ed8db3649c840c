"""What MLflow has of an explanation: parts of a step and bounds of the host as metrics, the cause as tags."""

from __future__ import annotations

from typing import TYPE_CHECKING

from samebits.results.explanation.words import advice_of, cause_of

if TYPE_CHECKING:
    from samebits.results.explanation.explain import Explanation


def figures_of(explanation: Explanation) -> dict[str, float]:
    """Metrics: ``part.NAME_ms`` add up to ``part.step_ms``; ``limit.NAME`` is what the host can do at best."""
    figures = {f"part.{name}_ms": ms for name, ms in explanation.parts.model_dump().items()}
    figures["part.step_ms"] = explanation.step_ms
    bounds = explanation.bounds
    figures["limit.copy_gb_per_s"] = bounds.copy_gb_per_s
    figures["limit.optimizer_ms"] = bounds.optimizer_floor_ms
    if bounds.all_reduces:
        figures["limit.all_reduce_ms"] = bounds.all_reduces[-1].ms
        figures["limit.all_reduce_gb_per_s"] = bounds.all_reduces[-1].bus_gb_per_s
    first = explanation.findings[0] if explanation.findings else None
    if first and first.share is not None:
        figures["cause_share"] = first.share
    if first and first.gain:
        figures["predicted_gain"] = first.gain.median
    return figures


def tags_of(explanation: Explanation) -> dict[str, str]:
    """Tags: the first cause by its name and in a sentence, and the next step; empty where nothing stands out."""
    if not explanation.findings:
        return {"cause": "", "cause_text": "", "advice": ""}
    first = explanation.findings[0]
    return {"cause": first.cause, "cause_text": cause_of(first), "advice": advice_of(first)}
