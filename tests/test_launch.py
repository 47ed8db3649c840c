"""Workers that fail, hang or are killed, and signals to the launcher."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import small, wait_for

# Runs FUNCTION in two workers, as pipeline/train.py runs ``work``.
SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
from samebits.errors import HostError, UserError, WorkerError, exit_on_error
from samebits.launch import launch
from samebits.rank import report_failure

def fail(error, scratch):
    report_failure(error, scratch)
    raise SystemExit(error.exit_code)

def first_killed(job, scratch):
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)

def second_leaves(job, scratch):
    if os.environ["RANK"] == "1":
        os._exit(7)
    time.sleep(60)

def user_error(job, scratch):
    if os.environ["RANK"] == "1":
        fail(UserError("the thing is wrong", hint="mend it"), scratch)
    time.sleep(60)

def root_cause(job, scratch):
    if os.environ["RANK"] == "1":
        fail(HostError("no memory", hint="take less"), scratch)
    time.sleep(0.5)
    fail(WorkerError("waited in vain for another", hint="see the other"), scratch)

def well(job, scratch):
    Path(f"rank{os.environ['RANK']}").write_text(json.dumps([os.environ["WORLD_SIZE"], job]))

def note_pid(job, scratch):
    Path(f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
    time.sleep(60)

with exit_on_error():
    launch(globals()[sys.argv[1]], "job", 2)
"""


@pytest.fixture
def run(stage):
    script = stage.folder / "script.py"
    script.write_text(SCRIPT)
    return lambda function: stage.run_script(script, function)


def test_workers_get_the_job_and_their_rank(run, stage):
    assert run("well").returncode == 0
    assert [(stage.folder / f"rank{rank}").read_text() for rank in (0, 1)] == ['["2", "job"]'] * 2


@pytest.mark.parametrize(
    ("function", "code", "message"),
    [
        ("first_killed", 4, "the worker of rank 0 was ended by SIGKILL. hint: the kernel may have been out of memory"),
        ("second_leaves", 4, "the worker of rank 1 ended with exit code 7. hint: "),
        ("user_error", 2, "the thing is wrong. hint: mend it"),
        ("root_cause", 3, "no memory. hint: take less"),
    ],
)
def test_the_first_failure_ends_all_and_is_named(function, code, message, run):
    started = time.monotonic()
    done = run(function)
    assert done.returncode == code
    assert done.stderr.startswith(f"error: {message}")
    assert len(done.stderr.splitlines()) == 1
    assert time.monotonic() - started < 40  # the others were ended, they would have slept for a minute


def start(stage, command):
    return subprocess.Popen(command, cwd=stage.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def is_running(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_signal_to_the_launcher_ends_its_workers(signum, code, stage):
    script = stage.folder / "script.py"
    script.write_text(SCRIPT)
    process = start(stage, [sys.executable, str(script), "note_pid"])
    files = [stage.folder / f"pid{rank}" for rank in (0, 1)]
    wait_for(lambda: all(file.exists() and file.read_text() for file in files))
    process.send_signal(signum)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == code
    wait_for(lambda: not any(is_running(int(file.read_text())) for file in files), seconds=10)
    if signum != signal.SIGKILL:
        name = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}[signum]
        assert stderr == f"error: stopped by {name}. hint: run the same command again\n"


def test_a_killed_rank_ends_a_real_training(stage, data_dir):
    """With the other rank waiting in a collective for the one that is gone."""
    raw = small(epochs=100_000, repeats=1)
    params = stage.write_params(raw)
    script = stage.script("train")
    arguments = ["--strategy", "ddp", "--no-tracking", "--data-dir", str(data_dir(params))]
    process = start(stage, [sys.executable, script, *arguments])

    def workers():
        tasks = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        found = tasks.read_text().split() if tasks.exists() else []
        return found if len(found) == 2 else None

    last = int(wait_for(workers)[1])
    time.sleep(2)  # into the loop
    os.kill(last, signal.SIGKILL)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 4
    assert stderr.startswith("error: the worker of rank 1 was ended by SIGKILL")
    assert not (stage.folder / "runs/ddp-fast/run.json").exists()
