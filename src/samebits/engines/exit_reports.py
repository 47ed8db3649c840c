"""Exit reports of a stage's launchers, one from each machine of a cluster.

They are needed because an engine's exit code does not tell the task that failed first from those that it took along.
"""

from __future__ import annotations

import socket
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from samebits.errors import SamebitsError, UserError, WithHint, from_exit_code
from samebits.files import Record
from samebits.here import stage_command
from samebits.host.cluster_environment import find_nodes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FOLDER = "SAMEBITS_LAUNCH"
"""Variable with the folder of a stage's exit reports."""


class ExitReport(Record):
    """Exit code and error of one node's launcher."""

    exit_code: int
    message: str = ""
    hint: str = ""


@contextmanager
def ending_told(environ: Mapping[str, str]) -> Iterator[None]:
    """Write an exit report for the block, on a machine of a cluster.

    Node 0 prints its error. Another node prints its error only if nobody can read its report.
    """
    if not environ.get(FOLDER):
        yield
        return
    folder, node = Path(environ[FOLDER]), 0
    try:
        node = find_nodes(environ=environ).rank
        with suppress(OSError):
            (folder / f"node{node}.begun").touch()
            (folder / f"node{node}.json").unlink()  # the report from before the job was queued again
        yield
    except WithHint as error:
        report = ExitReport(exit_code=error.exit_code, message=error.message, hint=error.hint)
        if not _write_report(report, folder, node) and node:
            sys.stderr.write(f"node {node} ({socket.gethostname()}): {error}\n")
        if node:
            raise SystemExit(error.exit_code) from None
        raise
    _write_report(ExitReport(exit_code=0), folder, node)


def _write_report(report: ExitReport, folder: Path, node: int) -> bool:
    """Write a report. False if nobody can read it: the disk is full, or the folder is not shared."""
    if not folder.is_dir():
        return False
    try:
        report.write(folder / f"node{node}.json")
    except SamebitsError:
        return False
    return True


def has_begun(folder: Path) -> bool:
    """Whether the launcher of any node has begun."""
    return any(folder.glob("node*.begun"))


def read_endings(folder: Path) -> dict[int, WithHint | None]:
    """The error of each node with a report, by rank; None for a node that succeeded."""
    endings: dict[int, WithHint | None] = {}
    for file in sorted(folder.glob("node*.json"), key=lambda file: int(file.stem.removeprefix("node"))):
        with suppress(UserError):
            ending = ExitReport.read(file, made_by=stage_command("train"))
            failed = from_exit_code(ending.exit_code, ending.message, ending.hint) if ending.exit_code else None
            endings[int(file.stem.removeprefix("node"))] = failed
    return endings
