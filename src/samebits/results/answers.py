"""The answers of a comparison, each in a figure and a few words: for the page, the terminal and MLflow."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from samebits.here import is_kit
from samebits.params import flatten
from samebits.records.run import precedence
from samebits.results.explanation.causes import CAUSES, OF_THE_HOST
from samebits.results.explanation.remedies import REMEDIES, values_after
from samebits.results.explanation.words import NOTHING, UNKNOWN, action_of, what_of
from samebits.results.figures import is_open, milliseconds, multiple, share, signed, times
from samebits.results.sameness import is_it_the_same
from samebits.results.text import devices_of, first_numerics, hardware
from samebits.results.verdict_text import SIGNS
from samebits.results.waterfall import why_no_speed_up, why_untold
from samebits.strategies import BASELINE
from samebits.strategies.placement import Placement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from samebits.records.run import Ratio
    from samebits.results.comparison import Comparison, Row
    from samebits.results.explanation.explain import ExplainedCause, LookedFor

TOO_SMALL = 1.3
"""Bound of a speed-up below which a model is said to be too small for several GPUs."""

LEAST_TOLD = 0.02
"""Least share of a step for which a cause is told that is too small to be named as one."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How much faster: the fastest run of several devices, or why there is none.

    ``figure`` is the speed-up, or a dash. ``told`` has a few words each, and begins with the devices.
    """

    state: Literal["faster", "no difference", "slower", "not parallel", "not measured", "one run"]
    row: Row | None
    figure: str
    told: tuple[str, ...]
    uncertain: bool = False

    @property
    def whole(self) -> str:
        """All of it in one line, with the badge."""
        return "; ".join([*self.told, *(["noisy host"] if self.uncertain else [])])


@dataclass(frozen=True, kw_only=True)
class Help:
    """What holds a run back, and what helps: ``figure`` is the predicted gain, or what is known in its place.

    ``command`` tries it; it is empty if no key of params.yaml does.
    """

    row: Row
    finding: ExplainedCause
    figure: str
    of: str
    cause: str
    lost: str
    action: str
    command: str
    another_training: bool

    @property
    def whole(self) -> str:
        """All of it in one line."""
        gain = self.finding.gain
        predicted = f"{signed(gain.low)} to {signed(gain.high)} predicted" if gain else "what that gains is not known"
        return f"{self.cause}, {self.lost}; {self.action}: {predicted}"


def speed_up(ratio: Ratio) -> str:
    """A speed-up without its interval: ``1.54x``."""
    return multiple(ratio.median)


def parallel(row: Row) -> bool:
    """Whether a run used several devices and has a speed-up."""
    return row.speedup is not None and row.strategy != BASELINE.name


def fastest(rows: Sequence[Row]) -> Row | None:
    """The fastest of the parallel ``rows``: of those shown to be faster than one device, else of all."""
    known = [(row, row.speedup) for row in rows if parallel(row) and row.speedup]
    shown = [(row, ratio) for row, ratio in known if ratio.low > 1]
    best = max(shown or known, key=lambda one: one[1].median, default=None)
    return best[0] if best else None


def how_much_faster(comparison: Comparison) -> Speed:
    """The first answer, of the first numerics."""
    rows = first_numerics(comparison)
    best = fastest(rows)
    if best is None:
        return _no_speed(rows)
    ratio = best.speedup
    assert ratio
    told = [f"{best.strategy} on {devices_of(best)}", f"95% sure: {ratio.low:.2f} to {ratio.high:.2f}"]
    if best.device_type == "cuda" and best.bound and best.bound.median < TOO_SMALL:
        larger = "a larger train.global_batch_size" + (", or PRESET=gpu make repro," if is_kit() else "")
        told.append(f"this model is too small for {best.devices_used} of these GPUs: {larger} would show a speed-up")
    told += [f"{row.strategy} was not measured" for row in rows if _is_unknown(row)]
    common: Any = {"row": best, "uncertain": best.uncertain}
    if is_open(ratio):
        told.append("no difference from one device is shown")
        return Speed(state="no difference", figure="≈ 1×", told=tuple(told), **common)
    if ratio.median < 1:
        told.append("slower than one device: use one, or change what follows")
        return Speed(state="slower", figure=speed_up(ratio), told=tuple(told), **common)
    rivals = {row.strategy: row.speedup for row in rows if row is not best and parallel(row)}
    told += [f"{name} is not shown to be slower" for name, other in rivals.items() if other and other.high >= ratio.low]
    return Speed(state="faster", figure=speed_up(ratio), told=tuple(told), **common)


def _is_unknown(row: Row) -> bool:
    """Whether a run of several devices may have a speed-up that nobody knows."""
    reason = row.speedup_unavailable
    return row.strategy != BASELINE.name and reason is not None and reason.kind not in Placement.NOT_A_SPEEDUP


def _no_speed(rows: Sequence[Row]) -> Speed:
    """Why no run has a speed-up."""
    others = [row for row in rows if row.strategy != BASELINE.name]
    if not others or len(rows) == 1:
        return Speed(
            state="one run", row=None, figure="–", told=(f"{rows[0].name} alone", "there is nothing to compare it with")
        )
    state: Literal["not parallel", "not measured"] = "not measured"
    if all(row.devices_used == 1 for row in others):
        state = "not parallel"
    several = [row for row in others if row.devices_used > 1] or others
    text = why_no_speed_up(next((row for row in several if row.speedup_unavailable), several[0]))
    lead = "nothing was parallel here" if state == "not parallel" else "not measured"
    return Speed(state=state, row=None, figure="–", told=(lead, text))


def helps(comparison: Comparison) -> list[Help]:
    """What to change: the causes of the run that the first answer is about, the largest first, then of others."""
    row = explained_row(comparison)
    rows = [row] if row else []
    rows += [one for one in first_numerics(comparison) if one is not row and parallel(one)]
    return [_help(comparison, one, finding) for one in rows for finding in _findings(one)]


def _findings(row: Row) -> Sequence[ExplainedCause]:
    """The causes of a run; on a host that is too unsteady for others, its own alone."""
    found = row.explanation.findings if row.explanation else ()
    return [one for one in found if one.cause in OF_THE_HOST] if why_untold(row) else found


def explained_row(comparison: Comparison) -> Row | None:
    """The run that the first answer is about, if its steps were divided into parts; else the one with most devices."""
    answered = how_much_faster(comparison).row
    if answered is not None and answered.explanation:
        return answered

    def order(row: Row) -> tuple[tuple[int, bool], bool]:
        return precedence(row.devices_used, row.strategy, has_ranks=row.has_ranks), row.slice_step_ms is not None

    return max((row for row in comparison.rows if row.explanation), key=order, default=None)


def nothing(comparison: Comparison) -> str:
    """What to say where no cause takes enough of a step to be named: the largest of those that were looked for."""
    row = explained_row(comparison)
    if row is None:
        return UNKNOWN
    if untold := why_untold(row):
        return untold
    largest = largest_unnamed(row)
    if largest is None:
        return NOTHING
    return f"{NOTHING} The largest: {short(CAUSES[largest.cause].sentence)}, {milliseconds(largest.ms or 0)}."


def largest_unnamed(row: Row) -> LookedFor | None:
    """The largest of the causes that take too little of a step to be named; None if each takes hardly any."""
    explanation = row.explanation
    if explanation is None or explanation.findings:
        return None
    least = LEAST_TOLD * explanation.step_ms
    small = [one for one in explanation.looked_for if one.state == "not_found" and (one.ms or 0) >= least]
    return max(small, key=lambda one: one.ms or 0, default=None)


def _help(comparison: Comparison, row: Row, finding: ExplainedCause) -> Help:
    figure, of = _gain(finding)
    return Help(
        row=row,
        finding=finding,
        figure=figure,
        of=of,
        cause=short(what_of(finding)),
        lost=f"{milliseconds(finding.lost_ms)} of a step",
        action=action_of(finding),
        command=command_for(comparison, finding),
        another_training=REMEDIES[finding.remedy].another_training,
    )


def command_for(comparison: Comparison, finding: ExplainedCause) -> str:
    """What somebody types to try a remedy, or the keys to set where DVC runs nothing; empty if no key does it."""
    params = flatten(comparison.params.model_dump(mode="json"))
    values = {key: value for key, value in values_after(finding.change, params).items() if params.get(key) != value}
    if not values or not values.keys() <= params.keys() or finding.remedy == "use_ddp":
        return ""  # a strategy is trained beside the others
    shown = {key: json.dumps(value).strip('"') for key, value in values.items()}
    if comparison.pipeline is None:
        return "\n".join(f"{key}: {value}" for key, value in shown.items())
    folder, _, _ = comparison.pipeline.rpartition("/")
    target, params_file = (f" {comparison.pipeline}", f"{folder}/params.yaml:") if folder else ("", "")
    return f"dvc exp run{target} " + " ".join(f"-S {params_file}{key}={value}" for key, value in shown.items())


def _gain(finding: ExplainedCause) -> tuple[str, str]:
    """The predicted gain and what it is of; without one, the share of a step that the cause takes."""
    if finding.gain is not None:
        return signed(finding.gain.median), "samples per second, predicted"
    if finding.share is not None:
        return share(finding.share), "of a step; what a change gains is not known"
    return milliseconds(finding.lost_ms), "of a step; what a change gains is not known"


def short(sentence: str) -> str:
    """The first part of a sentence, in the middle of another one."""
    first = sentence.partition(":")[0]
    return (
        first if first[1:2].isupper() or first.startswith(("DataParallel", "Python")) else first[0].lower() + first[1:]
    )


def headline(comparison: Comparison) -> str:
    """The answer in one sentence: ``ddp on 2 CPU devices: 1.54x the speed of one, and the same model``."""
    speed, same = how_much_faster(comparison), is_it_the_same(comparison)
    model = {
        "yes": ", and the same model",
        "no": ", and not the same model",
        "not judged": "; whether it is the same model cannot be told",
        "one run": "",
    }[same.state]
    if speed.row is None:
        lead = (
            "Nothing was parallel here" if speed.state == "not parallel" else "How much faster it is was not measured"
        )
        return (f"{comparison.rows[0].name} was trained alone" if speed.state == "one run" else lead) + model
    lead = f"{speed.row.strategy} on {devices_of(speed.row)}"
    if speed.state == "no difference":
        return f"{lead}: no difference from the speed of one is shown{model}"
    return f"{lead}: {speed.figure} the speed of one{model}"


def in_a_row(comparison: Comparison, row: Row) -> dict[str, str]:
    """What a list of trainings says of one of them, in a few words each."""
    grade = row.verdict.grade if row.verdict else None
    same = {"bitwise": "same bits", "within tolerance": "rounding"}
    finding = next(iter(_findings(row)), None)
    first = _help(comparison, row, finding) if finding else None
    return {
        "speed": times(row.speedup).replace("x", "×")
        if row.speedup
        else f"– {'fallback' if row.fallback else 'not measured'}",
        "same_model": f"{SIGNS[grade]} {same.get(grade, grade)}" if grade else "reference",
        "holds_back": first.cause if first else "–",
        "try": first.action + (f": {first.figure}" if first.finding.gain else "") if first else "–",
        "bits": row.weights_sha256[:8],
    }


def facts(comparison: Comparison) -> list[str]:
    """What was compared, and where."""
    commit = comparison.git.commit
    return [
        f"{comparison.model} on {comparison.task}",
        f"global batch {comparison.global_batch_size:,}",
        f"{comparison.steps:,} steps",
        hardware(comparison.host, "×"),
        f"torch {comparison.host.torch}",
        *([f"commit {commit[:7]}{' and changes' if comparison.git.dirty else ''}"] if commit else []),
    ]


def summary(comparison: Comparison) -> str:
    """The answers as four lines of Markdown."""
    speed, found, same = how_much_faster(comparison), helps(comparison), is_it_the_same(comparison)
    first = found[0].whole if found else nothing(comparison)
    return "\n".join(
        [
            f"**{headline(comparison)}** ({', '.join(facts(comparison))})",
            f"- How much faster? {speed.figure}, {speed.whole}",
            f"- What holds it back? {first}",
            f"- Is it the same model? {same.state}: "
            + "; ".join(f"{name}: {text}" for name, text in same.told.items()),
        ]
    )
