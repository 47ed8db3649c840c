"""The local log of a run: JSON lines that a sender delivers to MLflow during the training.

The training itself writes to this file alone, so that a slow or absent server never delays it. A lock on the file shows
that its writer is alive.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import secrets
import sys
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from samebits.errors import HostError, UserError, first_line, without_password
from samebits.files import Part, make_folder, private_mode, remove_unfinished
from samebits.host import HostFacts
from samebits.params import Params
from samebits.params.schema import NumericsName
from samebits.records.card import Card
from samebits.records.provenance import NoGit, run_git
from samebits.records.run import Node, Timing
from samebits.strategies import StrategyName
from samebits.strategies.placement import Placement

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

Status = Literal["FINISHED", "FAILED", "KILLED"]

LOGS = Path(".samebits/runs")
SCHEMA: Literal[3] = 3
"""Schema of the events, named in the first event of a log."""


def now_ms() -> int:
    """Milliseconds since 1970, as in MLflow."""
    return time.time_ns() // 1_000_000


class _Event(Part):
    model_config = ConfigDict(allow_inf_nan=True, ser_json_inf_nan="constants")  # a loss may be infinite or NaN

    time_ms: int = Field(default_factory=now_ms)


class StartEvent(_Event):
    """The start of a training. ``tracking_uri`` is the store in use, None for the repository's own."""

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
    """Host and data as seen by the first worker. ``nodes`` are all machines, if there are several."""

    event: Literal["setup"] = "setup"
    host: HostFacts
    nodes: tuple[Node, ...] = ()
    data: Card
    data_dir: str


class LossesEvent(_Event):
    """Losses and learning rates of consecutive steps from ``first_step``, counted from 1."""

    event: Literal["losses"] = "losses"
    first_step: int
    losses: tuple[float, ...]
    learning_rates: tuple[float, ...]


class SampledEvent(_Event):
    """Counters of a machine other than the first. ``sample`` is the number of earlier samples."""

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
    """A comparison of the runs with these ``keys``. Its report is in ``reports``, the runs' folders are in ``runs``."""

    event: Literal["comparison"] = "comparison"
    log_schema: Literal[3]
    tracking_uri: str | None
    key: str
    keys: tuple[str, ...]
    reports: str
    runs: str


class EndEvent(_Event):
    """The last event of a log. ``error`` is the message of a failed training, if it had one."""

    event: Literal["end"] = "end"
    status: Status
    error: str | None = None


Event = Annotated[
    StartEvent | SetupEvent | LossesEvent | SampledEvent | ResultEvent | ComparedEvent | EndEvent,
    Field(discriminator="event"),
]
_EVENTS: TypeAdapter[Event] = TypeAdapter(Event)


def line_of(event: Event) -> bytes:
    """One line of a log: the event as JSON. Its last key is the CRC-32 of all text before that key."""
    text = event.model_dump_json().encode()[:-1]
    return text + b',"crc32":"%08x"}\n' % zlib.crc32(text)


def parse_event(line: bytes, log: Path) -> Event:
    """The event of a line. Raises UserError: the line is damaged, or another version of samebits wrote it."""
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


def all_logs(but: Container[str] = ()) -> list[Path]:
    """The logs of this repository that this user may read, sorted by name, but for those that git has brought.

    Only regular files count. Names are left out by text, since there may be very many.

    Raises HostError: the file system does not list their folder.
    """
    brought = _brought(Path.cwd())
    if brought is None:
        return []
    try:
        listed = os.listdir(LOGS)  # noqa: PTH208 - a path for each would take longer than all else
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # no folder yet, or another user's
        return []
    except OSError as error:
        hint = "look at the file system; `samebits track sync` delivers the logs then"
        raise HostError(f"{LOGS}: cannot be listed: {error.strerror}", hint=hint) from None
    names = [name for name in listed if name.endswith(".jsonl") and name not in but]
    found = (LOGS / name for name in sorted(names) if name not in brought)
    return [path for path in found if path.is_file() and not path.is_symlink() and os.access(path, os.R_OK)]


@functools.cache
def _brought(root: Path) -> frozenset[str] | None:
    """Names of files among the logs that git tracks: another's, who says where they are to be delivered.

    None if git tracks the logs' folder itself: a link, whose logs lie elsewhere.
    """
    with suppress(NoGit):
        listed = run_git("-C", str(root), "ls-files", "-z", "--", str(LOGS.parent)).split(b"\0")
        paths = {Path(os.fsdecode(name)) for name in listed if name}
        return None if {LOGS, LOGS.parent} & paths else frozenset(path.name for path in paths if path.parent == LOGS)
    return frozenset()


def count_hidden_logs() -> int:
    """How many logs of this repository this user may not read."""
    return sum(path.is_file() and not os.access(path, os.R_OK) for path in LOGS.glob("*.jsonl"))


def start_of(log: Path) -> StartEvent | ComparedEvent | None:
    """The first event of a log; None if it is not written yet, damaged, of another version, or gone."""
    with suppress(UserError, FileNotFoundError):
        with log.open("rb") as stream:
            line = stream.readline()
        event = parse_event(line, log)
        return event if isinstance(event, StartEvent | ComparedEvent) else None
    return None


def store_in_use() -> str | None:
    """MLFLOW_TRACKING_URI for a log, without its password; None if it is not set."""
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    return without_password(uri) if uri else None


def new_key(name: str) -> str:
    """A unique key for a run, from the time, a name and random digits."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return f"{stamp}-{name}-{secrets.token_hex(3)}"


class RunLog:
    """Appends events to a log. A forked process may append too.

    Events that a full disk does not take are kept and written with the next event, so that a training never ends
    because of its log.
    """

    def __init__(self, path: Path) -> None:
        make_folder(path.parent)
        remove_unfinished(path.parent)  # of senders that were killed
        self.path = path
        self._kept = b""
        # A process that can read the file could hold the lock, and the run would never end.
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, private_mode(path.parent))
        fcntl.flock(self._fd, fcntl.LOCK_EX)  # until the last process with this descriptor ends

    def append(self, event: Event) -> None:
        """Append one event in a single write, so that lines of several processes do not mix."""
        complained, self._kept = bool(self._kept), self._kept + line_of(event)
        try:
            self._write()
        except OSError as error:
            if not complained:
                sys.stderr.write(f"{self.path}: the training goes on without its log for now: {error.strerror}\n")

    def flush(self, seconds: float = 3.0) -> None:
        """Write kept events, also before a fork, since both processes would. Raises OSError: it cannot be written."""
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
            os.ftruncate(self._fd, size)  # another process may append next
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._kept = b""

    def losses(self, first_step: int, losses: Sequence[float], learning_rates: Sequence[float]) -> None:
        """Append the losses of consecutive steps."""
        self.append(LossesEvent(first_step=first_step, losses=tuple(losses), learning_rates=tuple(learning_rates)))

    def close(self) -> None:
        """Close the log in this process. Events that still cannot be written are lost."""
        with suppress(OSError):
            self.flush()
        os.close(self._fd)


def writer_gone(log: Path) -> bool:
    """Whether no process has the log open for writing any more, or the log was moved away."""
    try:
        with log.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        pass
    return True
