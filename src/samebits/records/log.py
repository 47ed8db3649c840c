"""The local log of a run: JSON lines that a sender delivers to MLflow while training goes on.

The training writes here and nowhere else, so that a slow or absent server never holds it up. A lock on the
file says that its writer is alive.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import sys
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from samebits.errors import UserError, first_line, without_password
from samebits.files import Part, make_folder, private_mode, remove_unfinished
from samebits.host import HostFacts
from samebits.params import Params
from samebits.params.schema import NumericsName
from samebits.records.card import Card
from samebits.records.run import Node, Timing
from samebits.strategies import StrategyName
from samebits.strategies.placement import Placement

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

Status = Literal["FINISHED", "FAILED", "KILLED"]

LOGS = Path(".samebits/runs")
SCHEMA: Literal[3] = 3
"""Of the events, which the first of them names."""


FLUSH_SECONDS = 3.0


def now_ms() -> int:
    """Milliseconds since 1970, as MLflow counts."""
    return time.time_ns() // 1_000_000


class _Event(Part):
    model_config = ConfigDict(allow_inf_nan=True, ser_json_inf_nan="constants")  # a loss that is not finite is told

    time_ms: int = Field(default_factory=now_ms)


class StartEvent(_Event):
    """A training begins; ``tracking_uri`` is the store in use, None for the repository's own."""

    event: Literal["start"] = "start"
    log_schema: Literal[3]
    tracking_uri: str | None
    run: str
    strategy: StrategyName
    numerics: NumericsName
    placement: Placement
    params: Params
    tags: dict[str, str] = Field(default_factory=dict)


class SetupEvent(_Event):
    """Host and data, as the first worker found them; ``nodes`` are all machines where there are several."""

    event: Literal["setup"] = "setup"
    host: HostFacts
    nodes: tuple[Node, ...] = ()
    data: Card
    data_dir: str


class LossesEvent(_Event):
    """Losses and learning rates of consecutive steps, the first of which is ``first_step``, counted from 1."""

    event: Literal["losses"] = "losses"
    first_step: int
    losses: tuple[float, ...]
    learning_rates: tuple[float, ...]


class SampledEvent(_Event):
    """Counters of another machine than the first, ``sample`` of them before this one."""

    event: Literal["sampled"] = "sampled"
    node: str
    sample: int
    values: dict[str, float]


class ResultEvent(_Event):
    """The training has written its files to ``out_dir``."""

    event: Literal["result"] = "result"
    run: str
    timing: Timing
    out_dir: str
    weights_sha256: str


class ComparedEvent(_Event):
    """A comparison stands in ``reports``, over the runs of ``keys``, whose folders are in ``runs``."""

    event: Literal["comparison"] = "comparison"
    log_schema: Literal[3]
    tracking_uri: str | None
    key: str
    keys: tuple[str, ...]
    reports: str
    runs: str


class EndEvent(_Event):
    """The last event of a log; ``error`` is why the training failed, where it could say so."""

    event: Literal["end"] = "end"
    status: Status
    error: str | None = None


Event = Annotated[
    StartEvent | SetupEvent | LossesEvent | SampledEvent | ResultEvent | ComparedEvent | EndEvent,
    Field(discriminator="event"),
]
_EVENTS: TypeAdapter[Event] = TypeAdapter(Event)


def line_of(event: Event) -> bytes:
    """One line of a log: the event as JSON, with a CRC-32 of all that stands before it as the last key."""
    text = event.model_dump_json().encode()[:-1]
    return text + b',"crc32":"%08x"}\n' % zlib.crc32(text)


def parse_event(line: bytes, log: Path) -> Event:
    """The event of a line. Raises UserError: it is damaged, or another version of samebits wrote it."""
    text, _, crc32 = line.rpartition(b',"crc32":')
    try:
        if crc32 != b'"%08x"}\n' % zlib.crc32(text):
            raise UserError(
                f"{log}: a damaged line, or another version's",
                hint="move it away; its run stays as far as it was delivered",
            )
        return _EVENTS.validate_json(text + b"}")
    except ValidationError as error:
        what = first_line(error.errors(include_url=False)[0]["msg"])
        hint = "deliver it with the version of samebits that wrote it, or delete it"
        raise UserError(f"{log}: an event that this version cannot read: {what}", hint=hint) from None


def all_logs(but: Container[Path] = ()) -> list[Path]:
    """The logs of this repository that this user may read, by name; a folder or a pipe of such a name is none."""
    found = (path for path in sorted(LOGS.glob("*.jsonl")) if path not in but)
    return [path for path in found if path.is_file() and os.access(path, os.R_OK)]


def start_of(log: Path) -> StartEvent | ComparedEvent | None:
    """The event that a log begins with; None if it is not written yet, is damaged or another version's, or is gone."""
    with suppress(UserError, FileNotFoundError):
        with log.open("rb") as stream:
            line = stream.readline()
        event = parse_event(line, log) if line.endswith(b"\n") else None
        return event if isinstance(event, StartEvent | ComparedEvent) else None
    return None


def store_in_use() -> str | None:
    """MLFLOW_TRACKING_URI without a password, for which a log is no place; None if it is not set."""
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    return without_password(uri) if uri else None


def new_key(name: str) -> str:
    """A name for one run that no other run has."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return f"{stamp}-{name}-{secrets.token_hex(3)}"


class RunLog:
    """Appends events to a log; a process that inherits it over a fork may append too.

    What the disk does not take, full as it may be, is kept and tried again with the next event; a training never ends
    for its log.
    """

    def __init__(self, path: Path) -> None:
        make_folder(path.parent)
        remove_unfinished(path.parent)  # a sender may have been killed that had nothing more to write there
        self.path = path
        self._kept = b""
        # Whoever can read it could hold the lock, and have the run go on for ever.
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, private_mode(path.parent))
        fcntl.flock(self._fd, fcntl.LOCK_EX)  # held until the last process that has it ends

    def append(self, event: Event) -> None:
        """Append one event; each line is one write, so that lines of several processes do not mix."""
        complained, self._kept = bool(self._kept), self._kept + line_of(event)
        try:
            self._write()
        except OSError as error:
            if not complained:
                sys.stderr.write(f"{self.path}: the training goes on without its log for now: {error.strerror}\n")

    def flush(self, seconds: float = FLUSH_SECONDS) -> None:
        """Write what was kept; before a fork, or else both processes would. Raises OSError: it cannot be written."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                self._write()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            else:
                return

    def _write(self) -> None:
        if not self._kept:
            return
        size = os.fstat(self._fd).st_size
        if os.write(self._fd, self._kept) < len(self._kept):
            os.ftruncate(self._fd, size)  # another process may be the next to append
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._kept = b""

    def losses(self, first_step: int, losses: Sequence[float], learning_rates: Sequence[float]) -> None:
        """Append the losses of consecutive steps."""
        self.append(LossesEvent(first_step=first_step, losses=tuple(losses), learning_rates=tuple(learning_rates)))

    def close(self) -> None:
        """Let go of the log in this process, and of what the disk has not taken by then."""
        with suppress(OSError):
            self.flush()
        os.close(self._fd)


def writer_gone(log: Path) -> bool:
    """Whether no process has the log open for writing any more, or nobody finds it, since it was moved away."""
    try:
        with log.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        pass
    return True
