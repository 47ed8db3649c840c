"""Small files, written whole or not at all, and records: JSON files with a schema."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import stat
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError

from samebits.errors import HostError, UserError, reason

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SCRATCH = "samebits-temporary-"  # not that of versions that locked folders, which would take these for abandoned
_LOCK = ".samebits.lock"
_OLD_SECONDS = 3600.0
_UNFINISHED = ".samebits.tmp"
_DEEPEST = 128  # levels of a JSON file, since pydantic writes 255 at most


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Give a temporary path that takes the place of ``path`` when the block ends well.

    It lies in a folder of its own, beside ``path``, because some libraries write to yet another file first. Those that
    processes left there that were killed are removed.

    Raises:
        UserError: a file stands where a folder is needed, or a folder where the file is.
        HostError: the disk is full, or the folder cannot be written.
    """
    make_folder(path.parent)
    remove_unfinished(path.parent)
    with _explained(path), _claimed(path.parent, f".{path.name}.", _UNFINISHED, named=path) as folder, disk_errors():
        try:
            temporary = folder / path.name
            yield temporary
            temporary.chmod(0o666 & ~_umask())  # some libraries write for the owner alone
            temporary.replace(path)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def private_mode(folder: Path) -> int:
    """The mode of a file that those alone may read who may write into its folder."""
    writers = folder.stat().st_mode & 0o022
    return 0o600 | writers | writers << 1


def remove_unfinished(folder: Path) -> None:
    """Remove what ``atomic`` left in a folder in processes that were killed."""
    _remove_abandoned(folder, f".*{_UNFINISHED}")


def make_folder(path: Path) -> None:
    """Make a folder and those above it, unless they are there. Raises what ``atomic`` does."""
    try:
        with _explained(path):
            path.mkdir(parents=True, exist_ok=True)
    except RecursionError:
        raise UserError(f"{str(path)[:80]}...: nested too deeply", hint="name another folder") from None


def remove(path: Path) -> None:
    """Remove a file, if it is there. Raises what ``atomic`` does."""
    with _explained(path):
        path.unlink(missing_ok=True)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Raise UserError or HostError, which names ``path``, for an OSError of the block."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
            text = f"{path}: {error.filename or path} is in the way: {error.strerror}"
            raise UserError(text, hint="name another folder") from error
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            raise UserError(f"{str(path)[:80]}...: {error.strerror}", hint="name another folder") from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise HostError(f"{path}: no space left on the device", hint="free some disk space") from error
        text = f"{path}: cannot be written: {error.strerror}"
        raise HostError(text, hint="check the folder's owner and its disk") from error


@contextmanager
def scratch_folder(within: Path | None = None) -> Iterator[Path]:
    """A folder that is removed at the end of the block, under ``within`` or where the host keeps temporary files.

    Those of processes that were killed are removed first, and at the end those that lived on for a while. Raises what
    ``atomic`` does.
    """
    try:
        root = within or Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise HostError(f"temporary files: {error.strerror}", hint="name a folder for them by TMPDIR") from None
    make_folder(root)
    _remove_abandoned(root, f"{_SCRATCH}*")
    with _claimed(root, _SCRATCH, named=root) as folder:
        try:
            yield folder.resolve()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            _remove_abandoned(root, f"{_SCRATCH}*")


@contextmanager
def _claimed(within: Path, prefix: str, suffix: str = "", *, named: Path) -> Iterator[Path]:
    """A new folder with a lock, which this process and its forks hold while they need it; errors name ``named``."""
    lock = None
    while lock is None:
        with _explained(named):
            folder = Path(tempfile.mkdtemp(suffix, prefix, within))
        lock = _lock_of(folder)
    try:
        yield folder
    finally:
        os.close(lock)
        with suppress(OSError):  # on NFS a file that is open keeps its folder
            folder.rmdir()


def _lock_of(folder: Path) -> int | None:
    """Lock a folder that was just made; None if it was taken for abandoned before it had its lock.

    By a file in it: locks of folders do not reach the other machines of a shared disk.
    """
    file = folder / _LOCK
    with suppress(FileNotFoundError):
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with _explained(folder):
            fcntl.flock(fd, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), file.stat()):
                return fd
        os.close(fd)
    return None


def _remove_abandoned(root: Path, pattern: str) -> None:
    """Remove the folders that this user's processes left and that no living one has a lock on."""
    for path in root.glob(pattern):
        with suppress(OSError):
            found = path.lstat()
            if found.st_uid != os.getuid():
                continue
            if (path / _LOCK).exists():
                with (path / _LOCK).open("rb+") as stream:
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path)
            elif time.time() - found.st_mtime > _OLD_SECONDS:  # left by who was killed before there was one
                shutil.rmtree(path)


@contextmanager
def disk_errors() -> Iterator[None]:
    """Raise the disk's errors, which safetensors raises in its own way, as the OSError that they are."""
    try:
        yield
    except SafetensorError as error:
        if number := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        raise


def _umask() -> int:
    """The process's mask, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text with line feeds."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: Path, value: object) -> None:
    """Write JSON with two spaces of indentation and a final line feed; NaN and infinity are refused."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def regular(path: Path) -> Path:
    """The path itself, if a regular file is there.

    Raises:
        OSError: there is none, or a folder, a pipe or a device: to open or to read such a one may never end.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("expected a regular file")
    return path


class DamagedError(UserError):
    """A file cannot be read as what it is to be; another version's can."""


def read_json(path: Path, *, made_by: str) -> Any:
    """Read a JSON file that an earlier stage wrote.

    Raises:
        UserError: the file is missing; the hint names ``made_by``, the command that writes it.
        DamagedError: it holds no JSON.
    """
    try:
        value = json.loads(regular(path).read_text(encoding="utf-8"), parse_int=_integer)
        _require_shallow(value)
        return value
    except FileNotFoundError:
        raise UserError(f"{path}: no such file", hint=f"run `{made_by}` first") from None
    except (OSError, ValueError, RecursionError) as error:
        hint = f"delete it and run `{made_by}` again"
        raise DamagedError(f"{path}: cannot be read: {reason(error)}", hint=hint) from None


def _integer(digits: str) -> int:
    """Raise ValueError: more than any count or size is, and more than a float may be able to hold."""
    if abs(number := int(digits)) >= 2**63:
        raise ValueError(f"an integer of {len(digits.lstrip('-'))} digits, expected one of 64 bits")
    return number


def _require_shallow(value: object, levels: int = _DEEPEST) -> None:
    if not levels:
        raise RecursionError("nested too deeply")
    if isinstance(value, dict | list):
        for child in value.values() if isinstance(value, dict) else value:
            _require_shallow(child, levels - 1)


def first_fault(error: ValidationError) -> str:
    """The first key that is wrong, and why."""
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}"


class Part(BaseModel):
    """A frozen part of a record; unknown keys, NaN and infinity are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def parse(cls, value: object, path: Path, *, made_by: str) -> Self:
        """Check what was read from ``path``.

        Raises:
            UserError: it is not such a part; the message names the first key that is wrong.
        """
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise UserError(f"{path}: {first_fault(error)}", hint=f"run `{made_by}` again") from None


class Record(Part):
    """A JSON file of its own, which says by which schema it was written."""

    SCHEMA: ClassVar[int] = 1

    def write(self, path: Path) -> None:
        """Write the file whole, its schema first."""
        write_json(path, {"schema": self.SCHEMA, **self.model_dump(mode="json")})

    @classmethod
    def read(cls, path: Path, *, made_by: str) -> Self:
        """Read what ``write`` wrote; ``made_by`` is the command that writes such a file.

        Raises:
            UserError: the file is missing or damaged, or was written by another version of samebits.
        """
        raw = read_json(path, made_by=made_by)
        schema = raw.pop("schema", None) if isinstance(raw, dict) else None
        if schema != cls.SCHEMA:
            wrote = "no schema, so it is foreign or older" if schema is None else f"schema {schema}"
            hint = f"run `{made_by}` again, or use the version of samebits that wrote it"
            raise UserError(f"{path}: {wrote}; this version reads schema {cls.SCHEMA}", hint=hint)
        return cls.parse(raw, path, made_by=made_by)


def settle(folder: Path, names: Sequence[str]) -> None:
    """Have files of a folder on the disk before what follows, and their names too. Raises what ``atomic`` does."""
    for path in (*(folder / name for name in names), folder, folder.parent):
        with _explained(path):
            fsync(path)


def fsync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk before what follows."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
