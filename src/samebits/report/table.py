"""The comparison as a table, on the terminal and in Markdown."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from samebits.report.text import answers, headline, name_of, remarks
from samebits.summary import times

COLUMNS = ("run", "devices", "seconds", "speed-up", "bound", "efficiency", "loss", "over floor", "accuracy",
           "same model", "weights")  # fmt: skip


def _sameness(row: dict[str, Any]) -> str:
    return row["verdict"]["grade"] if row["verdict"] else "–"


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """One row of the table, in the order of ``COLUMNS``."""
    efficiency, accuracy = row["scaling_efficiency"], row["accuracy"]
    return (
        name_of(row),
        f"{row['devices_used']} {'GPU' if row['device_type'] == 'cuda' else 'CPU'}",
        f"{row['training_seconds']:.2f}",
        times(row["speedup"]),
        times(row["bound"]),
        "–" if efficiency is None else f"{100 * efficiency:.0f}%",
        f"{row['eval_loss']:.4f}",
        "–" if row["above_floor"] is None else f"{100 * row['above_floor']:+.1f}%",
        "–" if accuracy is None else f"{100 * accuracy:.1f}%",
        _sameness(row),
        row["weights_sha256"][:12],
    )


LEGEND = (
    "speed-up: against single on this host, paired slices, median (range); bound: the same if communication cost "
    "nothing; efficiency: speed-up over devices; over floor: loss above the least that any model can reach; same "
    "model: losses and weights against the first run of the same numerics"
)


def markdown(comparison: dict[str, Any]) -> str:
    """Answers, table and remarks as Markdown."""
    lines = [headline(comparison), "", *(f"- {answer}" for answer in answers(comparison)), ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in comparison["rows"]]
    lines += ["", LEGEND + ".", ""]
    lines += [f"- {remark}" for remark in remarks(comparison)]
    return "\n".join(lines).rstrip() + "\n"


def show(comparison: dict[str, Any], console: Console | None = None) -> None:
    """Print what ``markdown`` writes; wide enough to keep every figure where stdout is not a terminal."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.width = 160
    table = Table(box=box.SIMPLE_HEAD)
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    for row in comparison["rows"]:
        table.add_row(*cells(row))
    console.print(headline(comparison), markup=False)
    for text in answers(comparison):
        console.print(f"- {text}", markup=False)
    console.print(table)
    console.print(f"{LEGEND}.", style="dim", markup=False)
    for remark in remarks(comparison):
        console.print(f"- {remark}", markup=False)
