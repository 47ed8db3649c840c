"""Small files, written whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from samebits.errors import HostError, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Give a temporary path beside ``path`` that takes its place when the block ends well.

    Raises:
        HostError: the disk is full or the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.chmod(0o666 & ~_umask())  # some libraries write for the owner alone
        temporary.replace(path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise HostError(f"{path}: no space left on the device", hint="free some disk space") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise HostError(f"{path}: cannot be written: {error.strerror}", hint="check the folder's owner") from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


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


def read_json(path: Path, *, made_by: str) -> Any:
    """Read a JSON file that an earlier stage wrote.

    Raises:
        UserError: the file is missing or damaged; the hint names ``made_by``, the command that writes it.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file", hint=f"run `{made_by}` first") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}", hint=f"delete it and run `{made_by}` again") from None


def sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_remembered(path: Path, memory: Path) -> str:
    """SHA-256 of a file that may be large; read again only if its size or time of change is another."""
    known = json.loads(memory.read_text(encoding="utf-8")) if memory.exists() else {}
    state = path.stat()
    stamp = [state.st_size, state.st_mtime_ns]
    name = str(path.resolve())
    if known.get(name, [None])[:2] != stamp:
        known[name] = [*stamp, sha256(path)]
        write_json(memory, known)
    return str(known[name][2])


def sha256_tree(path: Path) -> str:
    """SHA-256 over a file, or over the names and bytes of a folder's files; bytecode is left out."""
    if path.is_file():
        return sha256(path)
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            digest.update(f"{file.relative_to(path).as_posix()}\0{sha256(file)}\n".encode())
    return digest.hexdigest()


def fsync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk before what follows."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
