"""Locks between processes of one host, or of hosts that share a disk."""

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
from samebits.host.addresses import Waiting

if TYPE_CHECKING:
    from collections.abc import Iterator

LOCKS_HINT = "mount the disk with locks (NFS: without nolock, Lustre: with flock), or work on another"


@contextmanager
def locked(path: Path, *, seconds: float | None = None) -> Iterator[None]:
    """Hold a lock file for the block. Another user may have made it, and a pipe in its place does not block the open.

    Whoever can read the file can hold the lock for ever. So only users who may write into its folder can read it.

    Raises HostError: another process holds it for longer than ``seconds``, or the disk has no locks.
    """
    make_folder(path.parent)
    flags, mode = os.O_CREAT | os.O_NONBLOCK, private_mode(path.parent)
    try:
        fd = os.open(path, flags | os.O_RDWR, mode)  # NFS gives an exclusive lock only to a writable file
    except PermissionError:
        fd = os.open(path, flags | os.O_RDONLY, mode)
    try:
        found = os.fstat(fd)
        # An older version let all users read the file.
        if found.st_uid == os.getuid() and found.st_mode & 0o777 & ~mode:
            os.fchmod(fd, found.st_mode & mode)
        deadline, waiting = time.monotonic() + (seconds or 0.0), Waiting()
        while not _lock(fd, path, waits=seconds is None):
            if time.monotonic() > deadline:
                hint = "`fuser` on that file names it; end that process, or remove the file"
                raise HostError(f"{path}: another process holds it for more than {seconds:g} s", hint=hint)
            waiting.say(f"waiting for {path}, which another process holds")
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
    """Why files in a folder cannot be locked; None if locks work there."""
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
