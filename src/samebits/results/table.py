"""The figures of a comparison as columns, and as a table in Markdown."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from samebits.errors import printable
from samebits.results.answers import summary
from samebits.results.figures import gain, joules, share, times, wall_seconds
from samebits.results.text import count_of, figures_in_words, remarks
from samebits.strategies import BASELINE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from samebits.results.comparison import Comparison, RefusedRow, Row

NONE = "–"


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of the table: its heading, its cell for a run, and its legend.

    ``metric`` is the name of the same figure in MLflow. ``usual``: the page shows it without being asked.
    """

    heading: str
    cell: Callable[[Row], str]
    legend: str = ""
    metric: str = ""
    usual: bool = False


def _seconds(row: Row) -> str:
    text = wall_seconds(row.training_seconds)
    return f"{text}, in parts" if any(note.kind == "resumed" for note in row.notes) else text


def short_devices(row: Row) -> str:
    """The devices of a run in a cell: ``4 GPU``, ``2x2 GPU`` on two machines."""
    return f"{count_of(row.devices_used, row.devices_by_node)} {'GPU' if row.device_type == 'cuda' else 'CPU'}"


def _efficiency(row: Row) -> str:
    if row.scaling_efficiency is None:
        return NONE
    text = f"{100 * row.scaling_efficiency:.0f}%"
    if row.scaling_efficiency_interval is None or row.strategy == BASELINE.name:
        return text
    low, high = row.scaling_efficiency_interval
    return f"{text} ({100 * low:.0f}–{100 * high:.0f}%)"


COLUMNS = (
    Column(heading="run", usual=True, cell=lambda row: row.name),
    Column(heading="devices", usual=True, cell=short_devices),
    Column(
        heading="seconds",
        usual=True,
        cell=_seconds,
        legend="wall time of the training; runs are minutes apart, so do not divide them",
        metric="training_seconds",
    ),
    Column(
        heading="speed-up",
        usual=True,
        cell=lambda row: gain(row.speedup),
        legend="against single on this host, paired slices, median (95% interval; no difference is shown where that "
        "holds 1)",
        metric="speedup",
    ),
    Column(
        heading="bound",
        usual=True,
        cell=lambda row: times(row.bound),
        legend="the same if communication cost nothing and devices did not slow each other down",
        metric="bound",
    ),
    Column(heading="efficiency", cell=_efficiency, legend="speed-up over devices", metric="scaling_efficiency"),
    Column(heading="loss", usual=True, cell=lambda row: f"{row.eval_loss:.4f}", metric="eval_loss"),
    Column(
        heading="over floor",
        cell=lambda row: NONE if row.above_floor is None else f"{100 * row.above_floor:+.1f}%",
        legend="loss above the least that any model can reach",
    ),
    Column(
        heading="accuracy",
        cell=lambda row: NONE if row.accuracy is None else f"{100 * row.accuracy:.1f}%",
        metric="accuracy",
    ),
    Column(
        heading="same model",
        usual=True,
        cell=lambda row: row.verdict.grade if row.verdict else NONE,
        legend="losses and weights against the first run of the same numerics",
    ),
    Column(
        heading="roof",
        cell=lambda row: share(row.roof_share),
        legend="a device's rate against that of a product of matrices of the same precision",
    ),
    Column(
        heading="energy",
        cell=lambda row: joules(row.energy_j_per_million_samples),
        legend="of all devices, for a million samples",
    ),
    Column(heading="weights", cell=lambda row: row.weights_sha256[:12]),
)
"""The columns in order of display, on the terminal, on the page and in MLflow."""


def columns_of(comparison: Comparison) -> tuple[Column, ...]:
    """The columns of a comparison, with the user's own metrics beside the accuracy."""
    names = dict.fromkeys(name for row in comparison.rows for name in row.metrics)
    own = (Column(heading=printable(name), cell=partial(own_metric, name)) for name in names)
    after = next(number for number, one in enumerate(COLUMNS, start=1) if one.metric == "accuracy")
    return (*COLUMNS[:after], *own, *COLUMNS[after:])


def own_metric(name: str, row: Row) -> str:
    """The value of one of the user's metrics for display."""
    return NONE if name not in row.metrics else f"{row.metrics[name]:.4g}"


HEADINGS = tuple(column.heading for column in COLUMNS)
LEGEND = "; ".join(f"{column.heading}: {column.legend}" for column in COLUMNS if column.legend)


def cells(row: Row, columns: Sequence[Column] = COLUMNS) -> tuple[str, ...]:
    """The cells of a run."""
    return tuple(column.cell(row) for column in columns)


def _refused_cells(row: RefusedRow, columns: Sequence[Column]) -> tuple[str, ...]:
    told = {"run": row.run, "same model": f"refused: {row.what}"}
    return tuple(told.get(column.heading, NONE) for column in columns)


def _table(comparison: Comparison) -> tuple[list[str], list[tuple[str, ...]]]:
    """The headings, and the cells of all runs and of those that ``exact`` refused."""
    columns = columns_of(comparison)
    rows = [cells(row, columns) for row in comparison.rows]
    rows += [_refused_cells(row, columns) for row in comparison.refused]
    return [column.heading for column in columns], rows


def markdown(comparison: Comparison) -> str:
    """Answers, figures in words, table and remarks as Markdown."""
    lines = [summary(comparison), "", *(f"- {figure}" for figure in figures_in_words(comparison)), ""]
    headings, rows = _table(comparison)
    lines += ["| " + " | ".join(headings) + " |", "|" + " --- |" * len(headings)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    lines += ["", LEGEND + ".", ""]
    lines += [f"- {remark}" for remark in remarks(comparison)]
    return "\n".join(lines).rstrip() + "\n"
