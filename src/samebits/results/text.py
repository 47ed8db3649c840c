"""Results as sentences: a finished training, and a comparison."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING

from samebits.errors import counted
from samebits.here import of_kit
from samebits.remarks import LABELS
from samebits.results.figures import (
    NO_DIFFERENCE,
    fine_percent,
    is_open,
    milliseconds,
    times,
    times_of,
    undecided,
    wall_seconds,
)
from samebits.results.remarks import say_not_applied, say_refused, spoken
from samebits.results.usage import say_gaps, say_memory, say_use
from samebits.results.verdict import GRADES
from samebits.results.verdict_text import say_apart, sentences
from samebits.strategies import BASELINE, STRATEGIES
from samebits.strategies.placement import Placement

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from samebits.host import HostFacts
    from samebits.records.run import Ratio, Run
    from samebits.results.comparison import Comparison, Row, SliceSteps
    from samebits.results.verdict import LossVerdict, WeightsVerdict

_PALETTE = ("#0072B2", "#B87A00", "#00845F", "#A8598B", "#2C7FB8", "#B3470B")
_ON_DARK = ("#4FA8E0", "#E69F00", "#1FBF92", "#DE9CC3", "#8CCBF2", "#F0803A")
COLOURS = dict(zip(STRATEGIES, itertools.cycle(_PALETTE), strict=False))
"""Colours of the strategies, here and in MLflow: Okabe and Ito's, so dark that each has a contrast of 3 on white."""

ON_DARK = dict(zip(STRATEGIES, itertools.cycle(_ON_DARK), strict=False))
"""The same on a dark page."""

CHANGES = {"lost": ("#D55E00", "#F0803A"), "gain": ("#0072B2", "#56B4E9")}
"""Colours of what a change costs or saves, on a light and on a dark page."""

TOO_SMALL = 1.3
"""Bound of a speed-up below which a model is said to be too small for several GPUs."""

NOISY_SHARE = 1.1
"""How many times a step of the whole a device's share of it may take before noise alone explains that."""


def devices_of(placed: Placement | Row) -> str:
    """The devices of a placement or of a row: ``2 GPUs``."""
    kind = "GPU" if placed.device_type == "cuda" else "CPU device"
    devices = counted(placed.devices_used, kind)
    return f"{devices} of {len(placed.devices_by_node)} machines" if placed.devices_by_node else devices


def count_of(devices: int, by_node: Sequence[int]) -> str:
    """The number of devices, and on several machines the number on each: ``4``, ``2x2`` or ``2+1``."""
    if not by_node:
        return str(devices)
    return f"{len(by_node)}x{by_node[0]}" if len({*by_node}) == 1 else "+".join(map(str, by_node))


# -- a finished training ------------------------------------------------------------------------------------


def describe_run(run: Run) -> str:
    """One line about a training."""
    record, timing = run.record, run.timing
    parts = [
        f"{run.name}: {wall_seconds(timing.training_seconds)} s",
        f"median step {milliseconds(timing.step_time_ms)}",
        f"{timing.samples_per_sec:,.0f} samples/s",
    ]
    if timing.speedup:
        shown = f" ({NO_DIFFERENCE})" if is_open(timing.speedup) else ""
        parts.append(f"{times(timing.speedup)} single{shown}, bound {times(timing.bound)}")
    elif record.speedup_unavailable:
        parts.append(f"no speed-up: {record.speedup_unavailable.sentence()}")
    return ", ".join(parts) + f", weights {record.weights_sha256[:12]}"


def notes_of(run: Run) -> list[str]:
    """Labels of a training, its notes, and its settings that were not applied."""
    record = run.record
    lines = [f"{spoken(label.kind)}: {label.sentence()}" for label in record.placement.labels]
    lines += [f"note: {note.sentence()}" for note in record.notes]
    return lines + [f"note: {key} was not applied: {why}" for key, why in say_not_applied(record).items()]


# -- a comparison -------------------------------------------------------------------------------------------


def by_numerics(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows by numerics. Only rows of the same numerics are compared with each other."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.numerics, []).append(row)
    return groups


def first_numerics(comparison: Comparison) -> list[Row]:
    """The rows of the first numerics, which the answers about speed are of."""
    return next(iter(by_numerics(comparison.rows).values()))


def exact_first(numerics: Iterable[str]) -> list[str]:
    """Names of numerics in the order in which sameness is told: ``exact`` answers for any host."""
    return sorted(numerics, key=lambda name: (name != "exact", name))


def hardware(host: HostFacts, times: str = "x") -> str:
    """The GPUs of a host with their numbers, or its CPU."""
    gpus = Counter(gpu.name for gpu in host.gpus)
    named = " and ".join(f"{count} {times} {name}" for name, count in gpus.items())
    return named or f"{host.cpu.model}, {host.cpu.cores} cores, no GPU"


def headline(comparison: Comparison) -> str:
    """What was compared, and on which host."""
    return (
        f"{comparison.model} on {comparison.task}, global batch {comparison.global_batch_size}, "
        f"{comparison.steps} steps; {hardware(comparison.host)}; torch {comparison.host.torch}"
    )


def say_fastest(comparison: Comparison) -> str:
    """The fastest strategy here, by the intervals of the speed-ups in the first numerics."""
    first = first_numerics(comparison)
    others = [row for row in first if row.strategy != BASELINE.name]
    measured = [(row, row.speedup) for row in others if row.speedup]
    unknown = {
        row.name: reason.text
        for row in others
        if (reason := row.speedup_unavailable) and reason.kind not in Placement.NOT_A_SPEEDUP
    }
    missing = f" {_listed([*unknown])} had no speed-up measured." if unknown else ""
    if faster := [(row, ratio) for row, ratio in measured if ratio.low > 1]:
        best, ratio = max(faster, key=lambda one: one[1].median)
        rivals = [row.name for row, speedup in measured if row is not best and speedup.high >= ratio.low]
        behind = (
            f"; {_listed(rivals)} {'are' if rivals[1:] else 'is'} not shown to be slower than that" if rivals else ""
        )
        return f"Fastest here is {best.name} on {devices_of(best)}: {times_single(best)}{behind}.{missing}"
    if undecided := [f"{row.name}, {_times_single(ratio)}" for row, ratio in measured if is_open(ratio)]:
        return f"None is shown to be faster here than one device: {NO_DIFFERENCE} for {_listed(undecided)}.{missing}"
    if unknown:
        return f"Which strategy is fastest here was not measured: {next(iter(unknown.values()))}."
    if measured and len(others) == len(first):  # nobody knows what single would do but by the slices
        return f"One device is faster here than {_listed([row.name for row, _ in measured])}: single was not trained."
    if measured:
        return f"Fastest here is single-{first[0].numerics}: no other strategy beat one device."
    if not others:
        return f"Fastest here is {first[0].name}: nothing else was trained."
    unlike = [reason.text for row in others if (reason := row.speedup_unavailable) and reason.kind == "oversubscribed"]
    if unlike:
        return f"Which strategy is fastest here was not measured: {unlike[0]}."
    if len(others) == len(first):
        return (
            f"Which strategy is fastest here was not measured: {_listed([row.name for row in others])} used one device."
        )
    return f"Fastest here is single-{first[0].numerics}: no other strategy could use more than one device."


def times_single(row: Row) -> str:
    """A speed-up with its interval; it says if no difference is shown."""
    assert row.speedup
    return _times_single(row.speedup) + undecided(row.speedup)


def _times_single(ratio: Ratio) -> str:
    return times_of(ratio, "the speed of single")


def say_speed(row: Row) -> str:
    """The speed-up of a strategy, its bound, and where the time of a step goes."""
    if row.strategy == BASELINE.name:
        return f"{row.name} on {devices_of(row)} is what the others are measured against."
    if row.speedup is None:
        if row.speedup_unavailable is None:
            return f"{row.name} has no speed-up: it was not measured."
        kind, text = row.speedup_unavailable.kind, row.speedup_unavailable.text
        named = f" ({spoken(kind)})" if kind in LABELS else ""
        return f"{row.name} has no speed-up{named}: {text}."
    text = f"{row.name} on {devices_of(row)} ran at {times_single(row)}, in slices that took turns"
    step = row.slice_step_ms
    if step is None or row.bound is None:
        return text + "."
    text += f": a step takes {milliseconds(step.strategy)}, on one device {milliseconds(step.single)}. "
    if step.share > step.strategy * NOISY_SHARE:
        alone = f"Alone, a device needs {milliseconds(step.share)} for its share, longer than a whole step"
        return f"{text}{alone}: this host was too noisy to tell where the time goes."
    text += (
        f"Alone, without communication, a device needs {milliseconds(step.share)} for its share, which bounds the "
        f"speed at {times_of(row.bound)}"
    )
    if row.device_type == "cuda" and row.bound.median < TOO_SMALL:
        text += (
            f". This model is too small for {row.devices_used} of these GPUs: a larger train.global_batch_size, or the "
            f"larger model of {of_kit('`PRESET=gpu make repro`')}, would show a speed-up"
        )
    parts = [f"{lost / step.strategy:.0%} ({milliseconds(lost)}) {what}" for what, lost in _lost_parts(step, row)]
    if parts:
        text += f". Of a step, {_listed(parts)}"
    return text + "."


def _lost_parts(step: SliceSteps, row: Row) -> list[tuple[str, float]]:
    """How much longer a step is than one device's share: words and ms of each part.

    Parts that noise makes negative, or longer than the step, are left out.
    """
    several = len(row.devices_by_node) > 1
    alone = step.share if step.together is None else step.together
    within = step.node if step.node is not None else alone if several else step.strategy
    sent = "communication and waiting" if row.has_ranks else "copies, communication and waiting"
    parts = {
        "is lost as devices slow each other down": alone - step.share,
        f"goes to {sent}" + (" inside machines" if several else ""): within - alone,
        "goes to the network and to waiting for other machines": step.strategy - within,
    }
    return [(what, lost) for what, lost in parts.items() if 0 < lost < step.strategy]


def _listed(parts: Sequence[str]) -> str:
    *most, last = parts
    return f"{', '.join(most)}, and {last}" if most else last


def say_sameness(rows: Sequence[Row], *, own_dataset: bool = False) -> str:
    """Whether runs of one numerics are the same model. With ``own_dataset``, samples are what a user's code gives."""
    verdicts = [(row.name, row.verdict) for row in rows if row.verdict]
    if not verdicts:
        return f"{rows[0].name} alone: there is nothing to compare it with."
    what = f"Same model in {rows[0].numerics} numerics"
    strategies = [row.strategy for row in rows]
    under = "every strategy" if {*strategies} == {*STRATEGIES} else " and ".join(strategies)
    name, worst = max(verdicts, key=lambda item: GRADES.index(item[1].grade))
    if worst.grade == "bitwise":
        if rows[0].numerics == "exact":
            other = [f"; but {verdict.other_data} ({name})" for name, verdict in verdicts if verdict.other_data]
            given = " where the dataset gives the same samples" if own_dataset else ""
            elsewhere = other[0] if other else f", and so on any host{given}"
            return f"{what}: yes, bit by bit, under {under}{elsewhere}."
        if all(row.devices_used == 1 for row in rows):
            return f"{what}: yes, bit by bit, but no strategy used more than one device."
        return f"{what}: yes, bit by bit, under {under}."
    of_losses, of_weights = sentences(worst)
    if worst.grade == "not comparable":
        return f"{what}: {'. '.join(text[0].upper() + text[1:] for text in say_apart(worst))} ({name})."
    if worst.grade == "diverged":
        data = f" {worst.data[0].upper()}{worst.data[1:]}." if worst.data else ""
        return f"{what}: NO. {name} against {worst.against}: {of_losses}; {of_weights}.{data}"
    begin = f"{what}: yes, within what rounding explains"
    name, losses = max(((name, verdict.losses) for name, verdict in verdicts), key=lambda one: _largest(one[1]))
    furthest, weights = max(((name, verdict.weights) for name, verdict in verdicts), key=lambda one: _largest(one[1]))
    if not losses.largest_relative or losses.tolerance is None:
        place = f"{weights.different} of {weights.tensors} tensors"
        return f"{begin}: losses are the same; {furthest} differs in {place}, weights by {_percent_of(weights)}."
    return (
        f"{begin}: losses differ by {fine_percent(losses.largest_relative)} at most "
        f"({name}, step {losses.largest_at}, where {fine_percent(losses.tolerance)} passes)"
        + (f", weights by {_percent_of(weights)}." if weights.largest_relative else ".")
    )


def _percent_of(weights: WeightsVerdict) -> str:
    """The largest difference of a tensor relative to its size, which may be the sign of zeros alone."""
    if not weights.largest_relative:
        return "the sign of zeros"
    where = f"{weights.largest_in}, where {fine_percent(weights.tolerance)} passes"
    return f"{fine_percent(weights.largest_relative)} at most ({where})"


def _largest(verdict: LossVerdict | WeightsVerdict) -> float:
    return verdict.largest_relative or 0.0


def answers(comparison: Comparison) -> list[str]:
    """The short answers: the fastest strategy, use of a device, each speed-up, sameness, and the price of exact."""
    groups = list(by_numerics(comparison.rows).values())
    speeds = [say_speed(row) for row in groups[0] if row.strategy != BASELINE.name]
    prices = [say_price(row.price) for row in comparison.rows if row.price]
    refused = say_refused([(row.run, row.text, row.hint) for row in comparison.refused])
    own_dataset = comparison.params.data.task == "dataset"
    same = [say_sameness(rows, own_dataset=own_dataset) for rows in groups]
    return [say_fastest(comparison), *say_use(groups[0]), *speeds, *same, *refused, *prices]


def say_price(price: Ratio) -> str:
    """The price of the same bits on any host."""
    told = times_of(price, "the time of a fast step on one device", digits=2 if is_open(price) else 1)
    return f"A step in exact, with the same bits on any host, takes {told}{undecided(price)}."


def remarks(comparison: Comparison) -> list[str]:
    """Labels, notes, and settings that were not applied, of all runs; and why figures are missing."""
    first = first_numerics(comparison)
    names: dict[str, list[str]] = {}
    for row in comparison.rows:
        for line in row_remarks(row, speed_is_said=row in first):
            names.setdefault(line.removeprefix(f"{row.name}: "), []).append(row.name)
    return [*(f"{', '.join(named)}: {text}" for text, named in names.items()), *say_gaps(comparison.rows)]


def row_remarks(row: Row, *, speed_is_said: bool) -> list[str]:
    """The remarks on one run. With ``speed_is_said``, another sentence says why it has no speed-up."""
    reason = row.speedup_unavailable
    told = reason is not None and speed_is_said
    lines = [
        f"{row.name}: {spoken(label.kind)}: {label.text}"
        for label in row.labels
        if not (told and reason and label.kind == reason.kind)
    ]
    if reason and not speed_is_said and reason.kind not in {label.kind for label in row.labels}:
        lines.append(f"{row.name}: no speed-up: {reason.text}")
    lines += [f"{row.name}: {note.text}" for note in row.notes]
    if row.price_unavailable:
        lines.append(f"{row.name}: no price of exact: {row.price_unavailable.text}")
    if row.memory is not None:
        lines.append(f"{row.name}: {say_memory(row.memory, row.strategy)}")
    return lines + [f"{row.name}: {key} was not applied: {why}" for key, why in row.not_applied.items()]


def describe_row(row: Row) -> str:
    """The description of a run in Markdown."""
    floor = "" if row.above_floor is None else f", {100 * row.above_floor:+.1f}% from the floor"
    lines = [say_speed(row), f"Test loss {row.eval_loss:.4f}{floor}."]
    if row.verdict:
        lines += [f"Against {row.verdict.against}: **{row.verdict.grade}**."]
        lines += [f"- {sentence}" for sentence in [*say_apart(row.verdict), *sentences(row.verdict)]]
    return "\n\n".join(lines) + "\n\n" + "\n".join(f"- {remark}" for remark in row_remarks(row, speed_is_said=True))
