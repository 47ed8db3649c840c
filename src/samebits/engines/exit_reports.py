"""How the launchers of a stage ended on the machines of a cluster, as each of them wrote it down.

An engine tells of a task that another one's end took along as of one that failed first, so that its exit code is no
cause.
"""

from __future__ import annotations

import socket
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from samebits.errors import SamebitsError, UserError, WithHint, from_exit_code
from samebits.files import Record
from samebits.host.cluster_environment import find_nodes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FOLDER = "SAMEBITS_LAUNCH"
"""Variable with the folder in which the launchers of a stage write down how they ended."""


class ExitReport(Record):
    """The end of one node's launcher."""

    exit_code: int
    message: str = ""
    hint: str = ""


@contextmanager
def ending_told(environ: Mapping[str, str]) -> Iterator[None]:
    """Where this is one of a cluster's machines, write down how the block ends.

    Node 0 alone prints it, and a machine without the disk on which it would be read.
    """
    if not environ.get(FOLDER):
        yield
        return
    folder, node = Path(environ[FOLDER]), 0
    try:
        node = find_nodes(environ=environ).rank
        with suppress(OSError):
            (folder / f"node{node}.begun").touch()
            (folder / f"node{node}.json").unlink()  # how it ended before its job was queued again
        yield
    except WithHint as error:
        report = ExitReport(exit_code=error.exit_code, message=error.message, hint=error.hint)
        if not _leave(report, folder, node) and node:
            sys.stderr.write(f"node {node} ({socket.gethostname()}): {error}\n")
        if node:
            raise SystemExit(error.exit_code) from None
        raise
    _leave(ExitReport(exit_code=0), folder, node)


def _leave(report: ExitReport, folder: Path, node: int) -> bool:
    """Whether the launch will find the report: the disk may be full, or the folder may be on another machine's disk."""
    if not folder.is_dir():
        return False
    try:
        report.write(folder / f"node{node}.json")
    except SamebitsError:
        return False
    return True


def has_begun(folder: Path) -> bool:
    """Whether the launcher of any node has."""
    return any(folder.glob("node*.begun"))


def read_endings(folder: Path) -> dict[int, WithHint | None]:
    """How each node ended that could say so, the first node first; None for one that ended well."""
    endings: dict[int, WithHint | None] = {}
    for file in sorted(folder.glob("node*.json"), key=lambda file: int(file.stem.removeprefix("node"))):
        with suppress(UserError):
            ending = ExitReport.read(file, made_by="pipeline/train.py")
            failed = from_exit_code(ending.exit_code, ending.message, ending.hint) if ending.exit_code else None
            endings[int(file.stem.removeprefix("node"))] = failed
    return endings
