"""The picture of a comparison: from the ideal to what the fastest run gets, for light and for dark pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from samebits.results.answers import fastest, headline
from samebits.results.figures import milliseconds, multiple, signed_ms
from samebits.results.plots import write_figure
from samebits.results.text import CHANGES, COLOURS, ON_DARK, WORDS, devices_of, first_numerics
from samebits.results.waterfall import waterfall
from samebits.strategies import BASELINE

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from samebits.results.comparison import Comparison, Row

THEMES: dict[str, dict[str, str]] = {
    ending: {"page": page, **{name: both[dark] for name, both in WORDS.items()}}
    for ending, page, dark in (("", "#FFFFFF", 0), ("-dark", "#0D1117", 1))
}
"""Colours by the end of a file's name, for pages of sites that show Markdown."""

NAME = "where"
"""What its files are called, before the end that says which theme they are for."""

_WIDTH, _LINE = 8.0, 0.3  # inches


def draw_where(comparison: Comparison, folder: Path) -> None:
    """Write ``where`` and ``where-dark`` to ``folder``, the same bytes each time, unless no run has a speed-up."""
    rows = first_numerics(comparison)
    best = fastest(rows)
    if best is None:
        return
    single = next((row for row in rows if row.strategy == BASELINE.name), None)
    for ending, theme in THEMES.items():
        lines = _lines(best, single, theme["muted"], dark=bool(ending))

        def paint(axes: Axes, lines: list[_Line] = lines, theme: dict[str, str] = theme) -> None:
            _paint(axes, lines, best, theme, headline(comparison))

        size = (_WIDTH, _LINE * (len(lines) + 2.2))
        colours = {"text.color": theme["ink"], "figure.facecolor": theme["page"], "axes.facecolor": theme["page"]}
        write_figure(folder, f"{NAME}{ending}", paint, size=size, columns=0, **colours)


_Line = tuple[str, float, float, str, str, str, dict[str, Any]]
"""Words, both ends of the bar, ms, speed, kind, and the bar's looks."""


def _lines(best: Row, single: Row | None, muted: str, *, dark: bool) -> list[_Line]:
    """The lines from above to below."""
    one, colours = waterfall(best), ON_DARK if dark else COLOURS
    ratio = one.speedup
    ideal = {"facecolor": "none", "edgecolor": muted, "linestyle": "--"}
    lines: list[_Line] = [(f"Ideal of {devices_of(best)}", 0, one.ideal, "", multiple(one.ideal), "", ideal)]
    for stage in one.stages:
        colour = CHANGES["lost" if stage.lost else "gain"][dark]
        looks = {"facecolor": "none", "edgecolor": colour, "hatch": "//////"}
        lines.append((stage.words, stage.start, stage.end, signed_ms(stage.ms), multiple(stage.end), "", looks))
    step = milliseconds(one.step_ms) if one.step_ms else ""
    got = {"color": colours[best.strategy]}
    lines.append((f"{best.strategy}: what you get", 0, ratio.median, step, multiple(ratio.median), "bold", got))
    if single is not None:
        ms = milliseconds(best.slice_step_ms.single) if best.slice_step_ms else ""
        lines.append((f"{single.strategy}: one device", 0, 1, ms, multiple(1), "", {"color": colours[single.strategy]}))
    return lines


def _paint(axes: Axes, lines: list[_Line], best: Row, theme: dict[str, str], title: str) -> None:
    assert best.speedup
    most = max(best.devices_used, best.speedup.high, best.bound.high if best.bound else 0)
    columns = (-0.02 * most, 1.24 * most, 1.46 * most)
    for number, (words, start, end, ms, speed, weight, looks) in enumerate(lines):
        axes.barh(number, end - start, left=start, height=0.62, **looks)
        for x, text in zip(columns, (words, ms, speed), strict=True):
            style: Any = {"va": "center", "ha": "right", "fontsize": 9.5, "fontweight": weight or "normal"}
            axes.text(x, number, text, color=theme["ink"], **style)
        if weight:
            interval = [[best.speedup.median - best.speedup.low], [best.speedup.high - best.speedup.median]]
            axes.errorbar(end, number, xerr=interval, color=theme["ink"], capsize=3, linewidth=1.4)
    for x, text in ((columns[1], "adds to a step"), (columns[2], "speed left")):
        axes.text(x, -0.85, text, color=theme["muted"], ha="right", va="center", fontsize=8.5)
    for mark in range(best.devices_used + 1):
        axes.text(mark, -0.85, f"{mark}×", color=theme["muted"], ha="center", va="center", fontsize=8.5)
        axes.axvline(mark, color=theme["muted"], linewidth=0.6, alpha=0.5, zorder=0)
    axes.figure.suptitle(title, x=0.01, ha="left", color=theme["ink"], fontsize=12, fontweight="bold")
    axes.set(xlim=(0, 1.46 * most), ylim=(len(lines) - 0.5, -1.2))
    axes.axis("off")
