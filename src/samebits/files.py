"""Files that are written whole or not at all, and records: JSON files with a schema."""

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
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError

from samebits.errors import HostError, UserError, reason

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SCRATCH = "samebits-temporary-"  # unlike in versions that locked folders, which would remove these as abandoned
_LOCK = ".samebits.lock"
_OLD_SECONDS = 3600.0
_UNFINISHED = ".samebits.tmp"
_DEEPEST = 128  # levels of a JSON file, since pydantic writes at most 255


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path whose file replaces ``path`` at the end of the block, unless the block raises.

    The temporary file has a folder of its own beside ``path``, because some libraries write to another file first.
    Folders that killed processes left there are removed.

    Raises:
        UserError: a file is in the place of a folder, or a folder in the place of the file.
        HostError: the disk is full, or the folder cannot be written.
    """
    make_folder(path.parent)
    remove_unfinished(path.parent)
    with _explained(path), _claimed(path.parent, f".{path.name}.", _UNFINISHED, named=path) as folder, disk_errors():
        try:
            temporary = folder / path.name
            yield temporary
            temporary.chmod(0o666 & ~_umask())  # some libraries make files for the owner alone
            temporary.replace(path)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def private_mode(folder: Path) -> int:
    """The mode of a file that is readable only for users who may write into its folder."""
    writers = folder.stat().st_mode & 0o022
    return 0o600 | writers | writers << 1


def remove_unfinished(folder: Path) -> None:
    """Remove temporary folders of ``atomic`` that killed processes left in a folder."""
    _remove_abandoned(folder, f".*{_UNFINISHED}")


def make_folder(path: Path) -> None:
    """Make a folder and its parents if they do not exist. Raises the errors of ``atomic``."""
    try:
        with _explained(path):
            path.mkdir(parents=True, exist_ok=True)
    except RecursionError:
        raise UserError(f"{str(path)[:80]}...: nested too deeply", hint="name another folder") from None


def remove(path: Path) -> None:
    """Remove a file if it exists. Raises the errors of ``atomic``."""
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
    """Yield a folder in ``within``, or in the host's folder for temporary files, and remove it after the block.

    Folders of killed processes are removed before the block, and once more after it. Raises the errors of ``atomic``.
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
            try:
                lock = _lock_of(folder)
            except OSError:
                shutil.rmtree(folder, ignore_errors=True)  # without a lock it would lie there for an hour
                raise
    try:
        yield folder
    finally:
        os.close(lock)
        with suppress(OSError):  # on NFS an open file keeps its folder
            folder.rmdir()


def _lock_of(folder: Path) -> int | None:
    """Lock a new folder; None if another process removed it as abandoned before it had its lock.

    The lock is on a file in the folder, since locks on folders do not reach other machines with a shared disk.
    """
    file = folder / _LOCK
    with suppress(FileNotFoundError), ExitStack() as opened:
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        opened.callback(os.close, fd)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.path.samestat(os.fstat(fd), file.stat()):
            opened.pop_all()
            return fd
    return None


def _remove_abandoned(root: Path, pattern: str) -> None:
    """Remove this user's folders on which no living process has a lock."""
    for path in root.glob(pattern):
        with suppress(OSError):
            found = path.lstat()
            if found.st_uid != os.getuid():
                continue
            if (path / _LOCK).exists():
                with (path / _LOCK).open("rb+") as stream:
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path)
            elif time.time() - found.st_mtime > _OLD_SECONDS:  # its process was killed before it had the lock
                shutil.rmtree(path)


@contextmanager
def disk_errors() -> Iterator[None]:
    """Turn safetensors' own exceptions for errors of the disk into OSError."""
    try:
        yield
    except SafetensorError as error:
        if number := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        raise


def own_folder() -> Path:
    """A folder that only this user can write to, the same each time if the home or working folder allows one."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    for name in (f"{caches}/samebits", ".samebits/cache"):
        try:
            folder = Path(name).expanduser().absolute()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.lstat()
        except (OSError, RuntimeError):
            continue
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
            return folder
    return Path(tempfile.mkdtemp(prefix="samebits-cache-"))


def own_cache_of_dvc() -> dict[str, str]:
    """Environment of a DVC whose caches are this user's alone: they may hold pickles, and /var/tmp is open to all."""
    return {"DVC_SITE_CACHE_DIR": os.environ.get("DVC_SITE_CACHE_DIR") or str(own_folder() / "dvc")}


def _umask() -> int:
    """The process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text with line feeds."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: Path, value: object) -> None:
    """Write JSON with an indentation of two spaces and a final line feed. NaN and infinity are refused."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def regular(path: Path) -> Path:
    """The path itself, if it is a regular file.

    Raises:
        OSError: it is none. Opening or reading a pipe or a device may never end.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("expected a regular file")
    return path


class DamagedError(UserError):
    """A file is damaged, in contrast to a file of another version."""


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
    """Raise ValueError: the integer is larger than any count or size, and may be too large for a float."""
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
    """The first wrong key, and the reason."""
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}"


class Part(BaseModel):
    """A frozen part of a record. Unknown keys, NaN and infinity are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def parse(cls, value: object, path: Path, *, made_by: str) -> Self:
        """Check a value that was read from ``path``.

        Raises:
            UserError: it is no such part. The message names the first wrong key.
        """
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise UserError(f"{path}: {first_fault(error)}", hint=f"run `{made_by}` again") from None


class Record(Part):
    """A JSON file with the number of its schema."""

    SCHEMA: ClassVar[int] = 1

    def write(self, path: Path) -> None:
        """Write the file. Its schema comes first."""
        write_json(path, {"schema": self.SCHEMA, **self.model_dump(mode="json")})

    @classmethod
    def read(cls, path: Path, *, made_by: str) -> Self:
        """Read a file of ``write``. ``made_by`` is the command that writes such a file.

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
    """Flush files of a folder to the disk, and their names too. Raises the errors of ``atomic``."""
    for path in (*(folder / name for name in names), folder, folder.parent):
        with _explained(path):
            fsync(path)


def fsync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
