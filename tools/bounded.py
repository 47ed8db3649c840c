"""Run a command with a time limit and leave none of its processes behind: ``bounded.py SECONDS COMMAND...``.

The exit code is the command's. 124: the time was over. 125: the command succeeded, but processes that it had started
did not end soon after it. Those are ended and named on stderr. It needs no package, because it also runs the command
that makes the environment, and it needs Linux.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_TO_END_SECONDS = 20  # between SIGTERM and SIGKILL
_BY_ITSELF_SECONDS = 180  # generous: on a busy host the import of MLflow alone takes a minute


def adopt_orphans() -> None:
    """Become the parent of every orphan among this process's descendants, also in other sessions."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def descendants(of: int) -> dict[int, str]:
    """Process id and command line of each living descendant."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            state, parent = stat.read_text().rpartition(") ")[2].split()[:2]
            if state != "Z":
                parents[int(stat.parent.name)] = int(parent)
    found: dict[int, str] = {}
    new = {of}
    while new := {pid for pid, parent in parents.items() if parent in new}:
        for pid in new:
            with suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found


def wait_and_reap(process: subprocess.Popen[bytes], deadline: float) -> int:
    """Wait for a process, and reap every other child that has ended: a zombie looks alive to others."""
    while process.poll() is None:
        reap(process.pid)
        if time.monotonic() > deadline:
            raise subprocess.TimeoutExpired(process.args, deadline)
        time.sleep(0.05)
    return process.wait()


def reap(other_than: int = 0) -> None:
    """Reap the children that have ended, except one that somebody else waits for."""
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != other_than:
            os.waitpid(ended.si_pid, 0)


def wait_for(of: int, seconds: float) -> dict[int, str]:
    """Descendants that are still alive after so many seconds."""
    deadline = time.monotonic() + seconds
    while (left := descendants(of)) and time.monotonic() < deadline:
        time.sleep(0.1)
        reap()
    return left


def end(of: int) -> None:
    """End all descendants by SIGTERM, and after a while by SIGKILL."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        for pid in descendants(of):
            with suppress(ProcessLookupError):
                os.kill(pid, signum)
        wait_for(of, _TO_END_SECONDS)


def main(seconds: float, command: list[str]) -> int:
    """Run the command and return the exit code."""
    adopt_orphans()
    with subprocess.Popen(command) as process:
        for signum in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, lambda *_: process.terminate())
        try:
            code = wait_and_reap(process, time.monotonic() + seconds)
        except subprocess.TimeoutExpired:
            sys.stderr.write(f"error: not done within {seconds:.0f} s: {' '.join(command)}\n")
            end(os.getpid())
            return 124
        except KeyboardInterrupt:  # the command got it too
            code = wait_and_reap(process, time.monotonic() + _TO_END_SECONDS)
    left = wait_for(os.getpid(), 0 if code else _BY_ITSELF_SECONDS)
    end(os.getpid())
    if left:
        named = "".join(f"\n  {pid}: {line[:150]}" for pid, line in left.items())
        sys.stderr.write(f"error: still running after {' '.join(command)}:{named}\n")
    return code or (125 if left else 0)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
