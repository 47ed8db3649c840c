"""Where bad input is tried: a sandbox beside a folder that must not change, and what every refusal has to look like."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import re
import resource
import shutil
import unicodedata
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from faults.subject import Broken, Child, Sandbox, check_end, expect, kill, marked

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SECONDS = 20.0
LONGEST = 1500  # characters of an error's line
_MEMORY = 6 << 30  # bytes more than the campaign has: what input blows up fails there, and not on the host
_OF_A_STAGE = "failed. hint: see its message above"  # the end of a second error, by the command that ran the stage
_PASSING = {"\n", "\r", "\t"}  # a progress bar goes back to its line's begin
REFUSED = {0, 2, 3}
"""Exit codes of input that is wrong, or is right by chance."""
VERDICT = {0, 1, 2, 3}
"""Those of a command that may also give a bad verdict."""


class Attempt(NamedTuple):
    """What is wrong, and a function that shows it to a program.

    ``codes`` are the exit codes that this may end with. A refusal has to name one of ``names``, if there are any.
    """

    what: str
    start: Callable[[], Child]
    codes: set[int]
    names: tuple[str, ...] = ()


class _Touch:
    """An object whose unpickling makes a file."""

    def __init__(self, file: Path) -> None:
        self._file = str(file)

    def __reduce__(self) -> tuple[Any, ...]:
        return (io.open, (self._file, "w"))


class Bench(Sandbox):
    """A sandbox with the files of ``template``; ``outside`` lies beside it, and code in a file touches ``canary``."""

    def __init__(self, folder: Path, params: dict[str, Any], template: Path | None = None) -> None:
        super().__init__(folder, params)
        if template is not None:
            shutil.copytree(template, self.folder, dirs_exist_ok=True, symlinks=True)
        self.mark, self._children = f"inputs-{os.getpid()}-{folder.name}", list[Child]()
        self.outside, self.canary = folder / "outside", folder / "canary"
        self.outside.mkdir()
        for name in ("passwd", "card.json", "array.npy"):
            (self.outside / name).write_text("root:x:0:0\n", encoding="utf-8")
        self._before = _state(self.outside)
        self._around = _names(folder), _names(folder.parent)

    def pickle(self) -> bytes:
        """A pickle that makes ``canary`` when it is read."""
        return pickle.dumps([_Touch(self.canary)])

    def pickle_of(self) -> object:
        """The object of such a pickle, for formats that hold one."""
        return _Touch(self.canary)

    def stage(self, name: str, *arguments: str, seconds: float = SECONDS) -> Child:
        """Run a stage to its end."""
        return self._ended(self.start(name, *arguments, armed=_limit), seconds)

    def samebits(
        self, *arguments: str, seconds: float = SECONDS, environ: Mapping[str, str] = MappingProxyType({})
    ) -> Child:
        """Run the command line to its end."""
        return self._ended(self.start("samebits", *arguments, armed=_limit, environ=environ), seconds)

    def call(self, function: Callable[[], object], *, seconds: float = SECONDS) -> Child:
        """Call a function as the kit's programs do, in a process of its own."""
        return self._ended(self.start(function, armed=_limit), seconds)

    def _ended(self, child: Child, seconds: float) -> Child:
        self._children.append(child)
        child.wait(seconds)
        return child

    def check(self, child: Child, codes: set[int] = REFUSED, names: tuple[str, ...] = ()) -> None:
        """Raise Broken unless it ended as bad input has to, and left everything else alone."""
        check_refusal(child, codes, names)
        self.check_around()
        expect(not (left := marked(self.mark)), "processes are left", left)

    def close(self) -> None:
        """End what a broken promise left running, and delete everything."""
        kill({*marked(self.mark), *(pid for child in self._children for pid in child.session())})
        shutil.rmtree(self.outside.parent, ignore_errors=True)

    def check_around(self) -> None:
        """Raise Broken if anything outside of the working folder changed, or a pickle was executed."""
        touched = [Path(above) for above, _, files in os.walk(self.folder) if "canary" in files]
        expect(not self.canary.exists() and not touched, "code in a file was executed", touched)
        expect(_state(self.outside) == self._before, "written outside of the working folder", self.outside)
        folder = self.outside.parent
        around = _names(folder), _names(folder.parent)
        expect(
            around == self._around,
            "written beside the working folder",
            [a ^ b for a, b in zip(around, self._around, strict=True)],
        )
        expect(not (left := self.leftovers()), "leftovers", left)


def check_refusal(child: Child, codes: set[int], names: tuple[str, ...] = ()) -> None:
    """Raise Broken unless a program ended with one of ``codes``, and if that is a refusal's, with one fit line.

    That line, or what it refers to above it, has to hold one of ``names``, if there are any.
    """
    text, errors = child.err(), child.errors()
    if child.code is not None and child.code < 0:
        raise Broken(f"killed by signal {-child.code}: {text[-500:]}")
    check_end(child, codes)
    for stream in (text, child.out()):
        control = {c for c in stream if unicodedata.category(c) == "Cc"} - _PASSING
        expect(not control, "control characters are printed", f"{sorted(control)!r} in {stream[-500:]!r}")
    if len(errors) == 2 and errors[1].endswith(_OF_A_STAGE):
        text = text.removesuffix(f"{errors.pop()}\n")
    if child.code not in (2, 3):
        expect(not errors, f"exit code {child.code}, and an error", errors)
        return
    if child.code == 2 and re.match(r"Usage: .*\n(?s:.*)\n\nError: .", text):
        return  # click's own refusal of a command line, which may list what it accepts
    expect(len(errors) == 1, "expected one line of an error", text[-1000:])
    expect(text.endswith(f"{errors[0]}\n"), "expected the error as the last line", text[-1000:])
    expect(len(errors[0]) <= LONGEST, f"{len(errors[0])} characters in one line", errors[0][:200])
    expect(len(errors[0]) > len("error: "), "an error that says nothing", text[-1000:])
    expect(not names or any(name in text for name in names), f"none of {names} is named", text[-1000:])
    expect("\r" not in errors[0] and "\t" not in errors[0], "control characters in the error", repr(errors[0][-500:]))


def _limit() -> None:
    """Bound memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + _MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} | {"canary"}


def _state(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Mode, time of change and bytes of all below a folder."""
    found = {}
    for path in sorted([folder, *folder.rglob("*")]):
        status = path.lstat()
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path.relative_to(folder))] = (status.st_mode, status.st_mtime_ns, digest)
    return found
