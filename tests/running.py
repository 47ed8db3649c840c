"""What every test session keeps to: limits, no process that outlives its test, and saying what was left out."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from patience import patient

if TYPE_CHECKING:
    from collections.abc import Iterator

COMMANDS = {
    "container": "make test-container",
    "rehearsal": "make test-rehearsal",
    "gpus": "make test-gpu",
    "slow": "make test-all",
}
"""Which command runs the tests of a marker; the first that a test has decides."""
RUNNING = "SAMEBITS_TEST_RUNNING"
"""A folder, in which a file of each process names the test that it is in."""

_BY_THEMSELVES_SECONDS = 60  # in which processes end that nobody waits for
_MARK = "SAMEBITS_TEST_SESSION"
_LINGERS = "samebits.tracking.sender"  # as it is meant to, for a minute; here it is ended

_left_out: Counter[str] = Counter()


_stderr = -1  # of this process, which tests have captured


def pytest_configure() -> None:
    global _stderr
    _stderr = os.dup(2)
    os.environ[_MARK] = f"{os.getpid()}-{time.time_ns()}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Limits are patient too."""
    for item in items:
        marker = item.get_closest_marker("timeout")
        seconds = marker.args[0] if marker else config.getoption("timeout") or float(config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(patient(seconds)), append=False)


def pids() -> set[str]:
    """Every process of this host."""
    return {name for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208 - a thousand times as often as others


def started_here(pid: str) -> str | None:
    """The command line of a process that this session has started and that runs, else None.

    It is known by its parent, or by a variable: the parent of one that outlived its own is somebody else.
    """
    with suppress(OSError):
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[:2]
        if state == "Z" or parent == "2":  # it has ended, or is the kernel's
            return None
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if not line:
            return "about to begin"  # between fork and exec nobody can tell whose it is
        if int(parent) == os.getpid() or f"{_MARK}={os.environ[_MARK]}".encode() in variables:
            return None if "multiprocessing.resource_tracker" in line else line
    return None


@pytest.fixture(autouse=True)
def processes_end() -> Iterator[None]:
    """A test fails that leaves processes behind. Those of fixtures for a module or session are there before it."""
    before = pids()
    yield
    deadline = time.monotonic() + patient(_BY_THEMSELVES_SECONDS)
    while left := {int(pid): line for pid in pids() - before if (line := started_here(pid))}:
        late = time.monotonic() > deadline
        for pid, line in left.items():
            with suppress(ProcessLookupError):
                if late:
                    os.kill(pid, signal.SIGKILL)
                elif _LINGERS in line:
                    os.kill(pid, signal.SIGTERM)
        if late:
            pytest.fail(f"it left processes behind: {left}")
        time.sleep(0.02)


def command_of(item: pytest.Item) -> str | None:
    """The command that runs a test which this session leaves out."""
    return next((command for marker, command in COMMANDS.items() if item.get_closest_marker(marker)), None)


def pytest_deselected(items: list[pytest.Item]) -> None:
    _left_out.update(filter(None, map(command_of, items)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Say which test is running, and end a session that hangs where not even the limit's signal ends the test."""
    marker = item.get_closest_marker("timeout")
    if marker:
        faulthandler.dump_traceback_later(marker.args[0] + patient(60), exit=True, file=_stderr)
    folder = os.environ.get(RUNNING)
    note = Path(folder, str(os.getpid())) if folder else None
    if note:
        note.write_text(f"{item.nodeid}\n")
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        if note:
            note.unlink(missing_ok=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With xdist, what was left out is known to the workers alone."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(_left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    if not _left_out:  # every worker collects all tests
        _left_out.update(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for command, count in sorted(_left_out.items()):
        terminalreporter.write_line(f"left out: {count} tests, which `{command}` runs")
