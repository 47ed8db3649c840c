"""The stages of this repository, read from their scripts."""

from __future__ import annotations

import runpy
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samebits.stages.interface import StageCommand

ROOT = Path(__file__).resolve().parent.parent


@cache
def stages() -> dict[str, StageCommand]:
    """The command of each stage by its name, in the order of execution."""
    commands = {file.stem: runpy.run_path(str(file))["main"] for file in sorted((ROOT / "pipeline").glob("*.py"))}
    ordered: dict[str, StageCommand] = {}
    while left := [name for name in commands if name not in ordered]:
        written = [file for name in left for file in commands[name].spec.files]
        for name in left:
            if not any(reads_of(read, file) for read in commands[name].spec.reads for file in written):
                ordered[name] = commands[name]
                break
        else:
            raise SystemExit(f"{', '.join(left)} wait for each other")
    return ordered


def reads_of(read: str, written: str) -> bool:
    """Whether a dependency is or contains a file that a stage writes."""
    return written == read or written.startswith(f"{read}/")
