"""What every test session says and keeps to: which test is running, and what was left out, by which command it runs."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

COMMANDS = {
    "container": "make test-container",
    "rehearsal": "make rehearse",
    "gpus": "make test-gpu",
    "slow": "make test-all",
}
"""Which command runs the tests of a marker; the first that a test has decides."""
RUNNING = "SAMEBITS_TEST_RUNNING"
"""A folder, in which a file of each process names the test that it is in."""

_left_out: Counter[str] = Counter()


def command_of(item: pytest.Item) -> str | None:
    """The command that runs a test which this session leaves out."""
    return next((command for marker, command in COMMANDS.items() if item.get_closest_marker(marker)), None)


def pytest_deselected(items: list[pytest.Item]) -> None:
    _left_out.update(filter(None, map(command_of, items)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Say which test is running, for whoever has to end a session that hangs."""
    folder = os.environ.get(RUNNING)
    note = Path(folder, str(os.getpid())) if folder else None
    if note:
        note.write_text(f"{item.nodeid}\n")
    try:
        return (yield)
    finally:
        if note:
            note.unlink(missing_ok=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With xdist, what was left out is known to the workers alone."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(_left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    _left_out.update(_left_out.__class__() if _left_out else getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for command, count in sorted(_left_out.items()):
        terminalreporter.write_line(f"left out: {count} tests, which `{command}` runs")
