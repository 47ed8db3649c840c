"""The report as files, and as a part of another page: all of it from ``comparison.json``."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from samebits.files import write_text
from samebits.results.page.render import render
from samebits.results.plots import draw, remove_former, write_tables
from samebits.results.table import markdown
from samebits.results.where import draw_where

if TYPE_CHECKING:
    from pathlib import Path

    from samebits.results.comparison import Comparison


def write_report(comparison: Comparison, folder: Path, against: Comparison | None = None) -> None:
    """Write the table, the page, the plots and their tables to ``folder``; the page also compares ``against``."""
    remove_former(folder)
    write_text(folder / "comparison.md", markdown(comparison))
    draw(comparison, folder / "plots")
    draw_where(comparison, folder / "plots")
    write_tables(comparison, folder)
    write_text(folder / "index.html", render(comparison, against))


def as_frame(comparison: Comparison) -> str:
    """The page as an element of another page, with styles of its own."""
    return (
        f'<iframe srcdoc="{escape(render(comparison))}" style="width: 100%; height: 40em; border: 0" sandbox></iframe>'
    )
