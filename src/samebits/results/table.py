"""The comparison as a table, on the terminal and in Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from samebits.errors import printable
from samebits.results.ratios import gain, times
from samebits.results.text import answers, count_of, headline, remarks
from samebits.results.usage import joules, share
from samebits.strategies import BASELINE

if TYPE_CHECKING:
    from samebits.results.comparison import Comparison, RefusedRow, Row

COLUMNS = ("run", "devices", "seconds", "speed-up", "bound", "efficiency", "loss", "over floor", "accuracy",
           "same model", "roof", "energy", "weights")  # fmt: skip


def cells(row: Row) -> tuple[str, ...]:
    """One row of the table, in the order of ``COLUMNS``."""
    accuracy = row.accuracy
    return (
        row.name,
        f"{count_of(row.devices_used, row.devices_by_node)} {'GPU' if row.device_type == 'cuda' else 'CPU'}",
        f"{row.training_seconds:.2f}" + (", in parts" if any(note.kind == "resumed" for note in row.notes) else ""),
        gain(row.speedup),
        times(row.bound),
        _efficiency(row),
        f"{row.eval_loss:.4f}",
        "–" if row.above_floor is None else f"{100 * row.above_floor:+.1f}%",
        "–" if accuracy is None else f"{100 * accuracy:.1f}%",
        row.verdict.grade if row.verdict else "–",
        share(row.roof_share),
        joules(row.energy_j_per_million_samples),
        row.weights_sha256[:12],
    )


def refused_cells(row: RefusedRow) -> tuple[str, ...]:
    """The row of a run that was not trained."""
    told = {"run": row.run, "same model": f"refused: {row.what}"}
    return tuple(told.get(column, "–") for column in COLUMNS)


def _efficiency(row: Row) -> str:
    if row.scaling_efficiency is None:
        return "–"
    text = f"{100 * row.scaling_efficiency:.0f}%"
    if row.scaling_efficiency_interval is None or row.strategy == BASELINE.name:
        return text
    low, high = row.scaling_efficiency_interval
    return f"{text} ({100 * low:.0f}–{100 * high:.0f}%)"


LEGEND = (
    "speed-up: against single on this host, paired slices, median (95% interval; no difference is shown where that "
    "holds 1); bound: the same if communication cost nothing and devices did not slow each other down; efficiency: "
    "speed-up over devices; over floor: loss above the least that any model can reach; same model: losses and weights "
    "against the first run of the same numerics; roof: a device's rate against that of a product of matrices of the "
    "same precision; energy: of all devices, for a million samples"
)


def markdown(comparison: Comparison) -> str:
    """Answers, table and remarks as Markdown."""
    lines = [headline(comparison), "", *(f"- {answer}" for answer in answers(comparison)), ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    rows = [*map(cells, comparison.rows), *map(refused_cells, comparison.refused)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    lines += ["", LEGEND + ".", ""]
    lines += [f"- {remark}" for remark in remarks(comparison)]
    return "\n".join(lines).rstrip() + "\n"


def show(comparison: Comparison, console: Console | None = None) -> None:
    """Print what ``markdown`` writes; wide enough to keep every figure where stdout is not a terminal."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.width = 200
    table = Table(box=box.SIMPLE_HEAD)
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    for row in (*map(cells, comparison.rows), *map(refused_cells, comparison.refused)):
        table.add_row(*(Text(printable(cell)) for cell in row))
    console.print(printable(headline(comparison)), markup=False)
    for text in answers(comparison):
        console.print(f"- {printable(text)}", markup=False)
    console.print(table)
    console.print(f"{LEGEND}.", style="dim", markup=False)
    for remark in remarks(comparison):
        console.print(f"- {printable(remark)}", markup=False)
