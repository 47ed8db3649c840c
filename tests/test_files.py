import json
import math

import pytest

from samebits.errors import HostError, Interrupted, UserError, WorkerError, exit_on_error, from_exit_code
from samebits.files import atomic, read_json, sha256_tree, write_json, write_text


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


@pytest.mark.parametrize(("text", "message"), [(None, "no such file"), ("{", "cannot be read"), ("\xff", "cannot be")])
def test_a_missing_or_damaged_file_names_the_command_that_makes_it(text, message, tmp_path):
    if text is not None:
        (tmp_path / "x.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=rf"x\.json: {message}.*run `make it`|{message}.*`make it`"):
        read_json(tmp_path / "x.json", made_by="make it")


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
    ],
)
def test_exit_codes(error, code, line, capsys):
    with pytest.raises(SystemExit) as ended, exit_on_error():
        raise error
    assert ended.value.code == code
    assert capsys.readouterr().err == line


def test_debug_shows_the_traceback(capsys):
    with pytest.raises(SystemExit), exit_on_error(debug=True):
        raise UserError("wrong", hint="right it")
    assert "Traceback" in capsys.readouterr().err


def test_what_is_not_expected_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError), exit_on_error():
        1 / 0  # noqa: B018


@pytest.mark.parametrize(("code", "kind"), [(2, UserError), (3, HostError), (4, WorkerError), (9, WorkerError)])
def test_errors_cross_processes(code, kind):
    error = from_exit_code(code, "wrong", "right it")
    assert (type(error), str(error)) == (kind, "wrong. hint: right it")
