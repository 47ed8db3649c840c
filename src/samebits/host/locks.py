"""Locks between the processes of a host, and of the hosts that share a disk."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from samebits.errors import HostError
from samebits.files import make_folder, private_mode

if TYPE_CHECKING:
    from collections.abc import Iterator

LOCKS_HINT = "mount the disk with locks (NFS: without nolock, Lustre: with flock), or work on another"


@contextmanager
def locked(path: Path, *, seconds: float | None = None) -> Iterator[None]:
    """Hold a lock file, which another user may have made; also a pipe can be one, and is not waited for.

    Whoever can read it can hold it, for ever: that are those alone who may write into its folder.

    Raises HostError: another process holds it for longer than ``seconds``, or the disk has no locks.
    """
    make_folder(path.parent)
    flags, mode = os.O_CREAT | os.O_NONBLOCK, private_mode(path.parent)
    try:
        fd = os.open(path, flags | os.O_RDWR, mode)  # for which alone NFS gives such a lock
    except PermissionError:
        fd = os.open(path, flags | os.O_RDONLY, mode)
    try:
        found = os.fstat(fd)
        if found.st_uid == os.getuid() and found.st_mode & 0o777 & ~mode:  # of a version that let all read it
            os.fchmod(fd, found.st_mode & mode)
        deadline = time.monotonic() + (seconds or 0.0)
        while not _lock(fd, path, waits=seconds is None):
            if time.monotonic() > deadline:
                hint = "`fuser` on that file names it; end that process, or remove the file"
                raise HostError(f"{path}: another process holds it for more than {seconds:g} s", hint=hint)
            time.sleep(0.05)
        yield
    finally:
        os.close(fd)


def _lock(fd: int, path: Path, *, waits: bool) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise HostError(f"{path}: cannot be locked: {error.strerror}", hint=LOCKS_HINT) from None
    return True


def lacks_locks(folder: Path) -> str | None:
    """Why a file in a folder cannot be locked; None if one that holds it keeps another one out."""
    try:
        with (
            tempfile.NamedTemporaryFile(prefix=".samebits-", dir=folder) as first,
            Path(first.name).open("rb+") as other,
        ):
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError as error:
        return error.strerror
    return "two have the lock at once"
