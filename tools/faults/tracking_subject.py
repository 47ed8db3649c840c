"""Tracked trainings and their local logs."""

from __future__ import annotations

import fcntl
import itertools
import json
import shutil
import subprocess
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

from faults.mlflow_server import Server
from faults.mlflow_store import Store, Totals, check_logs, empty_store, events_of, status_of
from faults.subject import (
    PARAMS,
    SENDER,
    Child,
    Sandbox,
    check_end,
    command_of,
    end_marked,
    expect,
    kill,
    marked,
    training,
)
from patience import patient
from samebits.records.log import LOGS, ResultEvent, RunLog, StartEvent
from samebits.records.run import RECORD, Run, RunRecord, read_run
from slowed import slow_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path


EPOCHS = 16  # 256 steps: the log grows several times within some seconds
SLOW_EPOCHS = 64
TRAINING_LIMIT = 90.0
DELIVERY_LIMIT = 90.0
SLOWER_AT_MOST = 6.0  # ratio: a sender and a server start beside the training


@dataclass(frozen=True)
class Tracked:
    """A training that was started."""

    child: Child
    arguments: tuple[str, ...]
    out: Path
    began: float


class Subject:
    """A sandbox whose trainings are tracked by one store.

    ``harm`` is what happens to the store. None if trainings are disturbed themselves, so that their times mean nothing.
    """

    def __init__(self, folder: Path, shared: Shared, uri: str, harm: str | None) -> None:
        self.box, self._shared, self.uri, self._harm = shared.sandbox(folder), shared, uri, harm
        self.box.mark = f"{folder.parent.parent.name}-{folder.name}"
        self._trainings: list[Tracked] = []

    def start(self, arguments: tuple[str, ...], environ: Mapping[str, str] = MappingProxyType({})) -> Child:
        """Start a training with an output folder of its own."""
        self._shared.untracked(arguments)  # first, so that the two do not run side by side
        out = self.box.folder / f"runs/{len(self._trainings)}"
        places = ("--data-dir", str(self._shared.data), "--out-dir", str(out))
        environ = {"MLFLOW_TRACKING_URI": self.uri, **environ}
        child = self.box.start("train", *arguments, *places, environ=environ)
        self._trainings.append(Tracked(child, arguments, out, time.monotonic()))
        return child

    def finish(self, child: Child) -> None:
        """Wait for an undisturbed training. Raises Broken if tracking held it up."""
        child.wait(TRAINING_LIMIT)
        (tracked,) = (one for one in self._trainings if one.child is child)
        spent = time.monotonic() - tracked.began
        check_end(child, {0})
        alone = self._shared.untracked(tracked.arguments).seconds
        if self._harm is not None:
            self._shared.totals.times_as_long.setdefault(self._harm, []).append(spent / alone)
        expect(spent < SLOWER_AT_MOST * alone + patient(10), f"a training of {alone:.1f} s took {spent:.1f} s")

    def logs(self) -> list[Path]:
        """Logs of the trainings by name."""
        return sorted((self.box.folder / LOGS).glob("*.jsonl"))

    def senders(self) -> list[int]:
        """Process ids of living senders."""
        return [pid for pid in marked(self.box.mark) if SENDER in command_of(pid)]

    def wait_for_delivery(self, seconds: float = DELIVERY_LIMIT) -> None:
        """Wait until all is delivered, no sender lives, or so many seconds have passed."""
        deadline = time.monotonic() + patient(seconds)
        while time.monotonic() < deadline and self.senders():
            states = [log.with_suffix(".state.json") for log in self.logs()]
            with suppress(OSError, ValueError):
                if all(json.loads(state.read_text(encoding="utf-8"))["ended"] for state in states):
                    return
            time.sleep(0.05)

    def sync(self, codes: Sequence[int] = (0,), uri: str | None = None) -> Child:
        """Run ``samebits track sync``."""
        store = {"MLFLOW_TRACKING_URI": uri or self.uri}
        child = self.box("samebits", "track", "sync", environ=store, seconds=DELIVERY_LIMIT)
        check_end(child, set(codes))
        return child

    def check(self, store: Store) -> None:
        """Raise Broken unless the store has every training, and those that ended well have the untracked bits."""
        expect(len(self.logs()) > 0, "no training has a log")
        ended = {}
        for tracked in (one for one in self._trainings if one.child.code == 0):
            run, untracked = read_run(tracked.out), self._shared.untracked(tracked.arguments).run
            ended[run.record.run] = tracked.out
            expect(run.record.weights_sha256 == untracked.record.weights_sha256, "other weights", tracked)
            expect(run.losses == untracked.losses, "other losses than untracked", tracked)
        expect(len(ended) == sum(one.child.code == 0 for one in self._trainings), "two trainings have one key")
        for log in self.logs():
            expect(log.stem not in ended or status_of(log) == "FINISHED", "a log without its end", log.name)
        check_logs(store, self.box.folder, ended, self._shared.totals)
        expect(self.box.leftovers() == [], "leftovers", self.box.leftovers())

    def end(self) -> None:
        """Kill all processes."""
        for tracked in self._trainings:
            if tracked.child.poll() is None:
                tracked.child.kill_tree()
        end_marked(self.box.mark)


@dataclass(frozen=True)
class Untracked:
    """Result and seconds of a training without tracking."""

    run: Run
    seconds: float


class Shared:
    """Data, untracked results, an empty store and a server, which all cases share.

    With ``slow`` the model can be slowed down. ``totals`` are those of another instance.
    """

    def __init__(self, folder: Path, *, slow: bool = False, totals: Totals | None = None) -> None:
        self._folder, self.mark, self._slow = folder, folder.parent.name, slow
        self.totals = totals or Totals()
        self._untracked: dict[tuple[str, ...], Untracked] = {}

    def sandbox(self, folder: Path) -> Sandbox:
        """A sandbox with parameters, and with the slow model if it is used."""
        box = Sandbox(folder)
        params = {**PARAMS, "train": {**PARAMS["train"], "epochs": SLOW_EPOCHS if self._slow else EPOCHS}}
        if self._slow:
            params["model"] = slow_model(box.folder, features=PARAMS["data"]["kwargs"]["features"])
        box.write_params(params)
        return box

    @cached_property
    def _box(self) -> Sandbox:
        box = self.sandbox(self._folder / "shared")
        check_end(box("prepare"), {0})
        return box

    def untracked(self, arguments: tuple[str, ...]) -> Untracked:
        """The untracked training with these arguments. It runs at the first use."""
        if arguments not in self._untracked:
            out = self._box.folder / f"runs/{len(self._untracked)}"
            seconds = []
            for _ in range(2):  # the first one warms caches
                started = time.monotonic()
                check_end(self._box("train", *arguments, "--no-tracking", "--out-dir", str(out), seconds=120), {0})
                seconds.append(time.monotonic() - started)
            self._untracked[arguments] = Untracked(read_run(out), min(seconds))
        return self._untracked[arguments]

    @property
    def data(self) -> Path:
        """Data of every training."""
        return self._box.folder / "data"

    @cached_property
    def empty_store(self) -> Path:
        """An empty SQLite store."""
        return empty_store(self._folder)

    @cached_property
    def server(self) -> Server:
        """The running server."""
        shutil.copy(self.empty_store, self._folder / "server.db")
        server = Server(self._folder, self._folder / "server.db", self.mark)
        server.start()
        server.wait()
        return server

    @property
    def store(self) -> Store:
        """The server's store."""
        return Store(self._folder / "server.db", self.server.artifacts)

    def running(self) -> int:
        """Number of runs with status RUNNING in the server's store."""
        return self.store.running() if "server" in self.__dict__ else 0

    @cached_property
    def pattern(self) -> Pattern:
        """A short training whose log was not delivered."""
        box = Sandbox(self._folder / "pattern", PARAMS)
        box.mark = f"{self.mark}-pattern"
        arguments = (*training("ddp", 2, "exact"), "--data-dir", str(self.data))
        check_end(box("train", *arguments, environ={"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}), {0})
        kill(marked(box.mark))
        (log,) = (box.folder / LOGS).glob("*.jsonl")
        return Pattern(log, box.folder / "runs/ddp-exact")

    def end(self) -> None:
        """Kill the server if it was started."""
        if "server" in self.__dict__:
            self.server.kill()


@contextmanager
def small_disk(folder: Path, kibibytes: int) -> Iterator[Callable[[int], None]]:
    """A file system of so many KiB at ``folder``. Yields a function that resizes it."""
    folder.mkdir(parents=True, exist_ok=True)
    _mount("mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", str(folder))
    try:
        yield lambda size: _mount("mount", "-o", f"remount,size={size}k", str(folder))
    finally:
        _mount("umount", "-l", str(folder))


def _mount(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def can_mount(folder: Path) -> bool:
    """Whether this process may mount a file system."""
    try:
        with small_disk(folder, 64):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


class Trainings:
    """Trainings of one subject, one after another until ``finish``."""

    def __init__(self, subject: Subject, arguments: Iterable[tuple[str, ...]]) -> None:
        self._subject, self._arguments = subject, itertools.cycle(arguments)
        self._current = subject.start(next(self._arguments))

    def until(self, happened: Callable[[], bool], seconds: float = 120) -> None:
        """Train until ``happened`` is true."""
        deadline = time.monotonic() + seconds
        while not happened():
            expect(time.monotonic() < deadline, f"what was waited for did not happen within {seconds:g} s")
            if self._current.poll() is not None:
                self.finish()
                self._current = self._subject.start(next(self._arguments))
            time.sleep(0.02)

    def go_on(self, seconds: float) -> None:
        """Train for so many seconds."""
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > end)

    def finish(self) -> None:
        """Wait for the last training."""
        self._subject.finish(self._current)


@dataclass(frozen=True)
class Tear:
    """A log whose first delivery sees ``at`` bytes. ``state`` is the length to which its state file is then cut."""

    key: str
    text: bytes
    at: int
    state: int | None
    completed: bool

    def __str__(self) -> str:
        state = "" if self.state is None else f", its state after {self.state}"
        return f"log torn after {self.at} bytes{state}, {'then completed' if self.completed else 'for good'}"


def deliver_torn(tears: Sequence[Tear]) -> None:
    """Deliver the torn logs while a writer locks them. Then tear their states and write the rest of the logs."""
    from samebits.tracking.delivery import deliver

    for tear in tears:
        log = LOGS / f"{tear.key}.jsonl"
        with log.open("ab", buffering=0) as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            stream.write(tear.text[: tear.at])
            deliver(log)
            state = log.with_suffix(".state.json")
            if tear.state is not None and state.exists():
                state.write_bytes(state.read_bytes()[: tear.state])
            if tear.completed:
                stream.write(tear.text[tear.at :])


@dataclass(frozen=True)
class Pattern:
    """A tracked training that is copied."""

    log: Path
    out: Path

    def copy(self, key: str, out: Path, uri: str) -> bytes:
        """Log of a copy with another key and address. The copy's files go to ``out``."""
        shutil.copytree(self.out, out)
        record = RunRecord.read(out / RECORD, made_by="train")
        record.model_copy(update={"run": key}).write(out / RECORD)
        log = RunLog(self.log.with_name(f"{key}.copy"))
        for event in events_of(self.log):
            if isinstance(event, StartEvent):
                event = event.model_copy(update={"run": key, "tracking_uri": uri})
            elif isinstance(event, ResultEvent):
                event = event.model_copy(update={"run": key, "out_dir": str(out)})
            log.append(event)
        log.close()
        text = log.path.read_bytes()
        log.path.unlink()
        return text


def expect_one_line(child: Child) -> None:
    """Raise Broken unless the last line of a failed command begins with ``error:``."""
    if child.code:
        last = child.err().splitlines()[-1:]
        expect(last != [] and last[0].startswith("error: "), "no line that says what is wrong", child.printed())
