"""What ``dvc.lock`` says of the exact runs."""

import os

import pytest

from samebits.errors import Interrupted, UserError
from samebits.results import verify
from samples import PARAMS

MD5 = "0" * 32
WITHOUT_PATH = f"schema: '2.0'\nstages: {{train@single-exact: {{cmd: x, outs: [{{md5: '{MD5}'}}]}}}}"
DAMAGED = [
    (None, "no such file. hint: run `dvc repro` once"),
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


def test_a_dvc_that_fails_is_quoted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # which is no repository of DVC's
    (found,) = verify.stale(["single"])
    assert found.startswith(
        "whether dvc.lock is up to date is not known: `dvc status` failed: ERROR: you are not inside "
    )


def test_ctrl_c_waits_for_the_stage_which_has_it_too(tmp_path):
    (tmp_path / "pipeline").mkdir()
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
