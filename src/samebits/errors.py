"""Errors that a user can act on, and how a program exits with them.

Exit codes are part of the interface: 0 done; 1 the verdict is worse than asked for; 2 the user's input is
wrong; 3 the host cannot do it; 4 a worker failed; 129, 130 and 143 after SIGHUP, SIGINT and SIGTERM.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import sysconfig
import threading
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from samebits.here import is_kit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


_Kind = TypeVar("_Kind", bound=BaseException)
_LONGEST = 1000  # characters of a message
_MASKED_CHARACTERS = 32_768  # at both ends of a text, which is far more than are shown: masking takes its time
MASK = "***"
"""Text in place of a password."""
_MASKED = "password|passwd|pwd|token|secret|signature|api[_-]?key|access[_-]?key"


class WithHint(BaseException):
    """An expected end of a program, with a message and a hint.

    Args:
        message: names the thing, its value and what was expected, without a final full stop.
        hint: what the user can do.

    ``traceback`` is the traceback of an error in another process.
    """

    exit_code: int = 4
    traceback: str | None = None

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message = one_line(message)
        self.hint = one_line(hint)

    def __str__(self) -> str:
        return f"{self.message}. hint: {self.hint}"


class SamebitsError(WithHint, Exception):
    """An expected failure."""


def without_password(text: str) -> str:
    """The text with ``***`` for passwords in addresses, ``http://user:***@host``, and for credentials in headers."""
    text = re.sub(r"\S+", _without_logins, text)
    text = re.sub(r"(https?://)[^/\s:@]+@(?![^/\s]*@)", r"\1***@", text)  # a token in place of a name
    text = re.sub(rf"(?i)([?&](?:[\w-]*(?:{_MASKED})|sig)=)[^&\s#]*", r"\1***", text)
    return re.sub(r"\b(Basic|Bearer) [\w+/.~=-]{16,}", r"\1 ***", text)


def _without_logins(word: re.Match[str]) -> str:
    """A word with ``***`` for passwords in addresses, in a time that is linear: the word may be a stranger's."""
    head, at, rest = word[0].rpartition("@")
    if not at or "://" not in head:
        return word[0]
    # A password ends at the last @ before the path. As SQLAlchemy reads it, it may have slashes, unless it is a port.
    return re.sub(r"(://[^/\s:]*):(?:[^/\s]*|(?!\d+/)[^\s@]*)@", r"\1:***@", head + at) + rest


def one_line(text: str) -> str:
    """A text as one line for a terminal: without passwords, shortened, and with escaped control characters.

    The text may come from others, such as an exception of the model, or contain names of files and keys.
    """
    text = " ".join(text.split())
    if len(text) > 2 * _MASKED_CHARACTERS:  # between words, which are masked as a whole
        first, last = text[:_MASKED_CHARACTERS], text[-_MASKED_CHARACTERS:].partition(" ")[2]
        words, _, part = first.rpartition(" ")
        text = f"{words if len(part) < _MASKED_CHARACTERS // 2 else first} ... {last}"  # no password is so long
    text = without_password(text)
    return printable(text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}")


_BLANK = {"\u034f", "\u115f", "\u1160", "\u17b4", "\u17b5", "\u2800", "\u3164", "\uffa0",
          *map(chr, range(0xFE00, 0xFE10)), *map(chr, range(0xE0100, 0xE01F0))}  # fmt: skip
"""Printable to Python, and shown as nothing: fillers, joiners and selectors of variants."""


def printable(text: str) -> str:
    """A text with escaped control and blank characters, including those that change the direction of a line."""
    return "".join(c if c.isprintable() and c not in _BLANK else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """The same for a text of several lines, such as one from a foreign record."""
    return "\n".join(map(printable, text.split("\n")))


class UserError(SamebitsError, ValueError):
    """The user's input is wrong: parameters, a file, a model."""

    exit_code = 2


class RefusedError(UserError):
    """``exact`` cannot guarantee a model's bits. Other numerics may still train it.

    ``why`` is the reason. ``at`` is the path of a module or tensor from the model, or the running code, and ``kind`` is
    the module's class. Both are empty if unknown.
    """

    def __init__(self, why: str, *, hint: str, at: str = "", kind: str = "") -> None:
        where = f"{at} ({kind})" if at and kind else at or kind
        super().__init__(f"exact: {where}: {why}" if where else f"exact: {why}", hint=hint)
        self.why, self.at, self.kind = why, at, kind

    @property
    def what(self) -> str:
        """The refused part in few words."""
        if self.at and self.kind:
            return f"{self.kind} in {self.at}"
        return self.at or self.kind or self.why.partition(":")[0]

    def with_line(self) -> RefusedError:
        """The same refusal with the user's line that met it, as ``place_of`` finds it in the traceback."""
        line = place_of(self)
        if line is None:
            return self
        if not self.at and not self.kind:
            return RefusedError(self.why, hint=self.hint or "", at=line)
        return RefusedError(f"{self.why} ({line})", hint=self.hint or "", at=self.at, kind=self.kind)


class NotFiniteError(UserError):
    """``exact`` has met infinity or NaN, which it does not sum."""


class HostError(SamebitsError):
    """This host cannot do what was asked: no such device, no memory, no space."""

    exit_code = 3


class WorkerError(SamebitsError):
    """A worker process failed or was killed."""

    exit_code = 4


class CollectiveError(WorkerError):
    """A rank waited in vain for another rank, whose failure is the cause."""


def signal_name(signum: int) -> str:
    """The name in signal(7), or the number, since most real-time signals have no name."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


class Interrupted(WithHint):
    """A signal ended the work. The exit code is 128 + ``signum``.

    Like KeyboardInterrupt it is no Exception, because code that continues after a failure must not continue after a
    signal.
    """

    def __init__(self, signum: int) -> None:
        name = "Ctrl-C" if signum == signal.SIGINT else signal_name(signum)
        super().__init__(f"stopped by {name}", hint="run the same command again")
        self.signum = signum
        self.exit_code = 128 + signum


def first_line(text: str) -> str:
    """The first line of a message, without its full stop."""
    return (text.strip() or "no message").splitlines()[0].rstrip(".")


def reason(error: Exception) -> str:
    """An exception's text in one line, without the path at the end of an OSError, which messages begin with."""
    return first_line(getattr(error, "strerror", None) or str(error))


def last_line(text: str) -> str:
    """The last line of a program's output."""
    return (text.strip().splitlines() or ["it said nothing"])[-1]


def few(names: Sequence[str], limit: int = 3) -> str:
    """The first names of a list, and the number of the others."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def counted(count: int, noun: str) -> str:
    """``1 GPU`` or ``4 GPUs``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def caused_by(error: BaseException | None, kind: type[_Kind]) -> _Kind | None:
    """The error or its nearest cause of that kind, since a library may wrap it; None if there is none."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error


def place_of(error: BaseException) -> str | None:
    """``file.py:12``, the innermost line of the user's own code in an error's traceback; None if there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_file() and is_own(file):
            here = Path.cwd()
            return f"{file.relative_to(here) if file.is_relative_to(here) else file}:{frame.lineno}"
    return None


_KIT = Path(__file__).resolve().parent
_SYSTEM = {
    Path(folder).resolve()
    for folder in (*map(sysconfig.get_path, ("stdlib", "platstdlib")), sys.prefix, sys.base_prefix,
                   "/proc", "/sys", "/dev", "/etc", "/usr")
}  # fmt: skip


def is_own(file: Path) -> bool:
    """Whether a code file is the user's: not Python's, not an installed package's, and not this kit's."""
    if {"site-packages", "dist-packages"} & {*file.parts}:
        return False
    scripts = {root / "pipeline" for root in (_KIT.parent.parent, Path.cwd()) if is_kit(root)}
    return not (file.is_relative_to(_KIT) or file.parent in scripts or in_system(file))


def in_system(file: Path) -> bool:
    """Whether a file is the operating system's or Python's. A system folder that contains the root does not count."""
    root = Path.cwd().resolve()
    return any(file.is_relative_to(folder) for folder in _SYSTEM if not root.is_relative_to(folder))


_BY_EXIT_CODE: dict[int, type[SamebitsError]] = {one.exit_code: one for one in (UserError, HostError, WorkerError)}


def from_exit_code(exit_code: int, message: str, hint: str) -> SamebitsError | Interrupted:
    """Rebuild an error from another process. A negative code is a signal's, as with Popen."""
    exit_code = 128 - exit_code if exit_code < 0 else exit_code
    if exit_code in (128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGHUP):
        return Interrupted(exit_code - 128)
    return _BY_EXIT_CODE.get(exit_code, WorkerError)(message, hint=hint)


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Raise Interrupted for signals that would end Python by default. Ctrl-C has its own exception."""

    def interrupt(signum: int, _: object) -> None:
        raise Interrupted(signum)

    def once_more(swallowed: sys.UnraisableHookArgs) -> None:
        if isinstance(swallowed.exc_value, Interrupted | KeyboardInterrupt):  # it arrived while an object was deleted
            signum = getattr(swallowed.exc_value, "signum", signal.SIGINT)
            threading.Timer(0.05, os.kill, [os.getpid(), signum]).start()  # after this hook returns
        else:
            usual(swallowed)

    usual = sys.unraisablehook
    ours = (signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    signals = [signum for signum in ours if signal.getsignal(signum) == signal.SIG_DFL]
    for signum in signals:
        signal.signal(signum, interrupt)
    if signals:
        sys.unraisablehook = once_more
    try:
        yield
    finally:
        sys.unraisablehook = usual
        for signum in signals:
            signal.signal(signum, signal.SIG_DFL)


@contextmanager
def exit_on_error(*, debug: bool = False) -> Iterator[None]:
    """Turn expected errors into one line on stderr and the right exit code. Others keep their traceback.

    A signal that asks the program to end is an expected error too, so that the program cleans up.
    """
    try:
        with _interrupted_by_signals():
            yield
    except (WithHint, KeyboardInterrupt, MemoryError) as error:
        ending = _ending_of(error)
        if debug:
            sys.stderr.write(without_password(ending.traceback or traceback.format_exc()))
        sys.stderr.write(f"error: {ending}\n")
        sys.exit(ending.exit_code)


def _ending_of(error: WithHint | KeyboardInterrupt | MemoryError) -> WithHint:
    """The error that a program ends with, also for Python's own exceptions."""
    if isinstance(error, KeyboardInterrupt):
        return Interrupted(signal.SIGINT)
    if isinstance(error, MemoryError):  # NumPy's message has the size
        return HostError(f"out of memory: {first_line(str(error))}", hint="free some memory, or lower data.num_samples")
    return error
