"""Errors that a user can act on, and how a program ends with one.

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

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


_Kind = TypeVar("_Kind", bound=BaseException)
_LONGEST = 1000  # characters of a message
MASK = "***"
"""What stands in the place of a password."""
_MASKED = "password|passwd|pwd|token|secret|signature|api[_-]?key|access[_-]?key"


class WithHint(BaseException):
    """An expected end: what happened, and what to do about it.

    Args:
        message: names the thing, what it was and what was expected; no final full stop.
        hint: what the user can do.

    ``traceback`` is where it happened, if that was in another process.
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
    """A text in which no address has its password, ``http://user:***@host``, and no header its credentials."""
    # A password up to the last @ before the path; or with slashes in it, as SQLAlchemy takes it, unless it is a port.
    text = re.sub(r"(://[^/\s:]*):(?:[^/\s]*|(?!\d+/)[^\s@]*)@", r"\1:***@", text)
    text = re.sub(r"(https?://)[^/\s:@]+@(?![^/\s]*@)", r"\1***@", text)  # a token in the place of a name
    text = re.sub(rf"(?i)([?&](?:[\w-]*(?:{_MASKED})|sig)=)[^&\s#]*", r"\1***", text)
    return re.sub(r"\b(Basic|Bearer) [\w+/.~=-]{16,}", r"\1 ***", text)


def one_line(text: str) -> str:
    """A text as one line of a terminal: without passwords, not too long, and its control characters written out.

    It may be somebody else's, such as an exception's of the model, or hold the name of a file or of a key.
    """
    text = printable(without_password(" ".join(text.split())))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"


def printable(text: str) -> str:
    """A text whose control characters are written out, those among them that turn the direction of a line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """The same of a text of several lines, as what a foreign record says."""
    return "\n".join(map(printable, text.split("\n")))


class UserError(SamebitsError, ValueError):
    """The user's input is wrong: parameters, a file, a model."""

    exit_code = 2


class RefusedError(UserError):
    """``exact`` cannot keep its word for a model: other numerics may train it.

    ``why`` is the reason, ``at`` the path of a module or tensor from the model, or what runs, and ``kind`` the module's
    class; either is empty where nobody knows it.
    """

    def __init__(self, why: str, *, hint: str, at: str = "", kind: str = "") -> None:
        where = f"{at} ({kind})" if at and kind else at or kind
        super().__init__(f"exact: {where}: {why}" if where else f"exact: {why}", hint=hint)
        self.why, self.at, self.kind = why, at, kind

    @property
    def what(self) -> str:
        """What was refused, in few words."""
        if self.at and self.kind:
            return f"{self.kind} in {self.at}"
        return self.at or self.kind or self.why.partition(":")[0]


class NotFiniteError(UserError):
    """``exact`` has met infinity or NaN, of which it makes no sum."""


class HostError(SamebitsError):
    """This host cannot do what was asked: no such device, no memory, no space."""

    exit_code = 3


class WorkerError(SamebitsError):
    """A worker process failed or was killed."""

    exit_code = 4


class CollectiveError(WorkerError):
    """A rank waited in vain for another, whose failure is the cause."""


def signal_name(signum: int) -> str:
    """As signal(7) has it, or its number: most real-time signals have no name."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


class Interrupted(WithHint):
    """A signal ended the work; ``signum`` gives the exit code 128 + signum.

    As KeyboardInterrupt, it is no Exception: whoever goes on after a failure must not go on after a signal.
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
    """What an exception says, in one line; without the path that an OSError ends in, which messages begin with."""
    return first_line(getattr(error, "strerror", None) or str(error))


def last_line(text: str) -> str:
    """The last line of what a program said."""
    return (text.strip().splitlines() or ["it said nothing"])[-1]


def few(names: Sequence[str], limit: int = 3) -> str:
    """The first names of a list, and how many more there are."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def counted(count: int, noun: str) -> str:
    """``1 GPU`` or ``4 GPUs``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def caused_by(error: BaseException | None, kind: type[_Kind]) -> _Kind | None:
    """The error itself or the nearest behind it that is of a kind: a library may have put its own around it."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error


def place_of(error: BaseException) -> str | None:
    """``file.py:12``, the innermost line of the user's own code that an error came through; None if there is none."""
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
    """Whether a file of code is the user's: neither Python's, nor an installed package's, nor this kit's."""
    installed = {"site-packages", "dist-packages"} & {*file.parts}
    kits = file.is_relative_to(_KIT) or file.parent in {root / "pipeline" for root in (_KIT.parent.parent, Path.cwd())}
    return not (installed or kits or in_system(file))


def in_system(file: Path) -> bool:
    """Whether a file is the operating system's or Python's; a folder of theirs that the root lies in does not count."""
    root = Path.cwd().resolve()
    return any(file.is_relative_to(folder) for folder in _SYSTEM if not root.is_relative_to(folder))


_BY_EXIT_CODE: dict[int, type[SamebitsError]] = {one.exit_code: one for one in (UserError, HostError, WorkerError)}


def from_exit_code(exit_code: int, message: str, hint: str) -> SamebitsError | Interrupted:
    """Rebuild an error that crossed a process boundary as plain data; a negative code is a signal's, as of Popen."""
    exit_code = 128 - exit_code if exit_code < 0 else exit_code
    if exit_code in (128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGHUP):
        return Interrupted(exit_code - 128)
    return _BY_EXIT_CODE.get(exit_code, WorkerError)(message, hint=hint)


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Raise Interrupted where Python would end by a signal's default action; Ctrl-C has its own exception."""

    def interrupt(signum: int, _: object) -> None:
        raise Interrupted(signum)

    def once_more(swallowed: sys.UnraisableHookArgs) -> None:
        if isinstance(swallowed.exc_value, Interrupted | KeyboardInterrupt):  # it came while an object went away
            signum = getattr(swallowed.exc_value, "signum", signal.SIGINT)
            threading.Timer(0.05, os.kill, [os.getpid(), signum]).start()  # once Python is out of here
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
    """Turn expected errors into one line on stderr and the right exit code; others keep their traceback.

    A signal that asks the program to end is such an error too, so that it leaves nothing behind.
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
    """What a program ends with, also for what Python itself raises."""
    if isinstance(error, KeyboardInterrupt):
        return Interrupted(signal.SIGINT)
    if isinstance(error, MemoryError):  # NumPy's says how much it asked for
        return HostError(f"out of memory: {first_line(str(error))}", hint="free some memory, or lower data.num_samples")
    return error
