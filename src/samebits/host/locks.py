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
from samebits.files import make_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

LOCKS_HINT = "mount the disk with locks (NFS: without nolock, Lustre: with flock), or work on another"


@contextmanager
def locked(path: Path, *, seconds: float | None = None) -> Iterator[None]:
    """Hold a lock file, which another user may have made; also a pipe can be one, and is not waited for.

    Raises HostError: another process holds it for longer than ``seconds``, or the disk has no locks.
    """
    make_folder(path.parent)
    flags = os.O_CREAT | os.O_NONBLOCK
    try:
        fd = os.open(path, flags | os.O_RDWR, 0o644)  # for which alone NFS gives such a lock
    except PermissionError:
        fd = os.open(path, flags | os.O_RDONLY)
    try:
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
