"""The local log of a run: JSON lines that a sender delivers to MLflow while training goes on.

The training writes here and nowhere else, so that a slow or absent server never holds it up. A lock on the
file says that its writer is alive.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import subprocess
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


def start_sender(log: Path) -> subprocess.Popen[bytes]:
    """Start the process that delivers ``log`` to MLflow; it outlives this one if it has to.

    It is called by its module's name, so that nothing which trains depends on the tracking code.
    """
    with log.with_suffix(".sender.log").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "samebits.tracking", str(log)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def record_comparison(comparison: dict[str, Any], wait_seconds: float = 60) -> bool:
    """Send a comparison's figures to the runs it compares; False if that takes longer than ``wait_seconds``."""
    log = RunLog(LOGS / f"{new_key('comparison')}.jsonl")
    experiment = comparison["params"]["tracking"]["experiment"]
    log.event("comparison", rows=comparison["rows"], experiment=experiment)
    log.event("end", status="FINISHED")
    sender = start_sender(log.path)
    log.close()
    try:
        return sender.wait(wait_seconds) == 0
    except subprocess.TimeoutExpired:
        return False
