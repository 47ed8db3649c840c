"""Commands that may fail, with their output recorded without names and paths of this host."""

from __future__ import annotations

import getpass
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from samebits.errors import HostError, without_password

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

ROOT = Path(__file__).resolve().parent.parent
LINES = 60
"""Last lines of a failed command's output that are kept."""
_REPORT_SECONDS = 60.0
_COMMAND = "from samebits.cli import main; main()"  # needs no installed script


class Check:
    """Runs commands, which may fail, and records their output."""

    def __init__(
        self,
        folder: Path,
        set_here: Collection[str] = (),
        *,
        here: bool = False,
        minutes: float = inf,
        steps: dict[str, dict[str, Any]] | None = None,
        save: Callable[[], None] = lambda: None,
    ) -> None:
        """``set_here`` names variables that this process has set. ``here``: the package is not installed.

        All commands end within so many ``minutes``. ``steps`` are known already. ``save`` is called after each command.
        """
        self.folder, self.set_here, self.here, self.save = folder, set_here, here, save
        self.samebits = [sys.executable, "-P", "-c", _COMMAND] if here else ["samebits"]
        self.steps = {} if steps is None else steps
        self._end = time.monotonic() + 60 * minutes

    @property
    def minutes_left(self) -> float:
        """Minutes in which commands may still run."""
        return (self._end - time.monotonic()) / 60

    def run(self, name: str, *command: str, minutes: float, cwd: Path = ROOT, **environ: str) -> str:
        """Run one command to its end and return its stdout.

        At a time-out its whole session is ended, or it would keep GPUs from the next step.

        Raises:
            HostError: there is no time left for it.
        """
        minutes = min(minutes, self.minutes_left)
        if minutes <= 0:
            raise HostError("no time is left", hint=f"call it again with --add --only {name}")
        click.echo(f"{name} ...", err=True)
        started = time.monotonic()
        pipe, env = subprocess.PIPE, {**os.environ, **environ}
        with subprocess.Popen(
            command, cwd=cwd, env=env, stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True
        ) as process:
            try:
                stdout, stderr = process.communicate(timeout=60 * minutes)
                code = process.returncode
            except subprocess.TimeoutExpired:
                end_group(process)
                stdout, stderr = process.communicate()
                code = 124
            except BaseException:
                end_group(process)
                raise
        said = f"{stdout}\n{stderr}"
        step = self.steps.setdefault(name, {"exit_code": 0, "seconds": 0.0})
        seconds = time.monotonic() - started
        step |= {"exit_code": step["exit_code"] or code, "seconds": round(step["seconds"] + seconds, 1)}
        if code:
            step.setdefault("said", []).extend(cleaned(line) for line in said.strip().splitlines()[-LINES:])
        click.echo(f"{name}: {'ok' if code == 0 else f'failed with {code}'} in {seconds:.1f} s", err=True)
        self.save()
        return stdout


def end_group(leader: subprocess.Popen[str]) -> None:
    """End a process and its session. SIGINT comes first: pytest then reports what it has done so far."""
    with suppress(ProcessLookupError):
        leader.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            leader.wait(_REPORT_SECONDS)
        os.killpg(leader.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            leader.wait(10)
        os.killpg(leader.pid, signal.SIGKILL)


def cleaned(text: str) -> str:
    """A line without passwords and without the names of folders, the user and the host."""
    folders = {str(ROOT): ".", tempfile.gettempdir(): "TMP", str(Path.home()): "~"}
    for path in sorted(folders, key=len, reverse=True):  # longest first: one may lie in another
        text = text.replace(path, folders[path]) if path != "/" else text
    text = re.sub(r"pytest-of-[^/\s]+", "pytest-of-USER", text)
    with suppress(OSError, KeyError):
        text = re.sub(rf"\b{re.escape(getpass.getuser())}\b", "USER", text) if getpass.getuser() != "root" else text
    text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "HOST", text)
    return re.sub(r"\x1b\[[\d;]*m", "", without_password(text))
