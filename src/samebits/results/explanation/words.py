"""An explanation as text: the cause as a sentence, its evidence, and the remedy with the predicted gain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from samebits.results.explanation.causes import CAUSES
from samebits.results.explanation.remedies import REMEDIES
from samebits.results.figures import milliseconds, signed, signed_ms, three_digits
from samebits.results.waterfall import LEAST_SHOWN, say_unsteady, stage_words

if TYPE_CHECKING:
    from samebits.records.run import RunRecord
    from samebits.results.explanation.cause import Evidence
    from samebits.results.explanation.explain import ExplainedCause, Explanation
    from samebits.results.explanation.parts import Parts

PART_NAMES: dict[str, str] = {
    "data": "making a batch ready",
    "scatter": "scattering it",
    "replicate": "copying the model",
    "forward": "forward pass",
    "gather": "gathering outputs",
    "backward": "backward pass",
    "buffers": "synchronising buffers",
    "communication": "communication that is not hidden",
    "wrapper": "DDP's own work on the host",
    "waiting": "waiting for the slowest rank",
    "optimizer": "optimizer",
    "host": "Python between them",
    "queued": "waiting for a core",
}
"""Names of the parts of a step, in the order of display."""

NOTHING = "No cause that can be changed here takes a tenth of a step."
UNKNOWN = "Nothing is known: no step was divided into parts."

_PASSES = {"forward": "forward pass", "backward": "backward pass", "host": "Python"}


def what_of(finding: ExplainedCause) -> str:
    """The cause without figures: ``The batch is too small to share: ...``."""
    phase = finding.phase or ""
    return CAUSES[finding.cause].sentence.format(rank=finding.rank, phase=_PASSES.get(phase, phase))


def cause_of(finding: ExplainedCause) -> str:
    """The cause as one sentence."""
    share = "" if finding.share is None else f", {finding.share:.0%} of a step"
    return f"{what_of(finding)}: {milliseconds(finding.lost_ms)}{share}."


def advice_of(finding: ExplainedCause) -> str:
    """The remedy with its predicted gain."""
    text = _with_values(REMEDIES[finding.remedy].text, finding)
    if more := finding.change.get("data.num_samples"):
        text += f"; that takes {more:g} times the samples"
    gain = finding.gain
    if gain is None:
        return f"Next: {text}."
    size = f"{gain.median:.2f} times the samples per second"
    if f"{gain.low:.2f}" != f"{gain.high:.2f}":
        size += f" ({gain.low:.2f} to {gain.high:.2f})"
    return f"Next: {text}. Predicted: {size}."


def action_of(finding: ExplainedCause) -> str:
    """The remedy in a few words: ``make the batch 4 times as large``."""
    return _with_values(REMEDIES[finding.remedy].short, finding)


def _with_values(text: str, finding: ExplainedCause) -> str:
    return text.format(**{key.rpartition(".")[2]: by for key, by in finding.change.items()})


def figure_of(evidence: Evidence) -> str:
    """A figure of evidence, with its unit."""
    if evidence.unit == "ms":
        return milliseconds(evidence.value)
    return f"{three_digits(evidence.value)} {evidence.unit}".strip()


def say_parts(parts: Parts) -> list[tuple[str, str, float]]:
    """Keys, names and milliseconds of the parts that take any time."""
    return [(key, name, ms) for key, name in PART_NAMES.items() if (ms := getattr(parts, key)) > 0]


def say_trained(record: RunRecord) -> str:
    """The name of a run with its model, data and batch size."""
    params = record.params
    return f"{record.name} of {params.model.name} on {params.data.task}, global batch {params.train.global_batch_size}"


def say_explanation(name: str, explanation: Explanation) -> str:
    """An explanation for a terminal."""
    lines = [f"{name}: a step takes {milliseconds(explanation.step_ms)}", ""]
    if explanation.unsteady:
        lines = [f"{name}: {say_unsteady(explanation.unsteady)}", ""]
    for _, what, ms in say_parts(explanation.parts):
        share = ms / explanation.step_ms
        shown = "" if explanation.unsteady else f" {share:>4.0%}  {'█' * round(40 * share)}"
        lines.append(f"  {what:<34} {milliseconds(ms):>9}{shown}".rstrip())
    if explanation.losses:
        lines += ["", *say_losses(explanation)]
    lines.append("")
    if not explanation.findings and not explanation.unsteady:
        lines.append(NOTHING)
    for number, finding in enumerate(explanation.findings, start=1):
        action = action_of(finding)
        gain = f": {signed(finding.gain.median)}, predicted" if finding.gain else ""
        lines += [f"{number}. {action[0].upper()}{action[1:]}{gain}", f"   {cause_of(finding)}"]
        lines += [f"   {one.name}: {figure_of(one)}" for one in finding.evidence]
        lines.append(f"   {advice_of(finding)}")
    return "\n".join(lines)


def say_losses(explanation: Explanation) -> list[str]:
    """From the ideal step to this one, as lines: what each stage adds."""
    losses = explanation.losses
    assert losses
    ideal = f"Ideal would be {milliseconds(losses.ideal_ms)}, one device's time over their number."
    if losses.distance_ms <= 0:
        return [f"{ideal} No step is longer than that."]
    step = losses.ideal_ms + losses.distance_ms
    lines = [f"{ideal} From there to {milliseconds(step)}:"]
    for name, ms in losses.stages().items():
        if abs(ms) >= LEAST_SHOWN * step:
            words = stage_words(name, ms, has_ranks=not losses.copies)
            lines.append(f"  {words:<34} {signed_ms(ms):>9} {abs(ms) / step:>4.0%}")
    return lines
