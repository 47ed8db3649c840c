"""The plot of a scaling curve: solid lines are measured, dashed ones are projections and named so."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from samebits.results.plots import write_figure
from samebits.results.scaling.curve import STRONG_AND_WEAK
from samebits.results.text import COLOURS
from samebits.strategies import BASELINE
from samebits.strategies.ddp import DDP

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from samebits.results.scaling.curve import Scaling, ScalingName

NAME = "scaling"
_COLOURS: dict[ScalingName, str] = {"strong": COLOURS[DDP.name], "weak": COLOURS[BASELINE.name]}
_MARKS: dict[ScalingName, str] = {"strong": "^", "weak": "o"}


def draw_scaling(scaling: Scaling, axes: Axes) -> None:
    """Speed-up in samples per second over devices, both on axes with powers of 2."""
    ticks = sorted({*(one.devices for one in scaling.measured), *(one.devices for one in scaling.projections)})
    most = max(ticks, default=1)
    axes.plot([1, most], [1, most], color="0.7", linewidth=1, label="ideal")
    for name in STRONG_AND_WEAK:
        _draw_one(scaling, name, axes)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(ticks, [str(devices) for devices in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}x")
    axes.set(xlabel="devices", ylabel="samples per second over one device's")
    network = f", over {scaling.network.text}" if scaling.network else ""
    axes.set_title(f"Scaling of {scaling.model}{network}", loc="left")


def _draw_one(scaling: Scaling, name: ScalingName, axes: Axes) -> None:
    colour, mark = _COLOURS[name], _MARKS[name]
    measured = [(one.devices, one.speedup) for one in scaling.measured if one.scaling == name and one.speedup]
    if measured:
        x, y = [devices for devices, _ in measured], [gain.median for _, gain in measured]
        bars = [[gain.median - gain.low for _, gain in measured], [gain.high - gain.median for _, gain in measured]]
        axes.errorbar(x, y, yerr=bars, color=colour, marker=mark, capsize=3, label=f"{name}, measured")
    projected = [(one.devices, one.speedup) for one in scaling.projections if one.scaling == name]
    if projected:
        joined = [*measured[-1:], *projected]
        x, y = [devices for devices, _ in joined], [gain.median for _, gain in joined]
        low, high = [gain.low for _, gain in joined], [gain.high for _, gain in joined]
        axes.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)
        axes.plot(x, y, color=colour, linestyle="--", marker=mark, markerfacecolor="white", label=f"{name}, projection")


def draw(scaling: Scaling, folder: Path) -> Path:
    """Write ``scaling.svg`` and ``scaling.png``, the same bytes for the same record; return the PNG's path."""
    write_figure(folder, NAME, partial(draw_scaling, scaling), size=(5.0, 4.0), columns=2)
    return folder / f"{NAME}.png"
