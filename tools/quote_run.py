"""Put the picture, the table, the answers and the page of the last `make repro` into the docs.

python tools/quote_run.py [reports/comparison.json [FOLDER]]

FOLDER has the run of the guide's training by hand. With it the guide also gets the output of those commands.
"""

from __future__ import annotations

import io
import itertools
import re
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from pages import between
from samebits.files import write_text
from samebits.records.run import read_run
from samebits.results.answers import facts, headline
from samebits.results.comparison import Comparison, explanation_of
from samebits.results.explanation.words import say_explanation, say_trained
from samebits.results.lines import WIDTHS
from samebits.results.page.render import render
from samebits.results.plots import write_figure
from samebits.results.table import markdown
from samebits.results.terminal import answer_lines
from samebits.results.text import describe_run, notes_of, remarks
from samebits.results.verdict import compare_runs, settings_that_differ
from samebits.results.verdict_text import say_comparison
from samebits.results.where import draw_where

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from rich.text import Text

    from samebits.records.measurement import SliceName
    from samebits.records.run import Run

ROOT = Path(__file__).resolve().parent.parent
README, GUIDE = ROOT / "README.md", ROOT / "docs/guides/first-run.md"
TABLE = ROOT / "docs/guides/reading-the-report.md"
EXPLAINING = ROOT / "docs/guides/explaining.md"
IMAGES, EXAMPLE = ROOT / "docs/images", ROOT / "docs/example"
PICTURE = """<picture>
  <source media="(prefers-color-scheme: dark)" srcset="docs/images/where-dark.svg">
  <img src="docs/images/where.svg" alt="{told}">
</picture>

*{where}. [Open the page](docs/example/index.html).*
"""


def replace(path: Path, before: str, after: str, text: str) -> None:
    """Put ``text`` between two marks of a page."""
    path.write_text(between(before, after, text, path.read_text(encoding="utf-8")), encoding="utf-8")


def quote_comparison(comparison: Comparison) -> None:
    """Write the picture, the page, the table and the answers to where the docs show them."""
    draw_where(comparison, IMAGES)
    folder = Path("runs/ddp-fast")
    if folder.exists() and read_run(folder).record.breakdown:
        run = read_run(folder)
        draw_slices(run, IMAGES)
        told = say_explanation(say_trained(run.record), explanation_of(run, str(folder)))
        replace(EXPLAINING, "<!-- explain -->\n```text\n", "```\n<!-- /explain -->", f"{told}\n")
    for image in IMAGES.glob("*.png"):
        image.unlink()
    write_text(EXAMPLE / "index.html", render(comparison))
    told = PICTURE.format(told=headline(comparison), where=", ".join(facts(comparison)))
    told = (
        "\n".join(line if line.startswith(("<", " ")) else textwrap.fill(line, 120) for line in told.splitlines())
        + "\n"
    )
    replace(README, "<!-- picture -->\n", "<!-- /picture -->", told if (IMAGES / "where.svg").exists() else "")
    table = "".join(f"{line}\n" for line in markdown(comparison).splitlines() if line.startswith("|"))
    replace(TABLE, "<!-- result -->\n", "<!-- /result -->", table)
    lines = answer_lines(comparison, Path("reports"), WIDTHS[1], notes=len(remarks(comparison)))
    draw_terminal(lines, IMAGES / "terminal.svg")
    said = "".join(f"{line.plain.rstrip()}\n" for line in lines)
    replace(GUIDE, "<!-- answers -->\n```text\n", "```\n<!-- /answers -->", said)


def draw_terminal(lines: Sequence[Text], file: Path) -> None:
    """Write the end of `make repro` as a picture of a terminal."""
    console = Console(record=True, width=WIDTHS[1], file=io.StringIO(), color_system="truecolor", force_terminal=True)
    for line in lines:
        console.print(line)
    drawn = console.export_svg(title="make repro", unique_id="samebits")
    write_text(file, re.sub(r"\s*@font-face \{.*?\}", "", drawn, flags=re.DOTALL))  # of a server of fonts


NAMES: dict[SliceName, str] = {
    "strategy": "ddp", "single": "single", "share": "one device, its share", "together": "both, without communication",
}  # fmt: skip
SHADES = ("#00845F", "#0072B2", "#B87A00", "#8792A0")


def draw_slices(run: Run, folder: Path) -> None:
    """Draw the chunks of the first repeats in the order in which they were timed, each as long as it took."""
    chunks = run.record.measurement.chunk_seconds
    names = [name for name in NAMES if name in chunks]
    repeats = range(min(3, len(chunks["strategy"])))
    turns = itertools.cycle(range(len(names)))

    def paint(axes: Axes) -> None:
        for repeat in repeats:
            at = 0.0
            for chunk in range(len(chunks["strategy"][repeat])):
                turn = next(turns)
                for name in [*names[turn:], *names[:turn]]:
                    seconds = 1e3 * chunks[name][repeat][chunk]
                    first = NAMES[name] if repeat == chunk == 0 else None
                    axes.barh(repeat, seconds, left=at, color=SHADES[names.index(name)], edgecolor="white", label=first)
                    at += seconds
        axes.set(xlabel="milliseconds", yticks=[*repeats], yticklabels=[f"repeat {one + 1}" for one in repeats])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)

    write_figure(folder, "slices", paint, size=(8.0, 2.4), columns=4)


def quote_training(folder: Path) -> None:
    """Write the output of the guide's training by hand, and of its comparison with the pipeline's run."""
    run = read_run(folder)
    reference = read_run(Path("runs") / run.name)
    same = say_comparison(compare_runs(reference, run), settings_that_differ(reference, run))
    command, compare = re.findall(r"^\$ (?:python pipeline/train|samebits compare runs/\S+ /tmp).*\n",
                                  GUIDE.read_text(encoding="utf-8"), flags=re.MULTILINE)  # fmt: skip
    replace(GUIDE, command, compare, "".join(f"{line}\n" for line in [describe_run(run), *notes_of(run)]))
    replace(GUIDE, compare, "```", f"{same}\n")


def main(comparison: str = "reports/comparison.json", folder: str | None = None) -> None:
    """Fill both pages."""
    quote_comparison(Comparison.read(Path(comparison), made_by="make repro"))
    if folder:
        quote_training(Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
