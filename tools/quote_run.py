"""Put the table and the answers of the last `make repro` into the README and the first guide.

python tools/quote_run.py [reports/comparison.json]
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path

from samebits.report.table import markdown
from samebits.report.text import answers

ROOT = Path(__file__).resolve().parent.parent


def replace(path: Path, pattern: str, text: str) -> None:
    """Replace the one place that matches, keeping what the first and the last group caught."""
    before = path.read_text(encoding="utf-8")
    after, count = re.subn(pattern, lambda found: found[1] + text + found[2], before, flags=re.DOTALL)
    assert count == 1, f"{path}: {count} places"
    path.write_text(after, encoding="utf-8")


def main(comparison: str = "reports/comparison.json") -> None:
    """Fill both."""
    read = json.loads(Path(comparison).read_text(encoding="utf-8"))
    table = "".join(f"{line}\n" for line in markdown(read).splitlines() if line.startswith("|"))
    replace(ROOT / "README.md", r"(<!-- result -->\n).*?(<!-- /result -->)", table)
    said = "".join(f"{textwrap.fill(answer, 115)}\n" for answer in answers(read))
    replace(ROOT / "docs/guides/first-run.md", r"(AMD EPYC and no GPU:\n\n```text\n).*?(```)", said)


if __name__ == "__main__":
    main(*sys.argv[1:])
