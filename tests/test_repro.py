"""``samebits repro``: one line for each stage, live on a terminal, and what DVC writes in a log."""

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from rich.console import Console

from conftest import wait_for
from samebits.params import parse_params
from samebits.records import progress
from samebits.records.progress import Doing, read, tell
from samebits.stages import repro
from samebits.stages.repro import Shown, count_stages

TRAINED = "single-fast: 0.923 s, median step 43.3 ms, 88,800 samples/s, weights 5a717ce06e1a"
LINES = ["Running stage 'prepare':", "> python -P pipeline/prepare.py", "vectors: 40960 + 8192 samples, floor 1.93",
         "Updating lock file 'dvc.lock'", "", "Stage 'host' didn't change, skipping",
         "Running stage 'gpu/dvc.yaml:train@single-fast':", "> python -P pipeline/train.py --strategy single",
         "on the host, not in the image: no Docker engine", TRAINED, "note: something that changes no decision",
         "To track the changes with git, run:", "\tgit add dvc.lock", "To enable auto staging, run:",
         "\tdvc config core.autostage true", "Use `dvc push` to send your updates to remote storage."]  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(progress.VARIABLE, raising=False)
    (tmp_path / ".samebits").mkdir()
    return tmp_path


def shown(lines, *, terminal=False, failed=False, width=100):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=width, highlight=False)
    screen = Shown(10, console)
    with screen:
        for line in lines:
            screen.take(line)
        if terminal:
            screen.look(Doing("timing slices", 2, 4))
    screen.finish(failed=failed)
    return stream.getvalue()


def test_a_stage_has_one_line_and_dvc_none():
    lines = shown(LINES).splitlines()
    assert [line.split()[:2] for line in lines if "/10" in line] == [["1/10", "prepare"], ["3/10", "single-fast"]]
    assert lines[0].endswith(" s  vectors: 40960 + 8192 samples, floor 1.93")
    assert lines[1] == "on the host, not in the image: no Docker engine"
    assert lines[2].endswith("0.923 s, median step 43.3 ms, 88,800 samples/s, weights 5a717ce06e1a")
    assert lines[3:] == ["1 of 10 stages did not change"]


def test_a_long_line_is_cut_and_moves_no_cursor():
    (line, *_) = shown(["Running stage 'train@a':", "a: " + "\x1b[2K" + 200 * "x"]).splitlines()
    assert len(line) == 100
    assert line.endswith("…")
    assert "\x1b" not in line


def test_a_stage_that_fails_is_told_whole():
    wrong = ["Traceback (most recent call last):", "error: no. hint: yes", "ERROR: failed"]
    text = shown([*LINES[6:9], *wrong], failed=True)
    assert text.count("Traceback (most recent call last):") == 1
    assert text.count("error: no. hint: yes") == 1
    assert text.endswith("All that was written: .samebits/repro.log\n")


def test_on_a_terminal_a_live_line_says_what_it_is_doing():
    text = shown(LINES[:1], terminal=True)
    assert "1/10 prepare: timing slices 2 of 4" in text
    assert "about" not in text  # it is not known yet


def test_how_long_it_takes_is_known_from_the_last_time():
    Path(".samebits/stage_seconds.json").write_text('{"seconds": {"prepare": 90.4}}')
    assert "1/10 prepare: timing slices 2 of 4, about 1 min 30 s left" in shown(LINES[:1], terminal=True)
    assert json.loads(Path(".samebits/stage_seconds.json").read_text())["seconds"]["prepare"] < 5


def test_how_long_it_takes_is_else_known_from_the_steps(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(repro.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    screen = Shown(10, Console(file=stream, force_terminal=True, width=100))
    with screen:
        screen.take(LINES[6])
        screen.look(Doing("training, step", 10, 100))
        now[0] += 5
        screen.look(Doing("training, step", 30, 100))
    assert " 1/10 single-fast: training, step 30 of 100, about 18 s left" in stream.getvalue()


@pytest.mark.parametrize("text", ["", "[1]", "{}", '["a", "b", "c"]'])
def test_progress_that_is_none(text, here):
    (here / "progress").write_text(text)
    assert read(here / "progress") is None


def test_what_a_process_is_doing_is_told_where_somebody_asks(here, monkeypatch):
    tell("training", 1, 3)
    assert [file.name for file in here.iterdir()] == [".samebits"]
    monkeypatch.setenv(progress.VARIABLE, str(here / "progress"))
    monkeypatch.setattr(progress, "_last", ("", 0.0))
    tell("training", 1, 3)
    tell("training", 2, 3)  # at once: not written
    assert read(here / "progress") == Doing("training", 1, 3)
    tell("training", 3, 3)
    assert read(here / "progress") == Doing("training", 3, 3)
    tell("recording")
    assert read(here / "progress") == Doing("recording", 0, 0)
    monkeypatch.setenv(progress.VARIABLE, "/nowhere/progress")
    tell("going on")


def test_how_many_stages_there_are():
    assert count_stages(parse_params({})) == 10
    assert count_stages(parse_params({"train": {"numerics": ["fast"], "strategies": ["ddp"]}})) == 5


DVC = """
    stages:
      host:
        cmd: {python} -c "import time, os; print(os.environ['SAMEBITS_PROGRESS'], flush=True); {code}"
"""


def pipeline(folder, code):
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    subprocess.run([sys.executable, "-m", "dvc", "init", "--quiet"], cwd=folder, check=True)
    (folder / "params.yaml").write_text("{}\n")
    (folder / "dvc.yaml").write_text(textwrap.dedent(DVC).format(python=sys.executable, code=code))


@pytest.mark.parametrize(("code", "expected"), [("pass", 0), ("raise SystemExit(3)", 255)])
def test_dvcs_exit_code_is_passed_on_and_its_words_are_in_the_log(code, expected, here):
    pipeline(here, code)
    stream = io.StringIO()
    got, _ = repro.reproduce(Path(), ["--force"], Console(file=stream, highlight=False))
    assert got == expected
    log = (here / ".samebits/repro.log").read_text()
    assert "Running stage 'host':" in log
    assert str(here / ".samebits/progress.json") in log
    assert ("failed to reproduce 'host'" in stream.getvalue()) is bool(expected)
    assert "Running stage" not in stream.getvalue()


def test_ctrl_c_is_left_to_the_stage(here):
    pipeline(here, "time.sleep(60)")
    command = [sys.executable, "-m", "samebits.cli", "repro"]
    process = subprocess.Popen(command, cwd=here, start_new_session=True, stdout=subprocess.PIPE, text=True)
    log = here / ".samebits/repro.log"
    wait_for(lambda: log.exists() and "progress.json" in log.read_text())
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode not in (0, None)
    assert "All that was written" in out
