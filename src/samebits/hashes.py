"""SHA-256 of files and folders."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from samebits.errors import HostError, UserError
from samebits.files import read_json, regular, write_json

if TYPE_CHECKING:
    from pathlib import Path


def sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal. Raises OSError: it cannot be read, or is no regular file."""
    with regular(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


_HASHES = TypeAdapter(dict[str, tuple[int, int, str]])


def sha256_remembered(path: Path, memory: Path) -> str:
    """SHA-256 of a file that may be large. It is read again only after its size or time of change differs."""
    try:
        known = _HASHES.validate_python(read_json(memory, made_by="nothing"))
    except ValueError:  # without a readable memory, files are read again
        known = {}
    state = path.stat()
    stamp = (state.st_size, state.st_mtime_ns)
    name = str(path.resolve())
    if name not in known or known[name][:2] != stamp:
        known[name] = (*stamp, sha256(path))
        with suppress(UserError, HostError):  # the next call reads the file again
            write_json(memory, known)
    return known[name][2]


def sha256_tree(path: Path) -> str:
    """SHA-256 of a file, or of the names and bytes of a folder's files without bytecode."""
    if path.is_file():
        return sha256(path)
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            digest.update(f"{file.relative_to(path).as_posix()}\0{sha256(file)}\n".encode())
    return digest.hexdigest()
