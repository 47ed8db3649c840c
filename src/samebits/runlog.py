"""The local log of a run: JSON lines that a sender delivers to MLflow while training goes on.

The training writes here and nowhere else, so that a slow or absent server never holds it up. A lock on the
file says that its writer is alive.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

LOGS = Path(".samebits/runs")


def new_key(name: str) -> str:
    """A name for one run that no other run has."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return f"{stamp}-{name}-{secrets.token_hex(3)}"


class RunLog:
    """Appends events to a log; a process that inherits it over a fork may append too."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        fcntl.flock(self._fd, fcntl.LOCK_EX)  # held until the last process that has it ends

    def event(self, name: str, **values: Any) -> None:
        """Append one event; each line is one write, so that lines of several processes do not mix."""
        line = json.dumps({"event": name, "time_ms": time.time_ns() // 1_000_000, **values})
        os.write(self._fd, line.encode() + b"\n")

    def losses(self, first_step: int, losses: Sequence[float], learning_rates: Sequence[float]) -> None:
        """Append the losses of consecutive steps."""
        self.event("losses", first_step=first_step, losses=list(losses), learning_rates=list(learning_rates))

    def close(self) -> None:
        """Let go of the log in this process."""
        os.close(self._fd)


def start_sender(log: Path) -> None:
    """Start the process that delivers ``log`` to MLflow; nobody waits for it, and it outlives this one if it has to.

    It is called by its module's name, so that nothing which trains depends on the tracking code.
    """
    output = str(log.with_suffix(".sender.log"))
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "samebits.tracking", str(log)],
        os.environ,
        setsid=True,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
    )


def writer_gone(log: Path) -> bool:
    """Whether no process has the log open for writing any more."""
    with log.open("rb") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
