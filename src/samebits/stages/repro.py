"""The pipeline by DVC, with one line for each stage, and the answers at the end. DVC's own lines go to a log."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.live import Live
from rich.text import Text

from samebits.errors import printable
from samebits.files import Part, write_text
from samebits.here import stage_command
from samebits.params import load_params
from samebits.records.progress import VARIABLE, Doing, read
from samebits.results.comparison import Comparison
from samebits.results.figures import wall_time
from samebits.results.lines import WIDTHS, cut
from samebits.results.terminal import show
from samebits.stages.pipeline import STAGES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from samebits.params import Params

FOLDER = Path(".samebits")
LOG = FOLDER / "repro.log"
SECONDS = FOLDER / "stage_seconds.json"
"""How long each stage took when it last ran."""

_RUNNING = re.compile(r"Running stage '(?:.*:)?(.+)':")
_SKIPPED = re.compile(r"Stage '(?:.*:)?(.+)' (?:didn't change, skipping|is cached - skipping run)")
_OF_DVC = re.compile(
    r"> .*|(Updating|Generating) lock file .*|To track the changes with git, run:|\s+git add .*"
    r"|To enable auto staging, run:|\s+dvc config .*|Use `dvc push` .*|Data and pipelines are up to date\.|\s*"
)
_SAID = re.compile(r"(error|warning|ERROR|on the host|in the image)\b")
"""Lines of a stage that a reader needs at once. The others are in the log, and on the page."""


def count_stages(params: Params) -> int:
    """How many stages DVC runs: one for each training, and the others."""
    return len(STAGES) - 1 + len(params.train.numerics) * len(params.train.strategies)


def reproduce(folder: Path, options: Sequence[str] = (), console: Console | None = None) -> tuple[int, float]:
    """Run the pipeline in ``folder``; return DVC's exit code, and the seconds that it took.

    Raises:
        UserError: params.yaml is wrong.
    """
    shown = Shown(count_stages(load_params(folder / "params.yaml")), console or Console(highlight=False))
    FOLDER.mkdir(exist_ok=True)
    progress = (FOLDER / "progress.json").resolve()
    progress.unlink(missing_ok=True)
    environ = {**os.environ, VARIABLE: str(progress), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-P", "-m", "dvc", "repro", *options, str(folder / "dvc.yaml")]
    began = time.monotonic()
    with LOG.open("w", encoding="utf-8", buffering=1) as log, _started(command, environ) as process, shown:
        for line in _lines(process):
            if line is None:
                shown.look(read(progress))
                continue
            log.write(f"{line}\n")
            if _RUNNING.fullmatch(line):
                progress.unlink(missing_ok=True)  # of the stage before
            shown.take(line)
    code = process.returncode
    shown.finish(failed=code != 0)
    return (128 - code if code < 0 else code), time.monotonic() - began


def answer(folder: Path, options: Sequence[str] = ()) -> int:
    """Run the pipeline in ``folder`` and print the answers; return DVC's exit code."""
    code, seconds = reproduce(folder, options)
    if code == 0:
        found = Comparison.read(folder / "reports/comparison.json", made_by=stage_command("compare"))
        show(found, folder / "reports", seconds=seconds)
    return code


@contextmanager
def _started(command: list[str], environ: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """DVC's process, and its end after the block. It is in this process group, so that Ctrl-C reaches it too.

    This process waits for it then: the stage ends by itself, and says why. SIGTERM is passed on.
    """
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:

        def react(number: int, _: object) -> None:
            if number == signal.SIGTERM:
                process.send_signal(number)  # nothing if it has ended

        before = {one: signal.signal(one, react) for one in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield process
            process.wait()
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)


def _lines(process: subprocess.Popen[bytes]) -> Iterator[str | None]:
    """The lines that a process writes, and None a few times a second while it writes none."""
    assert process.stdout
    left = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            if not selector.select(timeout=0.2):
                yield None
                continue
            some = os.read(process.stdout.fileno(), 65536)
            *lines, left = (left + some).split(b"\n")
            if not some:
                lines = [left] if left else []
            yield from (line.decode(errors="replace") for line in lines)
            if not some:
                return


class Stage(NamedTuple):
    """The stage that runs: how many there were with it, its name, and when it began."""

    number: int
    name: str
    began: float


class Shown:
    """One line for each stage: a live one while it runs, on a terminal, and one that stays when it has ended."""

    def __init__(self, stages: int, console: Console) -> None:
        self._stages, self._console = stages, console
        self._live = Live(console=console, transient=True, auto_refresh=False) if console.is_terminal else None
        self._now: Stage | None = None
        self._lines: list[str] = []
        self._doing: tuple[Doing, float, int] | None = None  # since when, and how many were done then
        self._seen = self._unchanged = 0
        self._known = Known.read()

    def __enter__(self) -> None:
        if self._live:
            self._live.start()

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.update(Text())
            self._live.stop()

    def take(self, line: str) -> None:
        """A line that DVC or a stage wrote."""
        if running := _RUNNING.fullmatch(line):
            self._end()
            name = running[1]
            self._seen += 1
            self._now, self._lines, self._doing = Stage(self._seen, name, time.monotonic()), [], None
            self.look(None)
        elif _SKIPPED.fullmatch(line):
            self._end()
            self._seen += 1
            self._unchanged += 1
        elif not _OF_DVC.fullmatch(line):
            self._lines.append(line)
            if _SAID.match(line):
                self._say(printable(line))

    def look(self, doing: Doing | None) -> None:
        """Show what the stage is doing."""
        if self._now is None or self._live is None:
            return
        now = time.monotonic()
        if doing and (self._doing is None or doing.what != self._doing[0].what):
            self._doing = (doing, now, doing.done)
        elif doing and self._doing:
            self._doing = (doing, *self._doing[1:])
        self._live.update(Text(self._told(now), overflow="ellipsis", no_wrap=True), refresh=True)

    def _told(self, now: float) -> str:
        """``3/10 ddp-fast: timing slices 2 of 4, about 12 s left``."""
        assert self._now
        number, name, began = self._now
        what = "starting"
        left = self._known.of(name, now - began)
        if self._doing:
            doing, since, first = self._doing
            what = f"{doing.what} {doing.done} of {doing.of}" if doing.of else doing.what
            if left is None and doing.done > first:
                left = (now - since) / (doing.done - first) * (doing.of - doing.done)
        about = f", about {wall_time(max(1.0, left))} left" if left is not None else ""
        return f"{self._place(number)} {_short(name)}: {what}{about}"

    def _place(self, number: int) -> str:
        return f"{number:>{len(str(self._stages))}}/{self._stages}"

    def _end(self) -> None:
        """The line of the stage that has ended."""
        if self._now is None:
            return
        number, name, began = self._now
        seconds = time.monotonic() - began
        self._known.keep(name, seconds)
        first = next((line for line in self._lines if not _SAID.match(line)), "")
        told = first.partition(": ")[2] if name.startswith("train@") else first if name == "prepare" else ""
        line = printable(f"{self._place(number)} {_short(name):<13}{wall_time(seconds):>7}  {told}".rstrip())
        width = self._console.width if self._console.is_terminal else WIDTHS[1]
        self._say(cut(line, width))
        self._now = None

    def finish(self, *, failed: bool) -> None:
        """After the last line: how many stages had nothing to do, or what the failed one wrote."""
        if failed:
            for line in self._lines:
                if not _SAID.match(line):
                    self._say(printable(line))
            self._say(f"All that was written: {LOG}")
            return
        self._end()
        if self._unchanged:
            self._say(f"{self._unchanged} of {self._stages} stages did not change")
        self._known.write()

    def _say(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)


def _short(name: str) -> str:
    return name.removeprefix("train@")


class Known(Part):
    """Seconds that each stage took when it last ran here."""

    seconds: dict[str, float]

    @classmethod
    def read(cls) -> Known:
        """What is known; nothing if the file is missing or wrong."""
        try:
            return cls.model_validate(json.loads(SECONDS.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return cls(seconds={})

    def of(self, name: str, spent: float) -> float | None:
        """Seconds that a stage will still take; None if that is not known, or if it takes longer than it did."""
        last = self.seconds.get(name)
        return last - spent if last is not None and last > spent else None

    def keep(self, name: str, seconds: float) -> None:
        """Note how long a stage took."""
        self.seconds[name] = round(seconds, 1)

    def write(self) -> None:
        """Write what is known."""
        with suppress(OSError):
            write_text(SECONDS, self.model_dump_json())
