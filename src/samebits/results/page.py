"""``reports/index.html``: the whole report on one page, from ``comparison.json`` alone."""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING

from samebits.files import scratch_folder, write_text
from samebits.here import repro_command
from samebits.remarks import LABELS
from samebits.results.explanation.section import why_section
from samebits.results.plots import TITLES, draw, remove_former, write_tables
from samebits.results.remarks import spoken
from samebits.results.table import LEGEND, cells, columns_of, markdown
from samebits.results.text import answers, by_numerics, headline, remarks
from samebits.results.verdict import ALLOWANCE
from samebits.results.verdict_text import say_apart, sentences

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from samebits.results.comparison import Comparison, Row
    from samebits.results.table import Column

CAPTIONS = {
    "loss_by_step": "Every strategy sees the same batches in the same order, so the lines should lie on each other; "
    "the dotted line is the floor, the least that any model can reach on new data; below it a model has learned its "
    "batches by heart.",
    "loss_by_seconds": "The same losses against time, each plot on a scale of its own: further left is faster.",
    "breakdown": "The parts of a step as a pass of its own measured them, apart from the steps that are timed. They "
    "add up to the step.",
    "step_times": "The share of steps that took at most so long. Steep is regular; a long tail is a busy host.",
    "speedups": "Each point is a median with its 95% interval, filled in fast numerics and hollow in exact; where the "
    "interval holds 1, no difference is shown. The grey bar is the number of devices, the dash what this strategy "
    "would give if communication cost nothing and devices did not slow each other down. A run without a point "
    "has no speed-up.",
}


def write_report(comparison: Comparison, folder: Path) -> None:
    """Write the table, the page, its plots and their tables to ``folder``."""
    remove_former(folder)
    write_text(folder / "comparison.md", markdown(comparison))
    plots = draw(comparison, folder / "plots")
    write_tables(comparison, folder)
    write_text(folder / "index.html", render(comparison, plots))


def as_frame(comparison: Comparison) -> str:
    """The page as an element of another page, with styles of its own."""
    with scratch_folder() as folder:
        page = render(comparison, draw(comparison, folder))
    return f'<iframe srcdoc="{escape(page)}" style="width: 100%; height: 40em; border: 0" sandbox></iframe>'


def render(comparison: Comparison, plots: dict[str, list[str]]) -> str:
    """The page, with the SVGs of ``plots`` in it."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("samebits.results", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    labels = {label.kind for row in comparison.rows for label in row.labels}
    columns = columns_of(comparison)
    return environment.get_template("page.html").render(
        comparison=comparison,
        repro=repro_command(),
        headline=headline(comparison),
        why=why_section(comparison),
        answers=answers(comparison),
        tables=[_table(rows, columns) for rows in by_numerics(comparison.rows).values()],
        legend=LEGEND,
        allowance=ALLOWANCE,
        fast=any(row.verdict and row.numerics == "fast" for row in comparison.rows),
        twins=any(row.verdict and row.verdict.losses.measured for row in comparison.rows),
        remarks=remarks(comparison),
        labels={spoken(kind): text for kind, text in LABELS.items() if kind in labels},
        verdicts=[
            (row.name, row.verdict, [*say_apart(row.verdict), *sentences(row.verdict)])
            for row in comparison.rows
            if row.verdict
        ],
        hashes=[(row.name, row.weights_sha256) for row in comparison.rows],
        plots=[
            (TITLES[name], [Markup(_inline(svg)) for svg in svgs], CAPTIONS[name])  # noqa: S704 - ours
            for name, svgs in plots.items()
        ],
    )


def _table(rows: Sequence[Row], columns: Sequence[Column]) -> list[tuple[str, ...]]:
    """Each heading with the cells of all runs below it."""
    headings = [column.heading for column in columns]
    return list(zip(headings, *(cells(row, columns) for row in rows), strict=True))


def _inline(svg: str) -> str:
    """An SVG as an element of the page: without its prolog and its fixed size."""
    svg = svg[svg.index("<svg") :]
    return re.sub(
        r'(<svg[^>]*?) height="[^"]*"([^>]*?) width="[^"]*"|(<svg[^>]*?) width="[^"]*"', r"\1\2\3", svg, count=1
    )
