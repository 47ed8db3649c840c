"""What a patch changes in a tree, by the bytes on the disk: attributes and submodules can hide a change from git."""

from __future__ import annotations

import difflib
import os
import re
import stat
import sys
from importlib.machinery import PathFinder
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from safetensors import SafetensorError, safe_open

from samebits.errors import UserError, printable
from samebits.hashes import sha256
from samebits.here import runs_sources

_KEPT_BYTES = 1 << 20  # of a file, so that its lines can be compared later
_COMPARED_LINES = 2000  # difflib's time grows with their square
_DATA = {".png": b"\x89PNG\r\n", ".jpg": b"\xff\xd8\xff", ".jpeg": b"\xff\xd8\xff",
         ".wav": b"RIFF", ".flac": b"fLaC", ".parquet": b"PAR1"}  # fmt: skip
"""How files of data begin, by suffix. No pickle and no archive, which can hold code, begins so."""


class _File(NamedTuple):
    """A file's type and permissions, and its bytes, the target of a link, or the SHA-256 of a large file."""

    mode: int
    content: bytes | str

    @property
    def executable(self) -> bool:
        return bool(self.mode & stat.S_IXUSR)


def snapshot(tree: Path) -> dict[str, _File]:
    """All files and links below ``tree``, by their names from there."""
    found = {}
    for folder, folders, files in os.walk(tree):
        for name in (*folders, *files):
            path = Path(folder, name)
            state = path.lstat()
            if not stat.S_ISDIR(state.st_mode):
                found[os.path.relpath(path, tree)] = _File(state.st_mode, _content(path, state))
    return found


def _content(path: Path, state: os.stat_result) -> bytes | str:
    if stat.S_ISLNK(state.st_mode):
        return str(path.readlink())
    return path.read_bytes() if state.st_size <= _KEPT_BYTES else sha256(path)


def describe_changes(tree: Path, before: dict[str, _File]) -> tuple[list[str], list[str]]:
    """A line for each file that differs from an earlier ``snapshot``, and the lines that differ in all of them.

    Raises UserError: nobody can see what a change does, because a file is a symbolic link, or because it is binary and
    its name is not that of data.
    """
    after, names, lines = snapshot(tree), list[str](), list[str]()
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        shown = printable(os.fsencode(name).decode(errors="backslashreplace"))
        now = _lines(tree / name, new)
        if new and stat.S_ISLNK(new.mode):
            _refuse(f"the patch makes {shown} a symbolic link, whose content is not part of it")
        if now is None and not _is_data(tree / name):
            _refuse(f"the patch changes {shown}, a binary file of which nobody sees what it runs")
        what = [("changed" if old else "new") if new else "removed"]
        what += ["executable"] * bool(new and new.executable and not (old and old.executable))
        what += ["binary data"] * (now is None)
        if now and (coding := _coding(now)):
            _refuse(f"the patch changes {shown}, whose text is {coding} to Python, which reads another than is shown")
        names.append(f"{', '.join(what)}: {shown}")
        lines += _difference(shown, _lines(None, old) or [], now or [])
    return names, lines


def _is_data(path: Path) -> bool:
    """Whether a binary file is data by its suffix and by how it begins."""
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        try:
            with safe_open(path, "numpy"):  # checks the header; even a right one is the start of a pickle to some code
                return True
        except SafetensorError:
            return False
    if suffix == ".npy":
        return _is_array(path)
    with path.open("rb") as stream:
        return suffix in _DATA and stream.read(8).startswith(_DATA[suffix])


def _is_array(path: Path) -> bool:
    """Whether a file is one array of numbers, and nothing else: an array of objects is a pickle."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError):
        return False
    return bool(array.offset + array.nbytes == path.stat().st_size)


def _coding(lines: list[str]) -> str | None:
    """The encoding that the first two lines name to Python, for which a carriage return ends a line too."""
    first = "\n".join(lines[:2]).replace("\r\n", "\n").replace("\r", "\n").split("\n")
    found = (re.match(r"[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)", line) for line in first)
    names = [match[1] for match in found if match and match[1].lower().replace("_", "-") not in ("utf-8", "utf8")]
    return names[0] if names else None


def _refuse(what: str) -> NoReturn:
    raise UserError(what, hint="whoever made the run has to commit it, or to leave it out")


def _lines(path: Path | None, file: _File | None) -> list[str] | None:
    """The lines of a text, where only a line feed ends a line; None if it is no text, or is large and gone."""
    if file is None:
        return []
    content = file.content
    if isinstance(content, str) and path and stat.S_ISREG(file.mode):
        content = path.read_bytes()
    if isinstance(content, str) or b"\0" in content:
        return None
    try:
        return content.decode().removesuffix("\n").split("\n")
    except UnicodeDecodeError:
        return None


def _difference(name: str, old: list[str], new: list[str]) -> list[str]:
    """What differs between two texts, with three lines around; of what is long, all old lines before the new ones."""
    same = _same_lines(old, new)
    first, left = max(same - 3, 0), max(_same_lines(old[same:][::-1], new[same:][::-1]) - 3, 0)
    old, new = old[first : len(old) - left], new[first : len(new) - left]
    if len(old) + len(new) > _COMPARED_LINES:
        hunks = [*(f"-{line}" for line in old), *(f"+{line}" for line in new)]
    else:
        hunks = [*difflib.unified_diff(old, new, lineterm="")][2:]
    shown = [printable(line.expandtabs()) for line in hunks]
    return [f"--- {name}", f"+++ {name}", f"from line {first + 1}:", *shown] if hunks else []


def _same_lines(one: list[str], other: list[str]) -> int:
    """The number of equal lines at the begin of both."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def is_shown(module: str, tree: Path) -> bool:
    """Whether Python would take a module from the user's part of ``tree``. Nothing is imported.

    Not if a package of that name is installed: it may be imported before, by the kit itself.
    """
    parts = module.split(".")
    own = {str(Path.cwd()), str(Path.cwd() / "src")}
    if parts[0] in sys.stdlib_module_names or PathFinder.find_spec(parts[0], [p for p in sys.path if p not in own]):
        return False
    where: Any = [*([str(tree / "src")] if runs_sources(tree) else []), str(tree), *sys.path]
    origin = None
    for count in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:count]), where)
        if spec is None:
            return False
        origin, where = spec.origin, spec.submodule_search_locations or []
    file = Path(origin or "/").resolve()
    kits = (tree / "src/samebits", tree / "pipeline")
    return file.is_relative_to(tree.resolve()) and not any(file.is_relative_to(one.resolve()) for one in kits)
