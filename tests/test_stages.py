"""What the stages' scripts share."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from conftest import ROOT, small
from patience import patient
from samebits.cli import commands as cli
from samebits.errors import UserError
from samebits.stages.interface import Group, StageSpec, say_what_stays_unused, stage
from standins import raising

SPEC = StageSpec(about="a stage", writes=())


@stage(SPEC)
def some_stage(params):
    pass


@pytest.mark.parametrize(
    ("host", "cuda", "devices", "said"),
    [
        (("A",), "13.0", None, []),
        (("A", "gpu 0", "fails all GPU_IS_LOST"), None, None, ["the driver shows 4 GPUs"]),
        (("A",), None, None, ["is a CPU build, and the driver shows 4 GPUs: trainings run on the CPU. "
                           "hint: make repro TORCH=gpu, or set CUDA_VISIBLE_DEVICES= to agree"]),
        (("B",), None, None, ["the driver shows 1 GPU: "]),
        (("B",), None, "", []),
        (("B",), "rocm", "", ["+rocm7.1 is built for ROCm, which the kit does not use: trainings run on the CPU. "
                              "hint: make repro TORCH=cpu to agree"]),
        (("A",), "13.0", "9", ["warning: CUDA_VISIBLE_DEVICES is 9, which names no GPU of the 4 here"]),
        (("E",), None, None, ["the first of 4 is taken", "the driver shows 1 GPU: "]),
    ],
)  # fmt: skip
def test_unused_gpus_are_warned_of(host, cuda, devices, said, gpu_host, capsys):
    rocm = {"STAND_IN_HIP": "7.1"} if cuda == "rocm" else {}
    gpu_host(*host, cuda=None if rocm else cuda, devices=devices, **rocm)
    say_what_stays_unused()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(said)
    for line, text in zip(lines, said, strict=True):
        assert line.startswith("warning: ")
        assert text in line


@pytest.mark.parametrize(
    ("script", "environ", "says"),
    [
        ("host", {"DVC_STAGE": "host"}, True),
        ("train", {}, True),
        ("train", {"DVC_STAGE": "train@single-fast"}, False),
    ],
)
def test_the_first_stage_and_a_training_by_hand_warn_of_unused_gpus(script, environ, says, stage, gpu_host):
    """What comes after it fails: there is no data."""
    gpu_host("A", cuda=None)
    shutil.copy(ROOT / "params.yaml", stage.folder)
    done = stage.fresh(script, *(["--strategy", "single"] if script == "train" else []), **environ)
    assert ("is a CPU build, and the driver shows 4 GPUs" in done.stderr) is says, done.stderr


def test_torch_is_imported_with_its_native_compilation_switched_off(stage, data_dir):
    """It needs a C compiler on a GPU, and has no fallback; torch looks at the variable once, when it is imported."""
    (stage.folder / "mine.py").write_text(
        "import torch\n"
        "from torch._native.common_utils import check_native_jit_disabled\n"
        "def make():\n"
        "    print('switched off', check_native_jit_disabled())\n"
        "    return torch.nn.Linear(128, 10)\n"
    )
    params = stage.write_params(small(model={"name": "mine:make", "source": "mine.py"}))
    done = stage.fresh("train", "--strategy", "single", "--no-tracking", "--data-dir", str(data_dir(params)))
    assert "switched off True" in done.stdout, done.stderr


def test_a_wrong_option_of_a_stage_is_named(capsys):
    with pytest.raises(SystemExit) as ended:
        some_stage.main(["--parms", "p.yaml"])
    assert ended.value.code == 2
    assert "No such option" in (said := capsys.readouterr().err)
    assert "--params" in said


@pytest.mark.parametrize(("command", "above"), [(some_stage, []), (cli.main, []), (cli.main, ["track", "sync"])])
def test_control_characters_are_escaped(command, above, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main([*above, "--\x07\x9b"], prog_name="x")
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert r"No such option '--\x07\x9b'" in said or r"No such option: --\x07\x9b" in said
    assert all(line.isprintable() for line in said.splitlines())


@stage(SPEC)
def broken_stage(params):
    raise KeyError("http://me:S3CRET@host")


def test_a_bug_ends_with_4_since_1_is_a_verdict(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text("seed: 0")
    monkeypatch.setenv("SAMEBITS_RUNTIME", "host")
    with pytest.raises(SystemExit) as ended:
        broken_stage.main([], prog_name="x")
    assert ended.value.code == 4
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert "KeyError: 'http://me:***@host'" in said
    assert "S3CRET" not in said


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_that_python_swallows_is_not_lost(name, code):
    script = (
        "import os, signal, time, weakref\n"
        "from samebits.errors import exit_on_error\n"
        "with exit_on_error():\n"
        "    thing = {1}.__class__()\n"
        f"    seen = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.{name}))\n"
        "    del thing\n"
        "    time.sleep(3600)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=patient(120)
    )
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr


@pytest.mark.parametrize(
    "program",
    [
        ["pipeline/train.py"],
        ["-m", "samebits.cli", "stage", "train"],
        [str(Path(sys.executable).with_name("samebits")), "doctor"],
    ],
)
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_while_a_program_is_imported_ends_it_as_later(tmp_path, program, name, code):
    late = tmp_path / "late"
    code_of_click = f"import os, signal\nos.kill(os.getpid(), signal.{name})\nopen({str(late)!r}, 'x')\n"
    (tmp_path / "click.py").write_text(code_of_click)
    done = subprocess.run(
        [sys.executable, "-P", *program], capture_output=True, text=True, check=False, timeout=patient(120),
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}"}, cwd=ROOT,
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n"), "Traceback" in done.stderr) == (code, 1, False), done.stderr
    assert not late.exists()


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (UserError("--it: got 3, accepts 4", hint="take 4"), 2, "error: --it: got 3, accepts 4. hint: take 4\n"),
        (MemoryError("no room"), 3, "error: out of memory: no room. hint: "),
        (KeyboardInterrupt(), 130, "error: stopped by Ctrl-C. hint: "),
        (KeyError("a bug"), 4, "Traceback (most recent call last)"),
    ],
)
def test_errors_while_options_are_read_end_as_in_a_stage(raised, code, said, capsys):
    """Click would say "Aborted!", or let Python end with 1, which is a verdict's."""

    @click.group(cls=Group, invoke_without_command=True)
    @click.option("--it", callback=raising(raised))
    def command(it):
        raise AssertionError

    with pytest.raises(SystemExit) as ended:
        command(["--it", "3"])
    err = capsys.readouterr().err
    assert (ended.value.code, err.lstrip("\n").startswith(said)) == (code, True), err  # click ends the line of a ^C


def test_a_users_model_sees_sets_in_one_order(stage, data_dir):
    (stage.folder / "mine.py").write_text(
        "import sys, torch\n"
        "def make():\n"
        "    print('order', hash('a'), list({'one', 'two', 'three', 'four', 'five'}))\n"
        "    return torch.nn.Linear(128, 10)\n"
    )
    params = stage.write_params(small(model={"name": "mine:make"}))
    arguments = ["--strategy", "single", "--no-tracking", "--steps", "1", "--data-dir", str(data_dir(params))]
    seen = set()
    for seed in ("1", "2"):
        done = stage.fresh("train", *arguments, PYTHONHASHSEED=seed)
        seen |= {line for line in done.stdout.splitlines() if line.startswith("order")}
        assert done.returncode == 0, done.stderr
    assert len(seen) == 1
