"""Faults of a disk: operations that fail, and the contents after a loss of power."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from faults.subject import expect

if TYPE_CHECKING:
    import random

_LIBRARY = "SAMEBITS_FAULTS_SHIM"
_SOURCE = Path(__file__).with_name("shim.c")
KINDS = (
    "create",
    "open",
    "write",
    "fsync",
    "rename",
    "mkdir",
    "unlink",
    "rmdir",
    "truncate",
    "link",
    "symlink",
    "chmod",
)
"""Kinds of operations, in the order of the list in shim.c."""
LOST = -1  # in place of an errno


@dataclass(frozen=True)
class Fault:
    """An error of one operation, and of every later operation of the kinds ``onward``."""

    name: str
    error: int
    onward: frozenset[str] = frozenset()


NO_FAULT = Fault("nothing", 0)
POWER_LOSS = Fault("power loss", LOST)
CONTENTS_LOSS = Fault("power loss, but names are kept", LOST)
FAULTS = (
    Fault("ENOSPC", errno.ENOSPC, frozenset({"create", "write", "fsync", "mkdir", "link", "symlink"})),
    Fault("EIO", errno.EIO),
    Fault("EROFS", errno.EROFS, frozenset(KINDS)),
    Fault("EMFILE", errno.EMFILE),
    POWER_LOSS,
    CONTENTS_LOSS,
)
"""A full disk stays full. A damaged file system stays read-only."""


@dataclass(frozen=True)
class Operation:
    """One line of a trace. ``outcome`` is 0 or an errno, ``other`` the new name, ``content`` that of an fsync."""

    number: int
    kind: str
    outcome: int
    path: Path
    other: Path
    content: bytes | None = None

    def __str__(self) -> str:
        """Kind and path, for a message."""
        return f"{self.kind} of {'/'.join(self.path.parts[-2:])}"


# -- the shim ------------------------------------------------------------------------------------------------------


def preload() -> None:
    """Build the shim and start Python again with it. Call it before anything heavy is imported.

    In the process that was started again it only tidies up.
    """
    if library := os.environ.pop(_LIBRARY, None):
        # The library stays mapped here, and programs that this process starts are without it.
        others = [name for name in os.environ.pop("LD_PRELOAD", "").split(":") if name not in ("", library)]
        if others:
            os.environ["LD_PRELOAD"] = ":".join(others)
        shutil.rmtree(Path(library).parent)
        return
    library = str(Path(tempfile.mkdtemp(prefix="faults-shim-")) / "shim.so")
    try:
        command = ["cc", "-shared", "-fPIC", "-O2", "-o", library, str(_SOURCE), "-ldl"]
        subprocess.run(command, check=True, stderr=subprocess.PIPE, encoding="utf-8")
    except (OSError, subprocess.CalledProcessError) as error:
        shutil.rmtree(Path(library).parent)
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else error
        sys.exit(f"error: {_SOURCE.name} cannot be built: {said}. hint: install a C compiler that is called cc")
    os.environ[_LIBRARY] = library
    os.environ["LD_PRELOAD"] = ":".join(filter(None, [library, os.environ.get("LD_PRELOAD")]))
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606


def arm(folder: Path, trace: Path, number: int = -1, fault: Fault = NO_FAULT) -> None:
    """Trace the operations of this process and its forks under ``folder``, and let one of them fail."""
    kinds = sum(1 << KINDS.index(kind) for kind in fault.onward)
    # The kernel's name of the path: TMPDIR may be a link.
    problem = ctypes.CDLL(None).faults_arm(
        os.fsencode(folder.resolve()), number, fault.error, kinds, os.fsencode(trace)
    )
    if problem:
        raise OSError(problem, f"the shim cannot be armed: {os.strerror(problem)}")


def read_trace(trace: Path) -> list[Operation]:
    """The traced operations in their order."""
    operations = []
    for line in trace.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        number, kind, outcome, first, second = line.split("\t")
        kept = Path(f"{trace}.{number}")
        content = kept.read_bytes() if kind == "fsync" and kept.exists() else None
        path, other = (Path(os.path.normpath(name)) for name in (first, second))
        operations.append(Operation(int(number), kind, int(outcome), path, other, content))
    return operations


# -- what a disk holds after the power was lost ----------------------------------------------------------------------


@dataclass
class Node:
    """A file or a folder as programs see it, and as its last fsync left it."""

    entries: dict[str, Node] | None = None  # of a folder
    content: bytes = b""  # of a file, at its last fsync
    dirty: bool = False
    kept: dict[str, Node] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> Node:
        """The node of a path whose contents are all on the disk."""
        if path.is_dir():
            entries = {child.name: cls.of(child) for child in path.iterdir()}
            return cls(entries=entries, kept=dict(entries))
        return cls(content=path.read_bytes())


class Disk:
    """A model of a folder on a disk. It follows the operations of a trace."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._root = Node.of(folder)

    def replay(self, operations: list[Operation]) -> None:
        """Apply the operations that succeeded."""
        for operation in operations:
            if operation.outcome == 0 and operation.path.is_relative_to(self._folder):
                self._make(operation)

    def names(self) -> set[str]:
        """All relative paths that programs see."""
        return set(_names(self._root, ""))

    def lose_power(self, choices: random.Random, *, keep_names: bool) -> None:
        """Replace the folder by what the disk holds.

        A file without an fsync goes back to its contents before. With ``keep_names`` renames reach the disk before
        contents, so that a file may also be empty, cut short or zeros.
        """
        before = self._folder.rename(self._folder.with_name("before"))
        self._put(self._root, self._folder, before, choices if keep_names else None)
        shutil.rmtree(before)

    def _put(self, node: Node, folder: Path, before: Path, choices: random.Random | None) -> None:
        """Write what the disk holds of a node into ``folder``. With ``choices`` names are those that programs see."""
        folder.mkdir()
        for name, child in ((node.entries or {}) if choices else node.kept).items():
            if child.entries is not None:
                self._put(child, folder / name, before / name, choices)
                continue
            content = child.content
            if choices and child.dirty:
                seen = (before / name).read_bytes()
                content = choices.choice([content, b"", seen[: len(seen) // 2], bytes(len(seen))])
            (folder / name).write_bytes(content)

    def _make(self, operation: Operation) -> None:
        match operation.kind:
            case "create":
                self._entries(operation.path)[operation.path.name] = Node(dirty=True)
            case "mkdir":
                self._entries(operation.path)[operation.path.name] = Node(entries={})
            case "unlink" | "rmdir":
                del self._entries(operation.path)[operation.path.name]
            case "rename":
                moved = self._entries(operation.path).pop(operation.path.name)
                self._entries(operation.other)[operation.other.name] = moved
            case "open" | "write" | "truncate":
                if node := self._find(operation.path):
                    node.dirty = True
            case "fsync":
                if node := self._find(operation.path):
                    node.kept = dict(node.entries or {})
                    node.content, node.dirty = operation.content or b"", False
            case "link" | "symlink":
                raise AssertionError(f"{operation}: no file of the kit is a link")

    def _entries(self, path: Path) -> dict[str, Node]:
        node = self._find(path.parent)
        expect(node is not None and node.entries is not None, "the trace lacks what made a folder", path.parent)
        assert node is not None
        assert node.entries is not None
        return node.entries

    def _find(self, path: Path) -> Node | None:
        """The node of a path. None for a file that was unlinked while it was open."""
        node: Node | None = self._root
        for name in path.relative_to(self._folder).parts:
            node = (node.entries or {}).get(name) if node else None
        return node


def _names(node: Node, path: str) -> list[str]:
    found = []
    for name, child in (node.entries or {}).items():
        found += [path + name, *_names(child, f"{path}{name}/")]
    return found
