"""What a session does with tests that hang, or that leave processes behind."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from conftest import ROOT, wait_for
from patience import patient

START = """
import signal, subprocess, sys, time
from pathlib import Path

def start(program):
    process = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    Path("pid").write_text(str(process.pid))
"""
SLEEP = "import time; time.sleep(3600)"


@pytest.fixture
def session(tmp_path):
    """Run such a test: its exit code and what was printed."""

    def run(body, limit=2000, patience="0.05"):
        (tmp_path / "test_it.py").write_text(f"{START}\ndef test_it():\n    {body}\n")
        environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT / 'tools'}", "SAMEBITS_TEST_PATIENCE": patience}
        options = ["-p", "running", "-p", "no:cacheprovider", "--timeout", str(limit)]
        command = [sys.executable, "-m", "pytest", *options, "test_it.py"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=patient(120), check=False
        )
        return done.returncode, done.stdout + done.stderr

    return run


def is_running(folder):
    with suppress(OSError):
        return bool(Path(f"/proc/{(folder / 'pid').read_text()}/cmdline").read_bytes())  # empty of one that has ended
    return False


@pytest.mark.parametrize(
    "program", [SLEEP, f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}])"]
)
def test_a_process_that_is_left_fails_its_test(program, session, tmp_path):
    code, said = session(f"start({program!r})")
    assert code == 1
    assert "it left processes behind: " in said
    assert "time.sleep(3600)" in said
    wait_for(lambda: not is_running(tmp_path))


def test_a_process_that_ends_by_itself_is_not_reported(session):
    code, said = session("start('import time; time.sleep(0.2)')", patience="1")
    assert (code, "1 passed" in said) == (0, True), said


def test_a_test_that_hangs_shows_its_stack_and_takes_its_processes_along(session, tmp_path):
    code, said = session(f"start({SLEEP!r}); time.sleep(3600)", limit=100)
    assert code == 1
    assert "Timeout (>5.0s)" in said
    assert "it left processes behind: " in said
    wait_for(lambda: not is_running(tmp_path))


def test_a_test_that_no_signal_reaches_ends_the_session(session):
    code, said = session("signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM}); time.sleep(3600)", limit=100)
    assert code == 1
    assert "in test_it" in said
