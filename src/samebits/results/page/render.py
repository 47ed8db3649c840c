"""The page from a comparison: what stands in each of its parts, and the template that it is put into."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from samebits.errors import counted
from samebits.here import repro_command
from samebits.results.answers import (
    LEAST_TOLD,
    Help,
    explained_row,
    facts,
    fastest,
    headline,
    helps,
    how_much_faster,
    largest_unnamed,
    nothing,
    parallel,
    speed_up,
    summary,
)
from samebits.results.explanation.causes import CAUSES
from samebits.results.explanation.words import PART_NAMES, figure_of
from samebits.results.figures import fine_percent, milliseconds, share
from samebits.results.page.charts import charts_of, squares
from samebits.results.page.falls import falls
from samebits.results.plots import LEAST_SHOWN
from samebits.results.remarks import LABELS, say_refused, spoken
from samebits.results.sameness import is_it_the_same
from samebits.results.since import since
from samebits.results.table import COLUMNS, cells, columns_of, short_devices
from samebits.results.text import CHANGES, COLOURS, ON_DARK, WORDS, by_numerics, exact_first, say_price
from samebits.results.usage import say_gaps, say_memory
from samebits.results.verdict import ALLOWANCE
from samebits.results.verdict_text import SIGNS, say_apart, sentences
from samebits.results.waterfall import Extent, percent, waterfall, why_untold
from samebits.strategies import BASELINE, STRATEGIES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from samebits.results.comparison import Comparison, Row


@dataclass(frozen=True)
class ChangeView:
    """A change to try: what is said of it, its evidence, and the bar of its gain."""

    help: Help
    evidence: tuple[tuple[str, str], ...]
    span: str
    bar: Extent | None
    whisker: Extent | None


def changes(comparison: Comparison) -> list[ChangeView]:
    """What to change, with gains on one axis."""
    found = helps(comparison)
    most = max((one.finding.gain.high - 1 for one in found if one.finding.gain), default=0.0)
    return [_change(one, 1.1 * max(most, 0.01)) for one in found]


def _change(one: Help, limit: float) -> ChangeView:
    gain = one.finding.gain
    of_step = "" if one.finding.share is None else f", {one.finding.share:.0%}"
    lost = ("lost in a step", f"{milliseconds(one.finding.lost_ms)}{of_step}")
    evidence = (*((figure.name, figure_of(figure)) for figure in one.finding.evidence), lost)
    span = f"{100 * (gain.low - 1):.0f} to {100 * (gain.high - 1):.0f}%" if gain else ""
    return ChangeView(
        help=one,
        evidence=evidence,
        span=span,
        bar=percent(0, gain.median - 1, limit) if gain else None,
        whisker=percent(gain.low - 1, gain.high - 1, limit) if gain else None,
    )


def not_to_change(comparison: Comparison) -> list[tuple[str, str, str]]:
    """Losses of the explained run that no advice is about: their names, words, and share of a step."""
    row = explained_row(comparison)
    if row is None or not row.explanation or not parallel(row):
        return []
    told = [one.cause for one in (*row.explanation.findings, largest_unnamed(row)) if one]
    advised = {loss for cause in told for loss in CAUSES[cause].losses}
    one = waterfall(row)
    step = one.step_ms or row.explanation.step_ms
    lost = [stage for stage in one.stages if stage.ms >= LEAST_TOLD * step and stage.name not in advised]
    return [(stage.name, stage.words, share(stage.ms / step)) for stage in lost]


@dataclass(frozen=True)
class Chip:
    """A run's weights: the sign before it, its hash, and the hash's squares."""

    sign: str
    name: str
    strategy: str
    on: str
    sha256: str
    squares: str


@dataclass(frozen=True)
class SameView:
    """The runs of one numerics: their chips, what is said of them, and the tolerance that is used, in %."""

    numerics: str
    chips: tuple[Chip, ...]
    told: str
    used: float | None
    gauge: str
    price: str


def same_models(comparison: Comparison) -> list[SameView]:
    """The weights of all runs, ``exact`` first, because it answers for any host."""
    told = is_it_the_same(comparison).told
    groups = by_numerics(comparison.rows)
    refused = {one.numerics for one in comparison.refused}
    return [_same(name, groups.get(name, []), told.get(name, "")) for name in exact_first({*groups, *refused})]


def _same(numerics: str, rows: Sequence[Row], told: str) -> SameView:
    chips = tuple(
        Chip(
            SIGNS[row.verdict.grade] if row.verdict else "",
            row.name,
            row.strategy,
            "not parallel" if row.fallback else short_devices(row),
            row.weights_sha256,
            squares(row.weights_sha256),
        )
        for row in rows
    )
    losses = [row.verdict.losses for row in rows if row.verdict]
    known = [(one.largest_relative / one.tolerance, one) for one in losses if one.largest_relative and one.tolerance]
    used, gauge = None, ""
    if known:
        used, worst = max(known, key=lambda one: one[0])
        gauge = f"{share(used)} of the {fine_percent(worst.tolerance or 0)} that rounding explains at that step"
    price = next((say_price(row.price) for row in rows if row.price), "")
    told = told if told.startswith(tuple(row.name for row in rows)) else told[:1].upper() + told[1:]
    return SameView(numerics, chips, told, None if used is None else min(100.0, 100 * used), gauge, price)


def parts_table(rows: Sequence[Row]) -> tuple[list[str], list[tuple[str, list[tuple[str, float]]]]]:
    """Names of the runs that were divided into parts, and each part's ms and share of the longest step in %.

    ``single`` was timed twice: by itself, when it was trained, and in the slices of the others. Its parts are scaled to
    the latter, as are all other figures of a step.
    """
    divided = [(row, row.explanation) for row in rows if row.explanation and not row.explanation.unsteady]
    timed = {row.numerics: row.slice_step_ms.single for row in rows if row.slice_step_ms}
    steps = [
        timed.get(row.numerics, one.step_ms) if row.strategy == BASELINE.name else one.step_ms for row, one in divided
    ]
    longest = max(steps, default=1.0)
    lines = []
    for key, name in PART_NAMES.items():
        took = [getattr(one.parts, key) * step / one.step_ms for (_, one), step in zip(divided, steps, strict=True)]
        if max(took, default=0.0) >= LEAST_SHOWN * longest:
            lines.append((name, [(milliseconds(ms), round(100 * ms / longest, 2)) for ms in took]))
    if divided:
        lines.append(("the whole step", [(milliseconds(step), 0.0) for step in steps]))
    return [row.name for row, _ in divided], lines


def notes(comparison: Comparison) -> dict[str, tuple[str, list[str]]]:
    """Labels and notes by kind: what the label means, and one line for each text with the runs that have it."""
    found: dict[str, dict[str, list[str]]] = {}

    def add(kind: str, text: str, row: Row) -> None:
        found.setdefault(kind, {}).setdefault(text, []).append(row.name)

    for row in comparison.rows:
        for one in (*row.labels, *row.notes):
            add(one.kind, one.text, row)
        for key, why in row.not_applied.items():
            add("not_applied", f"{key}: {why}", row)
        if row.price_unavailable:
            add("no_price", row.price_unavailable.text, row)
        if row.speedup_unavailable and row.speedup_unavailable.kind not in {label.kind for label in row.labels}:
            add("no_speed_up", row.speedup_unavailable.text, row)
    lines = {
        spoken(kind): (LABELS.get(kind, ""), [f"{', '.join(runs)}: {text}" for text, runs in texts.items()])
        for kind, texts in found.items()
    }
    if gaps := say_gaps(comparison.rows):
        lines["not measured"] = ("", gaps)
    return lines


@cache
def _source(name: str) -> str:
    return (files("samebits.results.page") / name).read_text(encoding="utf-8")


def render(comparison: Comparison, against: Comparison | None = None) -> str:
    """The page, which also says what changed since the comparison ``against``."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("samebits.results.page", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = _source("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    groups = by_numerics(comparison.rows)
    first, *others = groups
    row = explained_row(comparison)
    columns, lost = columns_of(comparison), not_to_change(comparison)
    context: dict[str, Any] = {
        "policy": f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'",
        "style": Markup(_source("page.css")),  # noqa: S704 - ours
        "script": Markup(script),  # noqa: S704 - ours
        "colours": {**{name: (COLOURS[name], ON_DARK[name]) for name in STRATEGIES}, **CHANGES, **WORDS},
        "comparison": comparison,
        "headline": headline(comparison),
        "facts": facts(comparison),
        "summary": summary(comparison),
        "since": since(comparison, against) if against else None,
        "speed": how_much_faster(comparison),
        "changes": changes(comparison),
        "not_to_change": lost,
        "nothing": nothing(comparison),
        "explained": row,
        "untold": row and why_untold(row),
        "looked_for": _looked_for(row, [name for name, _, _ in lost]),
        "same": is_it_the_same(comparison),
        "falls": falls(groups[first]),
        "other_falls": {name: falls(groups[name]) for name in others},
        "other_speeds": {name: _speed_of(groups[name]) for name in others},
        "models": same_models(comparison),
        "refused": say_refused([(one.run, one.text, one.hint) for one in comparison.refused]),
        "columns": columns,
        "tables": {name: [(one, cells(one, columns)) for one in rows] for name, rows in groups.items()},
        "charts": {name: charts_of(rows) for name, rows in groups.items()},
        "parts": parts_table(comparison.rows),
        "memory": [(one.name, say_memory(one.memory, one.strategy)) for one in comparison.rows if one.memory],
        "notes": notes(comparison),
        "verdicts": [
            (one.name, one.verdict, [*say_apart(one.verdict), *sentences(one.verdict)])
            for one in comparison.rows
            if one.verdict
        ],
        "allowance": ALLOWANCE,
        "hashes": [(one.name, one.weights_sha256) for one in comparison.rows],
        "repro": repro_command(),
        "counted": counted,
        "usual": {column.heading for column in COLUMNS if column.usual},
    }
    return environment.get_template("page.html").render(context)


def _speed_of(rows: Sequence[Row]) -> str:
    best = fastest(rows)
    return speed_up(best.speedup) if best and best.speedup else "no speed-up"


def _looked_for(row: Row | None, shown: Sequence[str]) -> dict[str, list[tuple[str, str]]]:
    """The causes that were not found, and those of which nothing could be said: what they are, and ms or why.

    Without those that are behind losses that the page shows as ones that nothing can be set for.
    """
    looked = row.explanation.looked_for if row and row.explanation else ()

    def words(cause: str) -> str:
        return CAUSES[cause].sentence.partition(":")[0].format(rank="N", phase="part")

    return {
        "not_found": [
            (words(one.cause), milliseconds(one.ms) if one.ms else "") for one in looked if one.state == "not_found"
        ],
        "not_judged": [
            (words(one.cause), one.why or "")
            for one in looked
            if one.state == "not_judged" and not {*CAUSES[one.cause].losses} & {*shown}
        ],
    }
