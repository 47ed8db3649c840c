"""Results as sentences: a finished training, and a comparison."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING

from samebits.errors import counted
from samebits.results.figures import (
    NO_DIFFERENCE,
    is_open,
    milliseconds,
    times,
    times_of,
    undecided,
    wall_seconds,
)
from samebits.results.remarks import LABELS, all_notes, names_by, say_not_applied, say_refused, spoken
from samebits.results.usage import say_gaps, say_memory, say_use
from samebits.results.verdict_text import say_apart, sentences
from samebits.results.waterfall import why_untold
from samebits.strategies import BASELINE, STRATEGIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from samebits.host import HostFacts
    from samebits.records.run import Ratio, Run
    from samebits.results.comparison import Comparison, Row, SliceSteps
    from samebits.strategies.placement import Placement

_PALETTE = ("#0072B2", "#B87A00", "#00845F", "#A8598B", "#2C7FB8", "#B3470B")
_ON_DARK = ("#4FA8E0", "#E69F00", "#1FBF92", "#DE9CC3", "#8CCBF2", "#F0803A")
COLOURS = dict(zip(STRATEGIES, itertools.cycle(_PALETTE), strict=False))
"""Colours of the strategies, here and in MLflow: Okabe and Ito's, so dark that each has a contrast of 3 on white."""

ON_DARK = dict(zip(STRATEGIES, itertools.cycle(_ON_DARK), strict=False))
"""The same on a dark page."""

CHANGES = {"lost": ("#D55E00", "#F0803A"), "gain": ("#0072B2", "#56B4E9")}
"""Colours of what a change costs or saves, on a light and on a dark page."""

WORDS = {"ink": ("#151A21", "#E7EBF0"), "muted": ("#55606E", "#A4AFBC")}
"""Colours of words on a light and on a dark page."""


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
    lines += [f"note: {note.sentence()}" for note in all_notes(run)]
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


def say_speed(row: Row) -> str:
    """The speed-up of a strategy, its bound, and where the time of a step goes."""
    if row.strategy == BASELINE.name:
        return f"{row.name} on {devices_of(row)} is what the others are measured against."
    if row.speedup is None:
        return _say_without([row])[0]
    speed = times_of(row.speedup, "the speed of single") + undecided(row.speedup)
    text = f"{row.name} on {devices_of(row)} ran at {speed}, in slices that took turns"
    step = row.slice_step_ms
    if step is None or row.bound is None:
        return text + "."
    text += f": a step takes {milliseconds(step.strategy)}, on one device {milliseconds(step.single)}. "
    if untold := why_untold(row):
        return text + untold
    text += (
        f"Alone, without communication, a device needs {milliseconds(step.share)} for its share, which bounds the "
        f"speed at {times_of(row.bound)}"
    )
    parts = [f"{lost / step.strategy:.0%} ({milliseconds(lost)}) {what}" for what, lost in _lost_parts(step, row)]
    if parts:
        text += f". Of a step, {listed(parts)}"
    return text + "."


def _why_none(row: Row) -> str:
    """Why a row has no speed-up, with the label that says it."""
    if row.speedup_unavailable is None:
        return ": it was not measured"
    kind, text = row.speedup_unavailable.kind, row.speedup_unavailable.text
    return f" ({spoken(kind)}): {text}" if kind in LABELS else f": {text}"


def _say_without(rows: Iterable[Row]) -> list[str]:
    """One sentence for each reason why runs have no speed-up."""
    names = names_by((row.name, _why_none(row)) for row in rows)
    return [f"{listed(runs)} {'have' if len(runs) > 1 else 'has'} no speed-up{why}." for why, runs in names.items()]


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


def listed(parts: Sequence[str]) -> str:
    """Parts in a sentence: ``a``, ``a and b`` or ``a, b and c``."""
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last


def figures_in_words(comparison: Comparison) -> list[str]:
    """How well a device is used, each speed-up with its parts or why there is none, what ``exact`` refused, its price.

    Where the time of a step goes is said of the first numerics only.
    """
    rows = first_numerics(comparison)
    others = [row for row in comparison.rows if row.strategy != BASELINE.name]
    speeds = _say_without(row for row in others if row.speedup is None)
    speeds += [say_speed(row) for row in others if row.speedup and row in rows]
    prices = [say_price(row.price) for row in comparison.rows if row.price]
    refused = say_refused([(row.run, row.text, row.hint) for row in comparison.refused])
    return [*say_use(rows), *speeds, *refused, *prices]


def say_price(price: Ratio) -> str:
    """The price of the same bits on any host."""
    digits = 2 if is_open(price) else 1
    told = f"{price.median:.{digits}f} times the time of a fast step on one device"
    sure = "" if price.low == price.high else f", 95% sure: {price.low:.{digits}f} to {price.high:.{digits}f}"
    return f"A step in exact, with the same bits on any host, takes {told}{sure}{undecided(price)}."


def remarks(comparison: Comparison) -> list[str]:
    """Labels, notes, and settings that were not applied, of all runs; and why figures other than speed are missing."""
    said = ((row.name, line.removeprefix(f"{row.name}: ")) for row in comparison.rows for line in row_remarks(row))
    names = names_by(said)
    return [*(f"{', '.join(named)}: {text}" for text, named in names.items()), *say_gaps(comparison.rows)]


def row_remarks(row: Row) -> list[str]:
    """The remarks on one run, without the label that another sentence gives as the reason for no speed-up."""
    said = row.speedup_unavailable.kind if row.speedup_unavailable else None
    lines = [f"{row.name}: {spoken(label.kind)}: {label.text}" for label in row.labels if label.kind != said]
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
    return "\n\n".join(lines) + "\n\n" + "\n".join(f"- {remark}" for remark in row_remarks(row))
