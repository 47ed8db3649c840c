"""Run the tests with the mark ``attack`` and print a table of attacker, attempt and outcome.

The kit holds against an attempt, or the doctor warns of it. Attempts by another user of the host need root. Exit
code 1: the kit did not hold against one.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_NOT_HELD, _NOT_TRIED = "NOT HELD", "not tried"


def attempts(report: Path) -> list[tuple[str, str, str]]:
    """Attacker, attempt and outcome of each test in pytest's report, sorted by attacker."""
    found = []
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 - pytest wrote it
        known = {one.get("name"): one.get("value", "") for one in case.iter("property")}
        if "attacker" not in known:
            continue
        name, _, how = case.get("name", "").removeprefix("test_").partition("[")
        attempt = name.replace("_", " ") + (f" ({how[:-1]})" if how else "")
        failed = case.find("failure") is not None or case.find("error") is not None
        outcome = _NOT_HELD if failed else known["outcome"] if case.find("skipped") is None else _NOT_TRIED
        found.append((known["attacker"], attempt, outcome))
    return sorted(found, key=lambda one: one[0])


def table(found: list[tuple[str, str, str]]) -> str:
    """The table in Markdown, with the number of each outcome below it."""
    rows = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in found]
    counts = Counter(outcome for _, _, outcome in found)
    said = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    head = ["| attacker | attempt | outcome |", "| --- | --- | --- |"]
    return "\n".join([*head, *rows, "", f"{len(found)} attempts: {said}"])


def main() -> int:
    """Run the tests and print the table."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        options = ["-q", "-m", "attack", "-n", "2", "--dist", "loadscope", f"--junitxml={report}"]
        code = subprocess.run([sys.executable, "-m", "pytest", *options, "tests"], cwd=ROOT, check=False).returncode
        found = attempts(report) if report.exists() else []
    print(table(found))
    return int(code != 0 or not found)


if __name__ == "__main__":
    sys.exit(main())
