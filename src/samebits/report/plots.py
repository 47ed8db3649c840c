"""The plots of a comparison, as PNG and SVG, and the tables that ``dvc plots`` draws the same curves from."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Any

from samebits.files import atomic, write_text
from samebits.report.text import COLOURS, name_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = {"single": "o", "dp": "s", "ddp": "^"}
_LINES = {"fast": "-", "exact": "--"}
_SIZE = (5.6, 3.7)  # inches
_STYLE: Any = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "font.family": "sans-serif",
    "svg.fonttype": "none",  # text stays text, in the page's own font
    "figure.constrained_layout.use": True,
}


def _line_of(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "color": COLOURS[row["strategy"]],
        "linestyle": _LINES[row["numerics"]],
        "linewidth": 1.4,
        "label": name_of(row),
    }


def _mark_every(row: dict[str, Any], rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Where a line's markers stand, so that lines on top of each other still show."""
    return (rows.index(row) / (8 * len(rows)), 1 / 8)


def _floor(axes: Axes, rows: list[dict[str, Any]]) -> None:
    if rows[0]["floor"] is not None:
        axes.axhline(rows[0]["floor"], color="0.35", linestyle=":", linewidth=1.2, label="floor")


def _losses(axes: Axes, rows: list[dict[str, Any]], over: str, label: str) -> None:
    for row in rows:
        axes.plot(
            row["curve"][over],
            row["curve"]["loss"],
            marker=_MARKERS[row["strategy"]],
            markevery=_mark_every(row, rows),
            markersize=5,
            **_line_of(row),
        )
    _floor(axes, rows)
    axes.set(xlabel=label, ylabel="training loss")
    axes.legend()


def loss_by_step(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Do they learn the same? Lines on top of each other do."""
    _losses(axes, rows, "step", "step")


def loss_by_seconds(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """How soon do they get there? The line on the left is the fastest."""
    _losses(axes, rows, "seconds", "seconds of training")


def step_times(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """How regular are the steps? A steep line is a regular one."""
    for row in rows:
        axes.plot(row["step_ms_percentiles"], range(101), **_line_of(row))
    slow = max(row["step_ms_percentiles"][99] for row in rows)
    fast = min(row["step_ms_percentiles"][1] for row in rows)
    if slow > 10 * fast:
        axes.set_xscale("log")
    axes.set(xlabel="milliseconds of a step", ylabel="% of steps that take at most so long", ylim=(0, 100))
    axes.legend(loc="lower right")


def speedups(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """What did the devices buy? The dashed line is all that they have, the dash the bound without communication."""
    shown = [row for row in rows if row["speedup"]]
    most = max([row["devices_used"] for row in shown] + [2])
    axes.plot([1, most], [1, most], color="0.35", linestyle="--", linewidth=1.2, label="ideal")
    for row in shown:
        value, look = row["speedup"], _line_of(row)
        error = [[value["median"] - value["low"]], [value["high"] - value["median"]]]
        axes.errorbar(
            row["devices_used"],
            value["median"],
            yerr=error,
            marker=_MARKERS[row["strategy"]],
            markersize=8,
            capsize=4,
            linestyle="none",
            color=look["color"],
            fillstyle="full" if row["numerics"] == "fast" else "none",
            label=look["label"],
        )
        if row["bound"]:
            axes.plot(
                row["devices_used"],
                row["bound"]["median"],
                marker="_",
                markersize=18,
                color=look["color"],
                linestyle="none",
                label=f"{look['label']}: bound",
            )
    axes.set(xlabel="devices", ylabel="speed-up over single", xticks=range(1, most + 1), ylim=(0, None))
    axes.legend()


PLOTS: dict[str, Callable[[Axes, list[dict[str, Any]]], None]] = {
    "loss_by_step": loss_by_step,
    "loss_by_seconds": loss_by_seconds,
    "step_times": step_times,
    "speedups": speedups,
}
TITLES = {
    "loss_by_step": "Loss at each step",
    "loss_by_seconds": "Loss over time",
    "step_times": "Time of a step",
    "speedups": "Speed-up over single",
}


def svg_of(figure: Figure) -> str:
    """A figure as SVG, the same bytes each time under the same ``svg.hashsalt``."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def draw(comparison: dict[str, Any], folder: Path) -> dict[str, str]:
    """Write each plot to ``folder`` as PNG and SVG, the same bytes for the same comparison; return the SVGs by name."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = {}
    for name, plot in PLOTS.items():
        with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
            figure = Figure(figsize=_SIZE)
            FigureCanvasAgg(figure)
            axes = figure.add_subplot()
            plot(axes, comparison["rows"])
            axes.set_title(TITLES[name], loc="left")
            drawn[name] = svg_of(figure)
            write_text(folder / f"{name}.svg", drawn[name])
            with atomic(folder / f"{name}.png") as temporary:
                figure.savefig(temporary, format="png", dpi=150, metadata={"Software": None})
    return drawn


def write_tables(comparison: dict[str, Any], folder: Path) -> None:
    """Write what the plots show as CSV: ``curves/RUN.csv``, ``step_times/RUN.csv`` and ``speedups.csv``."""
    for row in comparison["rows"]:
        points = zip(row["curve"]["step"], row["curve"]["seconds"], row["curve"]["loss"], strict=True)
        _write_csv(folder / "curves" / f"{name_of(row)}.csv", ["step", "seconds", "loss"], points)
        percentiles = enumerate(row["step_ms_percentiles"])
        _write_csv(folder / "step_times" / f"{name_of(row)}.csv", ["percent_of_steps", "milliseconds"], percentiles)
    rows = [
        (name_of(row), row["devices_used"], row["speedup"]["median"], row["bound"]["median"] if row["bound"] else "")
        for row in comparison["rows"]
        if row["speedup"]
    ]
    _write_csv(folder / "speedups.csv", ["run", "devices", "speedup", "bound"], rows)


def _write_csv(path: Path, header: list[str], rows: Any) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    write_text(path, text.getvalue())
