"""``samebits verify``: the lock, what is made again, and the stages that do it."""

import hashlib
import itertools
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from samebits.cli.commands import main
from samebits.errors import Interrupted, UserError
from samebits.here import TOLD
from samebits.params import write_params
from samebits.results import verify
from samples import PARAMS, run_files, run_record

MD5 = "0" * 32
WITHOUT_PATH = f"schema: '2.0'\nstages: {{train@single-exact: {{cmd: x, outs: [{{md5: '{MD5}'}}]}}}}"
DAMAGED = [
    (None, "no such file. hint: get it from who made the results; or make one by `dvc repro dvc.yaml`"),
    (b"\xff\n", "cannot be read: 'utf-8' codec can't decode"),
    (b"[" * 100_000, "cannot be read: "),
    (b"schema: '2.0'\nstages: 0x" + b"f" * 10, "stages: Input should be a valid dictionary"),
    (b"x: 2001-99-99\n", "cannot be read: month must be in 1..12"),
    (b"x: !!bool x\n", "cannot be read: "),
    (b"[]\n", "the file: Input should be a valid dictionary"),
    (b"only text\n", "the file: Input should be a valid dictionary"),
    (b"", "the file: Input should be a valid dictionary or instance of Lock. hint: git checkout dvc.lock"),
    (b"stages: {}\n", "schema: Field required"),
    (b"schema: '2.0", "cannot be read: "),
    (b"schema: '2.0'\nstages: []\n", "stages: Input should be a valid dictionary"),
    (b"schema: '2.0'\nstages: {}\n", "no stage train@single-exact. hint: add exact to train.numerics"),
    (b"schema: '2.0'\nstages: &s {a: *s}\n", "stages.a.cmd: Field required"),
    (
        b"schema: '2.0'\nstages: {train@single-exact: 3}\n",
        "stages.train@single-exact: Input should be a valid dictionary",
    ),
    (WITHOUT_PATH.encode(), "stages.train@single-exact.outs.0.path: Field required. hint: git checkout"),
    (os.mkfifo, "cannot be read: expected a regular file"),
]


@pytest.mark.parametrize(("lock", "message"), DAMAGED, ids=[message[:40] for _, message in DAMAGED])
def test_a_lock_that_is_damaged_is_told(lock, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if callable(lock):
        lock("dvc.lock")
    elif lock is not None:
        (tmp_path / "dvc.lock").write_bytes(lock)
    with pytest.raises(UserError) as caught:
        list(verify.verify(PARAMS, ["single"], tmp_path))
    assert str(caught.value).startswith(f"dvc.lock: {message}")


def test_losses_that_are_not_those_of_the_lock_are_not_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lock = f"schema: '2.0'\nstages: {{train@single-exact: {{cmd: x, outs: [{{path: a, md5: '{MD5}', size: 1}}]}}}}"
    (tmp_path / "dvc.lock").write_text(lock)
    (tmp_path / "runs/single-exact").mkdir(parents=True)
    for make in (lambda path: None, os.mkfifo):
        make(tmp_path / "runs/single-exact/losses.csv")
        with pytest.raises(UserError, match=r"losses\.csv: not the file of dvc\.lock"):
            list(verify.verify(PARAMS, ["single"], tmp_path, quick=True))


SAME = ["data: bitwise, prepared again", "single-exact: bitwise, single on 1 CPU device"]
BUT = "not as in LOCK"


@pytest.mark.parametrize("folder", ["", "gpu"])
@pytest.mark.parametrize(
    ("file", "text", "quick", "told"),
    [
        ("card.json", "the card", False, SAME),
        ("card.json", "other", False, [f"data: DIFFERENT, prepared again: data/card.json {BUT}", SAME[1]]),
        ("card.json", None, False, [f"data: DIFFERENT, prepared again: data/card.json {BUT}", SAME[1]]),
        ("model.safetensors", "other", False,
         [SAME[0], f"single-exact: DIFFERENT, single on 1 CPU device: model.safetensors {BUT}"]),
        ("losses.csv", "other", False,
         [SAME[0], f"single-exact: DIFFERENT, single on 1 CPU device: losses.csv {BUT}"]),
        ("losses.csv", "step,loss\n1,2.0\n", True,
         [SAME[0], "single-exact: bitwise for 1 steps, single on 1 CPU device"]),
        ("losses.csv", "step,loss\n1,2.0\n2,1.25\n", True,
         [SAME[0], "single-exact: DIFFERENT, single on 1 CPU device: the losses differ from step 2 on"]),
        ("losses.csv", "step,loss\n1,2.0\n2,1.5\n3,1.0\n", True,
         [SAME[0], "single-exact: DIFFERENT, single on 1 CPU device: the losses differ from step 3 on"]),
    ],
)  # fmt: skip
def test_what_is_made_again_has_the_bits_of_the_lock(file, text, quick, told, folder, tmp_path, monkeypatch):
    """If ``text`` is None, the file has the same bits again, and the lock does not have it."""
    monkeypatch.chdir(tmp_path)
    folder = Path(folder)
    (folder / "data").mkdir(parents=True)
    (folder / "data/train.safetensors").write_text("the data")
    (folder / "data/card.json").write_text("the card")
    run_files(folder / "runs/single-exact", run_record("single", "exact"))
    files = [path for made in ("data", "runs/single-exact") for path in (folder / made).iterdir()]
    files = [path for path in files if text is not None or path.name != file]
    entries = [{"path": str(path), "md5": hashlib.md5(path.read_bytes()).hexdigest()} for path in files]
    stages = {"train@single-exact": {"cmd": "x", "outs": entries}}
    (folder / "dvc.lock").write_text(json.dumps({"schema": "2.0", "stages": stages}))

    def run_stage(root, name, *arguments, quiet, variables):
        """Write the files of the workspace, and ``text`` to the one file."""
        assert (TOLD in variables) == (name == "train")  # where both run is told once
        given = dict(itertools.pairwise(arguments))
        out = given.get("--out-dir", given["--folder"] / "data")
        shutil.copytree(folder / ("data" if name == "prepare" else "runs/single-exact"), out)
        if text is not None and (out / file).exists():
            (out / file).write_text(text)

    monkeypatch.setattr(verify, "run_stage", run_stage)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    found = list(verify.verify(PARAMS, ["single"], scratch, folder=folder, quick=quick))
    assert [one.text for one in found] == [line.replace("LOCK", str(folder / "dvc.lock")) for line in told]
    assert [one.same for one in found] == ["DIFFERENT" not in line for line in told]
    monkeypatch.setattr(verify, "stale", lambda strategies, folder: [f"{folder}: older"])
    for place in {Path(), folder}:
        write_params(PARAMS, place / "params.yaml")
    asked = ["verify", "--strategy", "single", "--folder", str(folder), *["--quick"] * quick]
    done = CliRunner().invoke(main, asked)
    assert done.stdout.splitlines() == [one.text for one in found]
    assert (done.exit_code, done.stderr) == (int(not all(one.same for one in found)), f"{folder}: older\n")


@pytest.mark.attack("another user of the host")
def test_dvc_is_asked_with_a_cache_that_is_the_users_own(tmp_path, monkeypatch):
    """DVC's own default can be written by all users, and holds pickles."""
    given = []
    answer = SimpleNamespace(stdout="{}", stderr="")
    monkeypatch.setattr(verify.subprocess, "run", lambda *_, env, **__: given.append(env) or answer)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("DVC_SITE_CACHE_DIR", raising=False)
    assert verify.stale(["single"]) == []
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", "mine")
    assert verify.stale(["single"]) == []
    assert [environ["DVC_SITE_CACHE_DIR"] for environ in given] == [str(tmp_path / "samebits/dvc"), "mine"]


def test_a_dvc_that_fails_is_quoted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # which is no repository of DVC's
    (found,) = verify.stale(["single"])
    assert found.startswith(
        "whether dvc.lock is up to date is not known: `dvc status` failed: ERROR: you are not inside "
    )


def test_ctrl_c_waits_for_the_stage_which_has_it_too(tmp_path):
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "src/samebits").mkdir(parents=True)
    (tmp_path / "pipeline/train.py").write_text(
        "import os, signal, time\n"
        "signal.signal(signal.SIGINT, lambda *_: (open('asked', 'w').close(), os._exit(0)))\n"
        "stat = open(f'/proc/{os.getppid()}/stat')\n"
        "while stat.seek(0) or stat.read().rpartition(')')[2].split()[0] != 'S':\n"  # until it waits
        "    time.sleep(0.01)\n"
        "os.kill(os.getppid(), signal.SIGINT)\n"
        "time.sleep(0.3)\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "time.sleep(3600)\n"
    )
    with pytest.raises(Interrupted) as caught:
        verify.run_stage(tmp_path, "train")
    assert caught.value.exit_code == 130
    assert (tmp_path / "asked").exists()


@pytest.mark.attack("a malicious repository or patch")
@pytest.mark.parametrize("file", ["click.py", "pipeline/click.py", "pipeline/queue.py", "yaml.py"])
def test_a_stage_imports_libraries_and_not_files_named_like_them(tmp_path, file):
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "src/samebits").mkdir(parents=True)
    (tmp_path / "pipeline/train.py").write_text("import click, queue, yaml\n")
    (tmp_path / file).write_text("raise SystemExit(99)\n")
    verify.run_stage(tmp_path, "train")


def test_only_what_changes_results_makes_the_lock_older(monkeypatch):
    files = {"mine.py": "modified", "data/host.json": "modified", "gone.py": "deleted"}
    changes = ["changed command", {"changed deps": {"params.yaml": {"seed": "modified"}, **files}}]
    answer = SimpleNamespace(stdout=json.dumps({"train@single-exact": changes}), stderr="")
    monkeypatch.setattr(verify.subprocess, "run", lambda *_, **__: answer)
    assert verify.stale(["single"]) == [f"dvc.lock is older than {name}" for name in ("mine.py", "params.yaml: seed")]
