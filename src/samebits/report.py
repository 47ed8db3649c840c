"""The comparison for people: a table on the terminal and in Markdown, from ``comparison.json`` alone."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from samebits.summary import times

COLUMNS = ("run", "devices", "seconds", "speed-up", "bound", "efficiency", "loss", "over floor", "accuracy",
           "same as first", "weights")  # fmt: skip


def _sameness(row: dict[str, Any]) -> str:
    difference = row["loss_difference"]
    if row["strategy"] == difference["against"]:
        return "–"
    if difference["first_difference"] is None:
        return "same losses"
    return f"losses within {difference['largest_relative']:.1e}"


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """One row of the table, in the order of ``COLUMNS``."""
    efficiency, accuracy = row["scaling_efficiency"], row["accuracy"]
    return (
        f"{row['strategy']}-{row['numerics']}",
        f"{row['devices_used']} {'GPU' if row['device_type'] == 'cuda' else 'CPU'}",
        f"{row['training_seconds']:.2f}",
        times(row["speedup"]),
        times(row["bound"]),
        "–" if efficiency is None else f"{100 * efficiency:.0f}%",
        f"{row['eval_loss']:.4f}",
        f"{100 * row['above_floor']:+.1f}%",
        "–" if accuracy is None else f"{100 * accuracy:.1f}%",
        _sameness(row),
        row["weights_sha256"][:12],
    )


def remarks(comparison: dict[str, Any]) -> list[str]:
    """What a reader must know beside the figures: labels, notes, settings that were not applied."""
    found = []
    for row in comparison["rows"]:
        name = f"{row['strategy']}-{row['numerics']}"
        found += [f"{name}: {label['kind'].replace('_', ' ')}: {label['text']}" for label in row["labels"]]
        if row["speedup"] is None and row["speedup_unavailable"] not in [label["text"] for label in row["labels"]]:
            found.append(f"{name}: no speed-up: {row['speedup_unavailable']}")
        found += [f"{name}: {note}" for note in row["notes"]]
        found += [f"{name}: {key} was not applied: {why}" for key, why in row["not_applied"].items()]
    return found


def headline(comparison: dict[str, Any]) -> str:
    """What was compared, and where."""
    host = comparison["host"]
    gpus = [gpu["name"] for gpu in host["gpus"]]
    device = f"{len(gpus)} x {gpus[0]}" if gpus else f"{host['cpu']['model']}, {host['cpu']['cores']} cores, no GPU"
    return (
        f"{comparison['model']} on {comparison['task']}, global batch {comparison['global_batch_size']}, "
        f"{comparison['steps']} steps; {device}; torch {host['torch']}"
    )


LEGEND = (
    "speed-up: against single on this host, paired slices, median (range); bound: the same if communication cost "
    "nothing; efficiency: speed-up over devices; over floor: loss above the least that any model can reach"
)


def markdown(comparison: dict[str, Any]) -> str:
    """The table and the remarks as Markdown."""
    lines = [headline(comparison), "", "| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in comparison["rows"]]
    lines += ["", LEGEND + ".", ""]
    lines += [f"- {remark}" for remark in remarks(comparison)]
    return "\n".join(lines).rstrip() + "\n"


def show(comparison: dict[str, Any], console: Console | None = None) -> None:
    """Print the table and the remarks; wide enough to keep every figure where stdout is not a terminal."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.width = 160
    table = Table(box=box.SIMPLE_HEAD, title=headline(comparison), title_justify="left")
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    for row in comparison["rows"]:
        table.add_row(*cells(row))
    console.print(table)
    console.print(LEGEND, style="dim")
    for remark in remarks(comparison):
        console.print(f"- {remark}", markup=False)
