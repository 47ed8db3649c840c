"""Run a program in a fork of a process that has imported torch, seconds sooner than in a new interpreter."""

from __future__ import annotations

import os
import sys
import traceback
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def settle(folder: Path | str, stdout: Path | str, stderr: Path | str) -> None:
    """Change to a folder, close the input, and send the output to two files."""
    for number, path in enumerate((stdout, stderr), start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(folder)


def run(program: Callable[[], object]) -> NoReturn:
    """Call ``program`` and end this process as an interpreter would."""
    code = 0
    try:
        program()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - printed as a new interpreter would
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
