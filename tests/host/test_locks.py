"""Locks, on a local disk and on one that several machines share."""

import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from samebits.doctor import machine
from samebits.errors import HostError
from samebits.files import atomic, scratch_folder
from samebits.host import locks
from samebits.host.locks import lacks_locks, locked
from samebits.records.log import RunLog, writer_gone


@pytest.fixture
def nfs(monkeypatch):
    """Linux's rules for NFS: an exclusive lock takes a file open for writing, a folder's stays on its machine."""
    real = fcntl.flock

    def flock(file, operation):
        fd = file if isinstance(file, int) else file.fileno()
        mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
        needed = os.O_RDONLY if operation & fcntl.LOCK_EX else os.O_WRONLY if operation & fcntl.LOCK_SH else None
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            return None
        if mode == needed:
            raise OSError(9, "Bad file descriptor")
        return real(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)


HOLDS = """
import sys, time
from pathlib import Path
from samebits.files import scratch_folder
from samebits.host.locks import locked

with locked(Path(sys.argv[1]) / "lock"), scratch_folder(Path(sys.argv[1])) as folder:
    print(folder, flush=True)
    time.sleep(3600)
"""


@pytest.fixture
def other(tmp_path):
    """The path of a scratch folder of another process, which also holds a lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLDS, tmp_path], stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def test_a_lock_is_had_where_a_shared_disk_asks_for_a_file_open_for_writing(nfs, tmp_path):
    with locked(tmp_path / "lock"):
        pass
    log = RunLog(tmp_path / "run.jsonl")
    assert not writer_gone(log.path)
    log.close()
    assert writer_gone(log.path)


@pytest.mark.attack("another user of the host")
def test_what_another_machine_writes_is_not_swept(nfs, other, tmp_path):
    with scratch_folder(tmp_path) as mine, atomic(tmp_path / "file") as temporary:
        temporary.write_text("text")
        assert mine.is_dir()
    assert Path(other).is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["file", "lock", Path(other).name])


@pytest.mark.attack("another user of the host")
def test_a_lock_that_another_process_holds_is_named_after_a_while(other, tmp_path):
    with (
        pytest.raises(HostError, match=r"lock: another process holds it for more than 0\.2 s"),
        locked(tmp_path / "lock", seconds=0.2),
    ):
        pass


@pytest.mark.parametrize(("folder", "allowed"), [(0o755, 0o600), (0o775, 0o660), (0o1777, 0o666)])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.attack("another user of the host")
def test_nobody_else_holds_a_lock_than_who_may_write_beside_it(before, folder, allowed, tmp_path, umask):
    tmp_path.chmod(folder)
    if before:  # as former versions made it
        (tmp_path / "lock").touch()
        (tmp_path / "lock").chmod(0o666)
    with locked(tmp_path / "lock"):
        pass
    assert stat.S_IMODE((tmp_path / "lock").stat().st_mode) == allowed
    log = RunLog(tmp_path / "run.jsonl")
    log.close()
    assert stat.S_IMODE(log.path.stat().st_mode) == allowed


@pytest.fixture
def umask():
    """No umask, the loosest one."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.attack("another user of the host")
def test_a_lock_file_that_cannot_be_written_still_locks(monkeypatch, tmp_path):
    """Another user may own the file. The refusal is a stand-in, because root is refused nothing."""
    real = os.open

    def refuse(path, flags, *mode):
        if flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied")
        return real(path, flags, *mode)

    monkeypatch.setattr(locks.os, "open", refuse)
    with locked(tmp_path / "lock"):
        pass


def test_a_disk_without_locks_is_named(monkeypatch, tmp_path):
    def none(*_):
        raise OSError(37, "No locks available")

    assert lacks_locks(tmp_path) is None
    assert machine.disk(tmp_path, name="disk")[0].status != "failed"
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", lambda *_: None)
        assert lacks_locks(tmp_path) == "two have the lock at once"
    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(HostError, match="lock: cannot be locked: No locks available"), locked(tmp_path / "lock"):
        pass
    (found,) = machine.disk(tmp_path, name="disk")
    assert (found.status, found.text) == ("failed", "files cannot be locked: No locks available")
    assert "NFS" in found.hint
