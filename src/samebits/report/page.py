"""``reports/index.html``: one page with everything in it, from ``comparison.json`` alone."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from samebits.files import write_text
from samebits.report.plots import TITLES, draw, write_tables
from samebits.report.table import COLUMNS, LEGEND, cells, markdown
from samebits.report.text import LABELS, answers, headline, name_of, remarks
from samebits.verdict import ALLOWANCE

if TYPE_CHECKING:
    from pathlib import Path

CAPTIONS = {
    "loss_by_step": "Every strategy sees the same batches in the same order, so the lines should lie on each other; "
    "the dotted line is the floor, the least that any model can reach on new data; below it a model has learned its "
    "batches by heart.",
    "loss_by_seconds": "The same losses against time: further left is faster.",
    "step_times": "The share of steps that took at most so long. Steep is regular; a long tail is a busy host.",
    "speedups": "Each point is a median with its range; the dashed line is what the devices could give at most, the "
    "dash beside a point what this strategy would give if communication cost nothing.",
}


def write_report(comparison: dict[str, Any], folder: Path) -> None:
    """Write the table, the page, its plots and their tables to ``folder``."""
    write_text(folder / "comparison.md", markdown(comparison))
    plots = draw(comparison, folder / "plots")
    write_tables(comparison, folder)
    write_text(folder / "index.html", render(comparison, plots))


def render(comparison: dict[str, Any], plots: dict[str, str]) -> str:
    """The page, with the SVGs of ``plots`` inside."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("samebits.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    labels = {label["kind"] for row in comparison["rows"] for label in row["labels"]}
    return environment.get_template("page.html").render(
        comparison=comparison,
        headline=headline(comparison),
        answers=answers(comparison),
        columns=COLUMNS,
        table=[cells(row) for row in comparison["rows"]],
        legend=LEGEND,
        allowance=ALLOWANCE,
        remarks=remarks(comparison),
        labels={kind.replace("_", " "): LABELS[kind] for kind in LABELS if kind in labels},
        verdicts=[(name_of(row), row["verdict"]) for row in comparison["rows"] if row["verdict"]],
        hashes=[(name_of(row), row["weights_sha256"]) for row in comparison["rows"]],
        plots=[(TITLES[name], Markup(_inline(svg)), CAPTIONS[name]) for name, svg in plots.items()],  # noqa: S704 - ours
    )


def _inline(svg: str) -> str:
    """An SVG as an element of a page: no prolog, as wide as the page, and the page's font."""
    svg = svg[svg.index("<svg") :]
    return re.sub(
        r'(<svg[^>]*?) height="[^"]*"([^>]*?) width="[^"]*"|(<svg[^>]*?) width="[^"]*"', r"\1\2\3", svg, count=1
    )
