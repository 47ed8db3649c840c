"""What a stage is doing now, in a file for whoever shows it: the file's path is in an environment variable.

Nothing is written without that variable. A write that fails is given up, because no result depends on it.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import NamedTuple

VARIABLE = "SAMEBITS_PROGRESS"
EVERY = 0.2  # seconds between writes of the same activity, at least

_last: tuple[str, float] = ("", 0.0)


class Doing(NamedTuple):
    """An activity, and how far it is: ``done`` of ``of`` parts, or 0 of 0 if it has none."""

    what: str
    done: int = 0
    of: int = 0


def tell(what: str, done: int = 0, of: int = 0) -> None:
    """Write what this process is doing, unless the same was written a moment ago. Of workers the first one writes."""
    global _last
    path = os.environ.get(VARIABLE)
    if not path or os.environ.get("RANK", "0") != "0":
        return
    now = time.monotonic()
    if what == _last[0] and now < _last[1] + EVERY and done != of:
        return
    _last = (what, now)
    temporary = Path(f"{path}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps([what, done, of]), encoding="utf-8")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)


def read(path: Path) -> Doing | None:
    """What the file says; None if it says nothing yet."""
    try:
        what, done, of = json.loads(path.read_text(encoding="utf-8"))
        return Doing(str(what), int(done), int(of))
    except (OSError, ValueError, TypeError):
        return None
