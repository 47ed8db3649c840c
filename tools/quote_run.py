"""Put the picture, the table, the answers and the page of the last `make repro` into the docs.

python tools/quote_run.py [reports/comparison.json [FOLDER]]

FOLDER has the run of the guide's training by hand. With it the guide also gets the output of those commands.
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

from pages import between
from samebits.files import write_text
from samebits.records.run import read_run
from samebits.results.answers import facts, headline
from samebits.results.comparison import Comparison
from samebits.results.page.render import render
from samebits.results.table import markdown
from samebits.results.terminal import WIDTHS, answer_lines
from samebits.results.text import describe_run, notes_of, remarks
from samebits.results.verdict import compare_runs, settings_that_differ
from samebits.results.verdict_text import say_comparison
from samebits.results.where import draw_where

ROOT = Path(__file__).resolve().parent.parent
README, GUIDE = ROOT / "README.md", ROOT / "docs/guides/first-run.md"
TABLE = ROOT / "docs/guides/reading-the-report.md"
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
    said = "".join(f"{line.plain.rstrip()}\n" for line in lines)
    replace(GUIDE, "<!-- answers -->\n```text\n", "```\n<!-- /answers -->", said)


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
