"""The plots of a comparison as PNG and SVG, and the same figures as tables for ``dvc plots``."""

from __future__ import annotations

import csv
import io
import itertools
from functools import partial
from itertools import chain, cycle, repeat
from typing import TYPE_CHECKING, Any, Literal, get_args

from samebits.files import atomic, remove, write_text
from samebits.params.schema import NumericsName
from samebits.records.run import run_name
from samebits.results.explanation.words import PART_NAMES, say_parts
from samebits.results.text import COLOURS, by_numerics
from samebits.strategies import STRATEGIES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from samebits.results.comparison import Comparison, Row
    from samebits.results.explanation.explain import Explanation

_LOOKS: dict[str, dict[str, Any]] = {  # lines on top of each other stay visible: thin dashed ones lie on thick ones
    strategy: {"marker": marker, "linestyle": line, "linewidth": width}
    for strategy, marker, line, width in zip(
        STRATEGIES, cycle("os^Dv"), cycle(("-", "--", "-.", ":")), chain((2.4, 1.8), repeat(1.4)), strict=False
    )
}
PART_COLOURS = ("#999933", "#DDCC77", "#CC6677", "#88CCEE", "#AA4499", "#332288", "#44AA99", "#EE7733", "#661100",
                "#CC3311", "#117733", "#BBBBBB", "#000000")  # fmt: skip
"""Colours of the parts of a step, in order, from Tol's palettes, which people with any colour vision can tell apart."""

LEAST_SHOWN = 0.005
"""Share of the longest step. Parts that are shorter in every run are left out of the legend."""

_SIZE = (5.0, 3.5)  # inches: as wide as a phone, so that letters keep their size there
_SMALL: Any = {"legend.columnspacing": 1.2, "lines.markersize": 5}
_STYLE: Any = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titleweight": "bold",
    "axes.titlesize": "medium",
    "grid.alpha": 0.3,
    "font.family": "sans-serif",
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text, in the font of the page
    "figure.constrained_layout.use": True,
}


def _line(axes: Axes, row: Row, rows: Sequence[Row], *, x: Sequence[float], y: Sequence[float]) -> None:
    """The line of a run, with markers where no other run has its own."""
    marks = (rows.index(row) / (8 * len(rows)), 1 / 8)
    axes.plot(x, y, color=COLOURS[row.strategy], label=row.strategy, markevery=marks, **_LOOKS[row.strategy])


def losses(axes: Axes, rows: Sequence[Row], *, over: Literal["step", "seconds"], label: str) -> None:
    """Do they learn the same, and how soon do they get there? Lines on top of each other do, the left one first."""
    for row in rows:
        _line(axes, row, rows, x=getattr(row.curve, over), y=row.curve.loss)
    if rows[0].floor is not None:
        axes.axhline(rows[0].floor, color="0.35", linestyle=":", linewidth=1.2, label="floor")
    axes.locator_params(axis="x", nbins=6)
    axes.set(xlabel=label, ylabel="training loss")


def step_times(axes: Axes, rows: Sequence[Row]) -> None:
    """How regular are the steps? A steep line is a regular one."""
    for row in rows:
        _line(axes, row, rows, x=row.step_ms_percentiles, y=range(101))
    axes.locator_params(axis="x", nbins=6)
    slow = max(row.step_ms_percentiles[99] for row in rows)
    fast = min(row.step_ms_percentiles[1] for row in rows)
    if slow > 10 * fast:
        from matplotlib.ticker import LogLocator

        axes.set_xscale("log")
        low, high = axes.get_xlim()
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
    axes.set(xlabel="milliseconds of a step", ylabel="% of steps that take at most so long", ylim=(0, 100))


def speedups(axes: Axes, rows: Sequence[Row]) -> None:
    """What did the devices buy? The bar is their number, the dash the bound without communication."""
    shown = [(row, row.speedup) for row in rows if row.speedup]
    first = {row.numerics: row for row, _ in reversed(shown)}
    axes.barh([row.name for row in rows], [row.devices_used for row in rows], color="0.9", label="devices")
    bounds = {row.name: row.bound.median for row in rows if row.bound}
    dash: Any = {"color": "0.3", "markersize": 14, "markeredgewidth": 2, "label": "bound" if bounds else None}
    axes.plot(list(bounds.values()), list(bounds), "|", **dash)
    for row, value in shown:
        axes.errorbar(
            value.median,
            row.name,
            xerr=[[value.median - value.low], [value.high - value.median]],
            marker=_LOOKS[row.strategy]["marker"],
            markersize=8,
            markerfacecolor=COLOURS[row.strategy] if row.numerics == "fast" else "white",
            capsize=4,
            color=COLOURS[row.strategy],
            label=f"{row.numerics}: median and 95% interval" if row is first[row.numerics] else None,
        )
    axes.grid(axis="y", visible=False)
    axes.set(xlabel="times the speed of single", xlim=(0, None), ylim=(len(rows) - 0.5, -0.5))


def breakdown(axes: Axes, rows: Sequence[Row]) -> None:
    """Where does the time of a step go? The parts of each step, one after the other."""
    divided = _divided(rows)
    names = [row.name for row, _ in divided]
    ends = [0.0] * len(divided)
    for (key, label), colour in zip(PART_NAMES.items(), PART_COLOURS, strict=True):
        widths = [getattr(explanation.parts, key) for _, explanation in divided]
        if max(widths, default=0) >= LEAST_SHOWN * max(explanation.step_ms for _, explanation in divided):
            axes.barh(names, widths, left=ends, color=colour, label=label, height=0.6)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    axes.grid(axis="y", visible=False)
    axes.set(xlabel="milliseconds of a step", ylim=(len(divided) - 0.5, -0.5))


def _divided(rows: Sequence[Row]) -> list[tuple[Row, Explanation]]:
    """Rows that were divided into parts on a steady host."""
    return [(row, row.explanation) for row in rows if row.explanation and not row.explanation.unsteady]


PLOTS: dict[str, Callable[[Axes, Sequence[Row]], None]] = {
    "loss_by_step": partial(losses, over="step", label="step"),
    "loss_by_seconds": partial(losses, over="seconds", label="seconds of training"),
    "step_times": step_times,
    "speedups": speedups,
    "breakdown": breakdown,
}
TITLES = {
    "loss_by_step": "Loss at each step",
    "loss_by_seconds": "Loss over time",
    "step_times": "Time of a step",
    "speedups": "Speed-up over single",
    "breakdown": "Where a step goes",
}
TOGETHER = ("speedups", "breakdown")
"""Plots that show all numerics at once. The others are drawn for each numerics, as ``NAME-NUMERICS``."""


def svg_of(figure: Figure) -> str:
    """A figure as SVG: the same bytes each time, with the same ``svg.hashsalt``."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def write_figure(
    folder: Path, name: str, paint: Callable[[Axes], None], *, size: tuple[float, float], columns: int, **style: Any
) -> None:
    """Write a plot with a legend of so many ``columns``, 0 for none, as NAME.svg and NAME.png.

    ``size`` is in inches; ``style`` adds to matplotlib's settings. The same plot gives the same bytes.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    settings: Any = {**_STYLE, "svg.hashsalt": name, **style}
    with mpl.rc_context(settings):
        figure = Figure(figsize=size)
        FigureCanvasAgg(figure)
        paint(figure.add_subplot())
        if columns:
            figure.legend(loc="outside lower center", ncols=columns)
        write_text(folder / f"{name}.svg", svg_of(figure))
        figure.set_layout_engine("none")  # the layout is done
        with atomic(folder / f"{name}.png") as temporary:
            figure.savefig(temporary, format="png", dpi=150, metadata={"Software": None})


def remove_former(folder: Path) -> None:
    """Remove plots and tables of an earlier report in ``folder``: it may have had other runs."""
    runs = list(itertools.product(STRATEGIES, get_args(NumericsName)))
    names = [f"plots/{name}*.{kind}" for name in (*PLOTS, "where") for kind in ("svg", "png")]
    names += [f"{table}/{run_name(*run)}.csv" for run in runs for table in ("curves", "step_times")]
    for path in itertools.chain.from_iterable(map(folder.glob, names)):
        remove(path)


def draw(comparison: Comparison, folder: Path) -> None:
    """Write the plots to ``folder`` as PNG and SVG, the same bytes for the same comparison."""
    for name in PLOTS:
        if name == "breakdown" and not _divided(comparison.rows):
            continue
        parts = {"": list(comparison.rows)} if name in TOGETHER else by_numerics(comparison.rows)
        for numerics, rows in parts.items():
            _draw(name, numerics, rows, folder)


def _draw(name: str, numerics: str, rows: Sequence[Row], folder: Path) -> None:
    file, title = (f"{name}-{numerics}", f"{TITLES[name]}, {numerics}") if numerics else (name, TITLES[name])

    def paint(axes: Axes) -> None:
        PLOTS[name](axes, rows)
        axes.set_title(title, loc="left")

    write_figure(folder, file, paint, size=_SIZE, columns=2 if name in TOGETHER else 4, **_SMALL)


def write_tables(comparison: Comparison, folder: Path) -> None:
    """Write the figures of the plots as CSV: files by run in ``curves`` and ``step_times``, and one per other plot."""
    for row in comparison.rows:
        points = zip(row.curve.step, row.curve.seconds, row.curve.loss, strict=True)
        _write_csv(folder / "curves" / f"{row.name}.csv", ["step", "seconds", "loss"], points)
        percentiles = enumerate(row.step_ms_percentiles)
        _write_csv(folder / "step_times" / f"{row.name}.csv", ["percent_of_steps", "milliseconds"], percentiles)
    rows = [
        (row.name, row.devices_used, row.speedup.median, row.bound.median if row.bound else "")
        for row in comparison.rows
        if row.speedup
    ]
    _write_csv(folder / "speedups.csv", ["run", "devices", "speedup", "bound"], rows)
    divided = _divided(comparison.rows)
    parts = [(row.name, what, ms) for row, explanation in divided for _, what, ms in say_parts(explanation.parts)]
    _write_csv(folder / "breakdown.csv", ["run", "part", "milliseconds"], parts)


def _write_csv(path: Path, header: list[str], rows: Any) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    write_text(path, text.getvalue())
