"""Errors that a user can act on, and how a program ends with one.

Exit codes are part of the interface: 0 done; 1 the verdict is worse than asked for; 2 the user's input is
wrong; 3 the host cannot do it; 4 a worker failed; 130 and 143 after SIGINT and SIGTERM.
"""

from __future__ import annotations

import re
import signal
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class SamebitsError(Exception):
    """An expected failure: what happened, and what to do about it.

    Args:
        message: names the thing, what it was and what was expected; no final full stop.
        hint: what the user can do.

    ``traceback`` is where it happened, if that was in another process.
    """

    exit_code: int = 4
    traceback: str | None = None

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}. hint: {self.hint}"


class UserError(SamebitsError, ValueError):
    """The user's input is wrong: parameters, a file, a model."""

    exit_code = 2


class HostError(SamebitsError):
    """This host cannot do what was asked: no such device, no memory, no space."""

    exit_code = 3


class WorkerError(SamebitsError):
    """A worker process failed or was killed."""

    exit_code = 4


class Interrupted(SamebitsError):  # noqa: N818 - nobody erred
    """A signal ended the work; ``signum`` gives the exit code 128 + signum."""

    def __init__(self, signum: int) -> None:
        name = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
        super().__init__(f"stopped by {name}", hint="run the same command again")
        self.signum = signum
        self.exit_code = 128 + signum


def first_line(text: str) -> str:
    """The first line of a message, without its full stop."""
    return text.strip().split("\n", maxsplit=1)[0].rstrip(".")


def last_line(text: str) -> str:
    """The last line of what a program said."""
    return (text.strip().splitlines() or ["it said nothing"])[-1]


def few(names: Sequence[str], limit: int = 3) -> str:
    """The first names of a list, and how many more there are."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def place_of(error: BaseException) -> str | None:
    """``file.py:12``, the innermost line of the user's own code that an error came through; None if there is none."""
    own = Path(__file__).parent
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_file() and own not in file.parents and not _INSTALLED.search(frame.filename):
            here = Path.cwd()
            return f"{file.relative_to(here) if file.is_relative_to(here) else file}:{frame.lineno}"
    return None


_INSTALLED = re.compile(r"/(site|dist)-packages/|/lib/python3|/pipeline/\w+\.py$")

_BY_EXIT_CODE: dict[int, type[SamebitsError]] = {2: UserError, 3: HostError, 4: WorkerError}


def from_exit_code(exit_code: int, message: str, hint: str) -> SamebitsError:
    """Rebuild an error that crossed a process boundary as plain data."""
    return _BY_EXIT_CODE.get(exit_code, WorkerError)(message, hint=hint)


@contextmanager
def exit_on_error(*, debug: bool = False) -> Iterator[None]:
    """Turn expected errors into one line on stderr and the right exit code; others keep their traceback."""
    try:
        yield
    except SamebitsError as error:
        if debug:
            sys.stderr.write(error.traceback or traceback.format_exc())
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.stderr.write("error: stopped by Ctrl-C. hint: run the same command again\n")
        sys.exit(130)
