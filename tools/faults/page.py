"""Write the figures of campaigns into docs/concepts/reliability.md: the whole one first, then ONLY=writes.

python tools/faults/page.py benchmarks/results/HOST/faults.json benchmarks/results/HOST/faults-writes.json
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs/concepts/reliability.md"
_TRACKED = (
    "MLflow had {losses:,.0f} losses of {runs:,.0f} runs: {lost:.0f} lost, {doubled:.0f} doubled, {running:.0f} runs "
    "left RUNNING. One training lived through {restarts_in_one:.0f} restarts."
)
_BEGIN, _END = "<!-- faults -->\n", "<!-- /faults -->"


def tables(campaigns: list[dict[str, Any]]) -> str:
    """The figures in Markdown: host and table of each campaign."""
    return "\n".join(map(_table, campaigns))


def _table(campaign: dict[str, Any]) -> str:
    host = campaign["host"]
    rows = [
        f"| {name} | {area['tried']:,}{_of(area)} {area['unit']} | {area['held']:,} | {area['seconds'] / 60:.0f} min |"
        for name, area in campaign["areas"].items()
    ]
    head = ["| faults | tried | held | time |", "| --- | --- | --- | --- |"]
    kinds = [name for name in campaign["areas"] if name != "processes"]  # every campaign has these
    only = f"ONLY={kinds[0]} " if len(kinds) == 1 else ""
    told = f"`make faults {only}MINUTES={campaign['minutes']:g} SEED={campaign['seed']}` on {host['cpu']['model']}, "
    commit = f"commit {campaign['git']['commit'][:12]}{', with changes' if campaign['git']['dirty'] else ''}"
    lines = [f"{told}{host['cpu']['cores']} cores, {commit}:", "", *head, *rows, ""]
    broken = [failure for area in campaign["areas"].values() for failure in area["failures"]]
    lines += [f"- What did not hold: `{one['case']}`, {one['what']}." for one in broken] + [""] * bool(broken)
    if figures := campaign["areas"].get("tracking", {}).get("figures"):
        lines += [_TRACKED.format(**figures)]
        if times := figures["times_as_long"]:
            told = ", ".join(f"{value:.2f} ({harm})" for harm, value in times.items())
            said = f"Trainings took so many times as long as without tracking, by what was done to the server: {told}."
            lines += textwrap.wrap(said, 120)
        lines += [""]
    return "\n".join(lines)


def _of(area: dict[str, Any]) -> str:
    return f" of {area['of']:,}" if area["of"] is not None else ""


def quoted(page: str) -> str:
    """The figures in a page."""
    return page.partition(_BEGIN)[2].partition(_END)[0]


def main(*results: Path) -> None:
    """Rewrite the page."""
    page = PAGE.read_text(encoding="utf-8")
    new = tables([json.loads(path.read_text(encoding="utf-8")) for path in results])
    PAGE.write_text(page.replace(_BEGIN + quoted(page) + _END, _BEGIN + new + _END), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
