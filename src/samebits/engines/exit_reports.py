"""How the launchers of a stage ended on the machines of a cluster, as each of them wrote it down.

An engine tells of a task that another one's end took along as of one that failed first, so that its exit code is no
cause.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from samebits.errors import SamebitsError, UserError, WithHint, from_exit_code
from samebits.files import Record

if TYPE_CHECKING:
    from pathlib import Path

FOLDER = "SAMEBITS_LAUNCH"
"""Variable with the folder in which the launchers of a stage write down how they ended."""


class ExitReport(Record):
    """The end of one node's launcher."""

    exit_code: int
    message: str = ""
    hint: str = ""


def write_ending(folder: Path, node: int, error: WithHint | None) -> bool:
    """Write down how the launcher of a node ends, and return True; False if that cannot be read where it was started.

    As where the folder is on another machine's disk, or its disk is full.
    """
    if not folder.is_dir():
        return False
    ending = ExitReport(exit_code=0)
    if error is not None:
        ending = ExitReport(exit_code=error.exit_code, message=error.message, hint=error.hint)
    try:
        ending.write(folder / f"node{node}.json")
    except SamebitsError:
        return False
    return True


def begin(folder: Path, node: int) -> None:
    """Note that the launcher of a node has begun, and forget how it ended before its job was queued again."""
    with suppress(OSError):
        (folder / f"node{node}.begun").touch()
        (folder / f"node{node}.json").unlink()


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
