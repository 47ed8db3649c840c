"""Print a table of the kernel launches of a step, or write it into docs/concepts/rehearsal.md; minutes.

    .venv-gpu/bin/python tests/rehearsal/launches.py [--write]

It runs ``launches_probe.py`` on the stand-in for CUDA, and so needs CUDA's build of PyTorch and a C compiler.
"""

import sys
import tempfile
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[2] / name) for name in ("tools", "src", "tests", "tests/numerics"))

import stand_in
from launches_probe import BATCH, CASES, ROWS, WAYS, case_of
from pages import between, row, table

PAGE = stand_in.ROOT / "docs" / "concepts" / "rehearsal.md"
BEGIN, END = "<!-- launches -->\n", "<!-- /launches -->\n"


def table_of(counts):
    """The launches of each training by its case, as Markdown."""
    lines = [*table(f"at batch {BATCH}", *(f"{numerics}, {strategy}" for numerics, strategy in WAYS))]
    for model, optimizer in ROWS:
        cells = (f"{counts[case_of(model, *way, optimizer)]:,}" for way in WAYS)
        lines.append(row(f"{model}, {optimizer}", *cells))
    return "\n".join([*lines, ""])


def main():
    if why := stand_in.why_not():
        sys.exit(f"error: {why}. hint: make rehearse makes .venv-gpu, whose Python can")
    with tempfile.TemporaryDirectory() as folder:
        text = table_of(stand_in.run(stand_in.build(Path(folder)), "launches_probe.py", *CASES))
    if "--write" in sys.argv[1:]:
        PAGE.write_text(between(BEGIN, END, text, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
