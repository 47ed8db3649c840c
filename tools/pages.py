"""Markdown and pictures that tools write into pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from matplotlib.axes import Axes


def row(*cells: str) -> str:
    """One row of a table."""
    return f"| {' | '.join(cells)} |"


def table(*head: str) -> Iterator[str]:
    """The first two lines of a table."""
    yield row(*head)
    yield row(*("---" for _ in head))


def between(begin: str, end: str, new: str, page: str) -> str:
    """A page with a new text between two marks. Raises ValueError: a mark is missing, or the first occurs twice."""
    head, rest = page.split(begin)
    _, tail = rest.split(end, maxsplit=1)
    return f"{head}{begin}{new}{end}{tail}"


def picture(name: str, size: tuple[float, float], plot: Callable[[Axes], None], **style: Any) -> str:
    """A plot as SVG with the same bytes each time. ``size`` is in inches. Text stays text."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from samebits.results.plots import svg_of

    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": name, **style}
    with mpl.rc_context(settings):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        plot(figure.add_subplot())
        return svg_of(figure)
