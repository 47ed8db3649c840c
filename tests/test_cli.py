"""The command line as a user calls it."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from conftest import Stage, small
from patience import patient
from samebits.cli.commands import main
from samebits.records.run import Rounding, RunRecord
from samebits.results.comparison import Comparison
from samples import comparison, ratio, row

SAMEBITS = str(Path(sys.executable).with_name("samebits"))


def samebits(folder, *arguments, **environ):
    variables = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    return subprocess.run(
        [SAMEBITS, *arguments],
        cwd=folder,
        env={**variables, **environ},
        capture_output=True,
        text=True,
        timeout=patient(240),
    )


@pytest.fixture(scope="module")
def runs(data_dir, stage_server, tmp_path_factory):
    """Trainings of 8 steps: ``single``, ``ddp``, and ``mistaken`` with another learning rate."""
    stage = Stage(tmp_path_factory.mktemp("runs"), stage_server, tmp_path_factory.mktemp("output"))
    rate = {"name": "sgd", "lr": 0.1, "momentum": 0.9}
    for name, strategy, lr in (("single", "single", 0.1), ("ddp", "ddp", 0.1), ("mistaken", "single", 0.101)):
        raw = small(num_devices=2, oversubscribe=True, repeats=2, optimizer={**rate, "lr": lr})
        params = stage.write_params(raw)
        arguments = ("--strategy", strategy, "--data-dir", str(data_dir(params)), "--out-dir", name, "--no-tracking")
        done = stage("train", *arguments)
        assert done.returncode == 0, done.stderr
    return stage.folder


@pytest.mark.parametrize(
    ("other", "require", "code", "grade"),
    [
        ("single", "bitwise", 0, "bitwise"),
        ("ddp", None, 0, "within tolerance"),
        ("ddp", "tolerance", 0, "within tolerance"),
        ("ddp", "bitwise", 1, "within tolerance"),
        ("mistaken", None, 0, "diverged"),
        ("mistaken", "tolerance", 1, "diverged"),
    ],
)
def test_compare(other, require, code, grade, runs):
    arguments = ["--require", require] if require else []
    done = samebits(runs, "compare", "single", other, *arguments)
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines()[0].split(" ", 1)[1] == grade


def test_compare_says_what_differs(runs):
    done = samebits(runs, "compare", "single", "mistaken")
    assert "  params.train.optimizer.lr: 0.1 | 0.101" in done.stdout
    assert "losses: diverged: first at step " in done.stdout
    found = json.loads(samebits(runs, "compare", "single", "ddp", "--json").stdout)
    assert (found["a"], found["b"], found["grade"]) == ("single", "ddp", "within tolerance")
    assert found["differences"]["strategy"] == ["single", "ddp"]
    assert found["losses"]["measured"] is True
    assert set(Rounding.model_fields) == set(json.loads((runs / "single/run.json").read_text())["rounding"])


def test_explain(runs, tmp_path):
    """By its folder, by JSON beside another run, and without a name: then it is the run with most devices."""
    text = samebits(runs, "explain", "ddp").stdout
    found = json.loads(samebits(runs, "explain", "ddp", "--against", "single", "--json").stdout)
    first = r"This host was too unsteady .*" if found["unsteady"] else r"a step takes [\d.]+ ms"
    assert re.match(rf"ddp-fast of mlp on vectors, global batch \d+: {first}\n\n(  .*\n)*  backward pass ", text), text
    assert (found["run"], found["against"]["run"]) == ("ddp-fast", "single-fast")
    assert (found["against"]["samples"], found["against"]["batch_grew"]) == (1, False)
    against = samebits(runs, "explain", "ddp", "--against", "single").stdout
    assert against.startswith(text.rstrip())
    assert re.search(r"\n\nAgainst single-fast, a step takes [\d.]+ times .*, for as many samples: ", against)

    params = json.loads((runs / "ddp/run.json").read_text())["params"]
    (tmp_path / "params.yaml").write_text(json.dumps(params))
    for name, folder in (("single", "single-fast"), ("ddp", "ddp-fast")):
        shutil.copytree(runs / name, tmp_path / "runs" / folder)
    assert samebits(tmp_path, "explain").stdout == text
    shutil.rmtree(tmp_path / "runs/ddp-fast")
    assert samebits(tmp_path, "explain").stdout.startswith("single-fast of mlp on vectors, global batch ")


def test_a_run_that_was_not_divided_has_no_explanation(runs, tmp_path):
    shutil.copytree(runs / "single", tmp_path / "single")
    record = json.loads((tmp_path / "single/run.json").read_text())
    (tmp_path / "single/run.json").write_text(json.dumps({**record, "breakdown": None}))
    done = samebits(tmp_path, "explain", "single")
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: single: its steps were not divided into parts. hint: train in fast numerics" in done.stderr
    (tmp_path / "params.yaml").touch()
    done = samebits(tmp_path, "explain")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: runs: there is no run in fast numerics. hint: run `dvc repro`, or name a RUN\n"
    shutil.copytree(runs / "ddp", tmp_path / "gpu/runs/ddp-fast")
    hint = "hint: name a RUN, such as gpu/runs/ddp-fast"
    assert samebits(tmp_path, "explain").stderr == f"error: runs: there is no run in fast numerics. {hint}\n"


MISTAKES = [
    (("compare", "nothing", "single"), 2, "nothing: no such folder, and not a run id"),
    (("compare", "single", "."), 2, "run.json: no such file. hint: run `samebits stage train` first"),
    (
        ("report", "single/run.json"),
        2,
        f"single/run.json: schema {RunRecord.SCHEMA}; this version reads schema {Comparison.SCHEMA}",
    ),
    (("track", "sync"), 2, "has no params.yaml. hint: run this at the root of the repository"),
    (("ui",), 2, "has no params.yaml"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), MISTAKES, ids=[" ".join(case[0])[:30] for case in MISTAKES])
def test_mistakes_end_in_one_line_with_a_hint(arguments, code, message, runs, tmp_path):
    shutil.copytree(runs / "single", tmp_path / "single")
    done = samebits(tmp_path, *arguments)
    assert done.returncode == code
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert message in line
    assert " hint: " in line
    assert "Traceback" not in done.stderr


def test_a_store_that_is_away_is_said(runs):
    environ = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    done = samebits(runs, "compare", "single", "0" * 32, **environ)
    assert done.returncode == 3
    assert "error: MLflow cannot be reached: " in done.stderr


def test_a_port_that_is_taken_is_said(runs):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = samebits(runs, "ui", "--port", port)
    assert done.returncode == 3
    assert f"error: port {port} cannot be used: Address already in use. hint: choose another: " in done.stderr


def test_a_report_is_made_again_from_its_comparison(tmp_path):
    dp = row("dp", devices=4, speedup=ratio(1.3), bound=ratio(3.6))
    comparison(row(speedup=ratio(1.0)), dp).write(tmp_path / "comparison.json")
    done = samebits(tmp_path, "report", "comparison.json", "--out-dir", "again")
    assert done.stdout == "again/index.html\n"
    assert (tmp_path / "again/plots/speedups.svg").exists()
    assert "| dp-fast |" in (tmp_path / "again/comparison.md").read_text()
    assert "Since 2026" not in (tmp_path / "again/index.html").read_text()
    told = samebits(tmp_path, "report", "comparison.json", "--out-dir", "again", "--against", "comparison.json", "-v")
    assert "\nHow much faster?        1.30×   dp on 4 GPUs" in told.stdout
    assert "Since 2026-01-02, commit c0ffee, same host" in (tmp_path / "again/index.html").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory-gib", "nan"], "nan is no size"),
        (["--nodes", "--model"], "error: --nodes and --model: each has a look of its own. hint: give one"),
        (["--nodes", "--memory-gib", "1"], "error: --nodes and --memory: each has a look of its own. hint: give one"),
        (["--nodes"], "error: --nodes: this was started on one machine alone. hint: salloc --nodes=2 samebits"),
    ],
)
def test_what_the_doctor_cannot_look_at_is_refused(options, message):
    done = CliRunner().invoke(main, ["doctor", *options], env={"TORCH_CPP_LOG_LEVEL": "ERROR"})
    assert (done.exit_code, message in done.stderr) == (2, True), done.stderr


def test_a_shell_can_complete(tmp_path):
    """As click does it for every program, and the reference tells."""
    assert "_SAMEBITS_COMPLETE" in samebits(tmp_path, _SAMEBITS_COMPLETE="zsh_source").stdout
    environ = {"_SAMEBITS_COMPLETE": "bash_complete", "COMP_WORDS": "samebits com", "COMP_CWORD": "1"}
    assert samebits(tmp_path, **environ).stdout.split() == ["plain,compare"]


def commands(command, path=()):
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))


COMMANDS = list(commands(main))


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=[" ".join(path) or "samebits" for path, _ in COMMANDS])
def test_every_command_helps_with_an_example(path, command):
    done = CliRunner().invoke(main, [*path, "-h"], prog_name="samebits", color=True)
    assert done.exit_code == 0
    assert ("Example" in done.stdout) == (not hasattr(command, "commands"))
    assert "\x1b" not in done.stdout
