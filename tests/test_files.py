import errno
import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager

import pytest
from safetensors import SafetensorError

from samebits.errors import HostError, Interrupted, UserError, WorkerError, exit_on_error, from_exit_code, one_line
from samebits.files import atomic, read_json, remove, scratch_folder, settle, write_json, write_text
from samebits.hashes import sha256, sha256_tree
from standins import raising


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "deep" / "file.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="Out of range float"):
        write_json(path, {"a": math.nan})
    with pytest.raises(RuntimeError), atomic(path) as temporary:  # noqa: PT012
        temporary.write_text("half")
        raise RuntimeError
    assert json.loads(path.read_text()) == {"a": 1}
    assert [file.name for file in path.parent.iterdir()] == ["file.json"]


@pytest.mark.parametrize(("number", "message"), [(28, "no space left on the device"), (30, "cannot be written")])
def test_a_full_or_read_only_disk_is_the_hosts_fault(number, message, tmp_path):
    with pytest.raises(HostError, match=message), atomic(tmp_path / "file"):
        raise OSError(number, "as the kernel says it")


@pytest.mark.parametrize(("number", "kind"), [(28, HostError), (30, HostError), (5, HostError), (20, UserError)])
def test_disk_errors_of_safetensors_are_disk_errors(number, kind, tmp_path):
    with pytest.raises(kind), atomic(tmp_path / "file"):
        raise SafetensorError(f"Error while serializing: I/O error: as the kernel says it (os error {number})")
    with pytest.raises(SafetensorError), atomic(tmp_path / "file"):
        raise SafetensorError("invalid header")


@pytest.mark.parametrize(
    ("number", "kind", "message"),
    [(5, HostError, "Input/output error"), (28, HostError, "no space left on the device"), (20, UserError, "")],
)
def test_a_file_that_cannot_be_synced_is_named(number, kind, message, tmp_path, monkeypatch):
    (tmp_path / "run.json").write_text("{}")
    settle(tmp_path, ["run.json"])

    monkeypatch.setattr(os, "fsync", raising(OSError(number, os.strerror(number))))
    with pytest.raises(kind, match=rf"run\.json.*{message}"):
        settle(tmp_path, ["run.json"])


def test_a_failed_clean_up_does_not_hide_the_error(tmp_path, monkeypatch):
    with pytest.raises(HostError, match="no space left"), atomic(tmp_path / "file") as file:  # noqa: PT012
        file.write_text("a part")
        for name in ("unlink", "rmdir"):
            monkeypatch.setattr(os, name, raising(PermissionError(13, "tidying up failed")))
        raise OSError(28, "full")
    assert list(tmp_path.iterdir())  # it really was not removed


def test_no_folder_for_temporary_files_is_the_hosts_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "mkdtemp", raising(OSError(28, "as the kernel says it")))
    with pytest.raises(HostError, match=f"{tmp_path}: no space left on the device"), scratch_folder(tmp_path):
        pass
    monkeypatch.setattr(tempfile, "gettempdir", raising(FileNotFoundError(2, "No usable temporary directory found")))
    with pytest.raises(HostError, match="temporary files: No usable temporary directory found"), scratch_folder():
        pass


KILLED = """
import sys, time
from pathlib import Path
from samebits.files import scratch_folder

with scratch_folder(Path(sys.argv[1])):
    print("ready", flush=True)
    time.sleep(3600)
"""


@contextmanager
def one_killed_of_two(code, path):
    """Two processes that run ``code`` on a path; the first is killed, and the second lives on in the block."""
    processes = []
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"ready\n"
        processes.append(process)
    processes[0].kill()
    processes[0].communicate()
    try:
        yield
    finally:
        processes[1].kill()
        processes[1].communicate()


@pytest.mark.attack("another user of the host")
def test_only_folders_of_killed_processes_are_removed(tmp_path):
    (tmp_path / "other").mkdir()
    with one_killed_of_two(KILLED, tmp_path):
        assert len(list(tmp_path.iterdir())) == 3
        with scratch_folder(tmp_path) as folder:
            assert len(list(tmp_path.iterdir())) == 3
            assert folder.is_dir()
        assert not folder.exists()
        assert len(list(tmp_path.iterdir())) == 2


def test_the_folder_of_a_process_killed_meanwhile_is_removed(tmp_path):
    with scratch_folder(tmp_path):
        process = subprocess.Popen([sys.executable, "-c", KILLED, tmp_path], stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"ready\n"
        process.kill()
        process.communicate()
        assert len(list(tmp_path.iterdir())) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_a_lock_is_removed_once_it_is_old(tmp_path):
    left = tmp_path / "samebits-temporary-left"
    left.mkdir()
    with scratch_folder(tmp_path):
        assert left.is_dir()  # another process may have made it this moment
    os.utime(left, (0, 0))
    with scratch_folder(tmp_path):
        assert not left.exists()


@pytest.mark.parametrize("module", [os, fcntl])
def test_a_folder_that_cannot_be_locked_does_not_stay(module, tmp_path, monkeypatch):
    error = OSError(errno.EIO, "Input/output error")
    name = "open" if module is os else "flock"
    real, fail = getattr(module, name), raising(error)
    monkeypatch.setattr(module, name, lambda what, *rest, **named: (
        fail() if module is fcntl or str(what).endswith(".lock") else real(what, *rest, **named)))  # fmt: skip
    with pytest.raises(HostError, match="cannot be written: Input/output error"), scratch_folder(tmp_path):
        raise AssertionError("there is a folder")
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


WRITES = """
import sys, time
from pathlib import Path
from samebits.files import atomic

with atomic(Path(sys.argv[1])) as temporary:
    temporary.write_text("half")
    print("ready", flush=True)
    time.sleep(3600)
"""


def test_only_files_of_killed_writers_are_removed(tmp_path):
    file = tmp_path / "file[1].json"
    with one_killed_of_two(WRITES, file):
        write_json(tmp_path / "another.json", {})
        (unfinished,) = (path for path in tmp_path.iterdir() if path.name != "another.json")
        assert (unfinished / file.name).read_text() == "half"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("{", "cannot be read"),
        ("\xff", "cannot be"),
        ("[" * 100_000, "cannot be read"),
        ("[" * 300 + "]" * 300, "cannot be read: nested too deeply"),
        ('{"a":' * 300 + "1" + "}" * 300, "cannot be read: n"),
        (f'{{"a": {2**63}}}', "cannot be read: an integer of 19 digits, expected one of 64 bits"),
        (f"[-{10**400}]", "cannot be read: an integer of 401 digits"),
        ("9" * 5000, "cannot be read: "),
    ],
)
def test_a_missing_or_damaged_file_names_the_command_that_makes_it(text, message, tmp_path):
    if text is not None:
        (tmp_path / "x.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=rf"x\.json: {message}.*run `make it`|{message}.*`make it`"):
        read_json(tmp_path / "x.json", made_by="make it")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to(path)])
@pytest.mark.attack("another user of the host")
def test_only_regular_files_are_opened(make, tmp_path):
    make(tmp_path / "x.json")
    with pytest.raises(
        UserError, match=r"x\.json: cannot be read: (expected a regular file|Too many levels of symb.*)\. "
    ):
        read_json(tmp_path / "x.json", made_by="make it")
    with pytest.raises(OSError, match=r"expected a regular file|Too many levels"):
        sha256(tmp_path / "x.json")


def test_a_folder_of_thousands_of_levels_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"\.\.\.: nested too deeply\. hint: name another folder"):
        write_text(tmp_path / ("x/" * 1800) / "file", "")


def test_a_message_is_one_printable_line():
    error = UserError("a\x1b[2J\0b\x07\x9bc\nd\ud800\u202eé–", hint="run \x1b]0;x\x07")
    assert str(error) == r"a\x1b[2J\x00b\x07\x9bc d\ud800\u202eé–. hint: run \x1b]0;x\x07"


def test_the_hash_of_a_folder_is_of_its_names_and_bytes(tmp_path):
    write_text(tmp_path / "a/one.py", "1")
    write_text(tmp_path / "a/sub/two.py", "2")
    write_text(tmp_path / "b/one.py", "1")
    write_text(tmp_path / "b/sub/two.py", "2")
    write_text(tmp_path / "b/__pycache__/one.pyc", "x")
    assert sha256_tree(tmp_path / "a") == sha256_tree(tmp_path / "b")
    (tmp_path / "b/sub/two.py").rename(tmp_path / "b/sub/three.py")
    assert sha256_tree(tmp_path / "a") != sha256_tree(tmp_path / "b")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("wrong", hint="right it"), 2, "error: wrong. hint: right it\n"),
        (HostError("wrong", hint="right it"), 3, "error: wrong. hint: right it\n"),
        (WorkerError("wrong", hint="right it"), 4, "error: wrong. hint: right it\n"),
        (Interrupted(15), 143, "error: stopped by SIGTERM. hint: run the same command again\n"),
        (KeyboardInterrupt(), 130, "error: stopped by Ctrl-C. hint: run the same command again\n"),
        (MemoryError("none"), 3, "error: out of memory: none. hint: free some memory, or lower data.num_samples\n"),
    ],
)
def test_exit_codes(error, code, line, capsys):
    with pytest.raises(SystemExit) as ended, exit_on_error():
        raise error
    assert ended.value.code == code
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://me:S3CRET@db/mlflow", "postgresql://me:***@db/mlflow"),
        ("sent Authorization: Basic bWU6UzNDUkVUUzNDUkVU", "sent Authorization: Basic ***"),
        ("Bearer S3CRET.S3CRET-S3CRET_S3CRET is not known", "Bearer *** is not known"),
        ("http://db:5000/a@b, Basic authentication", "http://db:5000/a@b, Basic authentication"),
        ("postgresql://me:S3CRET/S3CRET@db/mlflow", "postgresql://me:***@db/mlflow"),
        ("http://me:S3CRET@S3CRET@db/a@b", "http://me:***@db/a@b"),
        ("https://S3CRET@db/mlflow", "https://***@db/mlflow"),
        ("https://u@d.com:S3CRET@db/x", "https://u@d.com:***@db/x"),
        ("http://db/x?access_token=S3CRET&y=1", "http://db/x?access_token=***&y=1"),
        ("http://db/x?api_key=S3CRET", "http://db/x?api_key=***"),
        ("http://db/x?X-Amz-Signature=S3CRET&sigma=1", "http://db/x?X-Amz-Signature=***&sigma=1"),
        ("postgresql://mlflow@postgres/mlflow", "postgresql://mlflow@postgres/mlflow"),
        ("postgresql://db/mlflow?user=me&Password=S3CRET&x=1", "postgresql://db/mlflow?user=me&Password=***&x=1"),
    ],
)
@pytest.mark.attack("another user of the host")
def test_no_error_and_no_traceback_shows_a_password(text, shown, capsys):
    with pytest.raises(SystemExit), exit_on_error(debug=True):
        raise HostError("the store refuses", hint=text) from OSError(text)
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert said.count(shown) == 3
    assert "S3CRET" not in said


@pytest.mark.parametrize("text", ["://a:" * 2**18, "a@" + "://a:" * 2**18, "://a:1/" * 2**17 + "@", "http://" * 2**17])
@pytest.mark.attack("a malicious server")
def test_a_text_of_any_length_is_masked_at_once(text):
    """A regular expression may need the square of its length, and holds the interpreter meanwhile."""
    assert len(one_line(text)) < 5000


@pytest.mark.parametrize(
    "text",
    [
        f"GET http://h/x?token={'S3CR3T' * 12_000}&a=1",
        f"xxxxx{' ' * 40_000}connect https://bob:S3CR3TWORD@host/x failed{' ' * 32_740}!",
        f"{'x ' * 16_370} https://bob:S3CR3TWORD@host/x {'y' * 32_760} {'z ' * 9}",
    ],
)
@pytest.mark.attack("a malicious server")
def test_a_long_text_is_not_cut_inside_of_a_password(text):
    shown = one_line(text)
    assert "S3CR3T" not in shown
    assert "3TWORD" not in shown
    assert len(shown) < 1100


def test_an_unexpected_exception_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError), exit_on_error():
        1 / 0  # noqa: B018


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_cross_processes(signum):
    for code in (128 + signum, -signum):
        error = from_exit_code(code, "a stage failed", "see above")
        assert (type(error), error.exit_code) == (Interrupted, 128 + signum)


@pytest.mark.parametrize(("code", "kind"), [(2, UserError), (3, HostError), (4, WorkerError), (9, WorkerError)])
def test_errors_cross_processes(code, kind):
    error = from_exit_code(code, "wrong", "right it")
    assert (type(error), str(error)) == (kind, "wrong. hint: right it")


def test_a_file_that_cannot_be_removed_is_named(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=r"folder: .*directory"):
        remove(tmp_path / "folder")
    remove(tmp_path / "nothing")
