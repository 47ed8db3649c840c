"""Lines for a terminal, or for a file with the same text: within bounds of width, wrapped, with bars on an axis."""

from __future__ import annotations

import re
import sys
import textwrap
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from samebits.errors import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTHS = (80, 100)
"""The narrowest form, and the widest. What is no terminal gets the widest."""

MOST_MARKS = 5
"""Whole numbers that are written at an axis, beside 0."""

_QUESTION, _FIGURE = 24, 8
"""Columns of an answer's first two parts."""

_SPACE = "\x00"  # between the words of a command, while lines are broken


def width_of(console: Console) -> int:
    """Columns of a console within bounds."""
    return min(WIDTHS[1], max(WIDTHS[0], console.width)) if console.is_terminal else WIDTHS[1]


def working(text: str) -> AbstractContextManager[object]:
    """A sign on a terminal, below what is printed, that the block's work goes on."""
    aside = Console(stderr=True)
    whole = aside.is_terminal and sys.stdout.isatty()  # what is printed is written by the sign's console
    return aside.status(text) if whole else nullcontext()


def rule(width: int) -> Text:
    """The line that begins an output."""
    return Text("─" * width)


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """A text as lines, those after the first with ``indent``. What stands between backticks is not broken."""
    whole = re.sub(r"`[^`]+`", lambda code: code[0].replace(" ", _SPACE), printable(text))
    lines = textwrap.wrap(whole, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [line.replace(_SPACE, " ") for line in lines] or [""]


def answer(question: str, figure: str, told: str, width: int, style: str) -> Iterator[Text]:
    """A question, the figure that answers it in ``style``, and what else is told of it."""
    indent = _QUESTION + _FIGURE
    first, *more = wrapped(told, width - indent)
    yield Text.assemble(f"{question:<{_QUESTION}}", (f"{figure:<{_FIGURE}}", style), first)
    yield from (Text(" " * indent + line) for line in more)


def cut(text: str, width: int) -> str:
    """A text of at most so many columns."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def marks(most: int) -> list[int]:
    """The whole numbers that are written at an axis, the last of which is ``most``; none is close to that."""
    step = -(-most // MOST_MARKS)
    return [*(number for number in range(0, most, step) if 2 * (most - number) > step), most]


def axis(most: int, limit: float, columns: int) -> str:
    """The marks of an axis from 0 to ``limit``, the last of which is ``most``."""
    line = [" "] * columns
    for number in marks(most):
        text = f"{number}×"
        at = min(round(columns * number / limit), columns - len(text))
        line[at : at + len(text)] = text
    return "".join(line)


def extent(start: float, end: float, limit: float, columns: int) -> tuple[int, int]:
    """First column and number of columns of a bar, at least one."""
    low, high = sorted((round(columns * max(0.0, start) / limit), round(columns * max(0.0, end) / limit)))
    return min(low, columns - 1), max(1, high - low)
