"""One rank in its process: its progress, its failures, and how both reach the launcher."""

from __future__ import annotations

import faulthandler
import gc
import mmap
import os
import signal
import sys
import time
import traceback
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, get_args

from samebits.errors import CollectiveError, Interrupted, RefusedError, SamebitsError, WorkerError, from_exit_code
from samebits.files import Part
from samebits.host import hide_gpus
from samebits.records.progress import tell
from samebits.training.diagnosis import explain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import nn

    from samebits.strategies.placement import Placement
    from samebits.training.worker import Worker

Phase = Literal["starting", "working", "preparing", "building", "training", "measuring", "recording", "done"]
_PHASES: tuple[Phase, ...] = get_args(Phase)
_WHERE: dict[Phase, str] = {
    "starting": " while it started",
    "working": " while it worked",
    "preparing": " while it prepared",
    "building": " while it built the model",
    "measuring": " in the timed slices",
    "recording": " while it wrote its files",
    "done": " after its work",
}
STACK_SIGNAL = signal.SIGUSR2
"""Makes a worker write the stacks of its threads."""


class Position(NamedTuple):
    """The phase of a rank; ``step`` is its step of the training, from 1."""

    phase: Phase
    step: int

    @property
    def text(self) -> str:
        """The end of a sentence that says what happened to the rank."""
        return f" at step {self.step}" if self.phase == "training" else _WHERE[self.phase]


class Failure(Part):
    """The error that ended a rank, at a ``time`` in seconds since 1970.

    ``waited``: the rank waited in vain for others. ``refused``: why ``exact`` refuses the model, the path in the model,
    and the module's class.
    """

    time: float
    message: str
    hint: str
    exit_code: int
    waited: bool
    refused: tuple[str, str, str] | None
    traceback: str

    def error(self) -> SamebitsError:
        """The error that the launcher raises."""
        error = from_exit_code(self.exit_code, self.message, self.hint)
        assert isinstance(error, SamebitsError), "a worker that a signal ended reports nothing"
        if self.waited:
            error = CollectiveError(self.message, hint=self.hint)
        if self.refused:
            why, at, kind = self.refused
            error = RefusedError(why, hint=self.hint, at=at, kind=kind)
        error.traceback = self.traceback
        return error


class Reporter:
    """A worker's side of its reports to the launcher: shared memory, and files in the launch's ``folder``."""

    def __init__(self, folder: Path, memory: memoryview, rank: int) -> None:
        self._folder, self._memory, self._rank = folder, memory, rank

    def at(self, phase: Phase, step: int = 0) -> None:
        """Write this rank's phase and step to the shared memory."""
        self._memory[0], self._memory[1] = _PHASES.index(phase), step
        if not step:
            tell("ending" if phase == "done" else phase)

    def done(self) -> None:
        """Say that all work is done. An exit code of 0 does not prove it: the model's code may end the process."""
        self.at("done")

    def failure(self, error: SamebitsError) -> None:
        """Write an error for the launcher, as plain data. A refusal names the user's line that met it."""
        if isinstance(error, RefusedError):
            error = error.with_line()
        failure = Failure(
            time=time.time(),
            message=error.message,
            hint=error.hint,
            exit_code=error.exit_code,
            waited=isinstance(error, CollectiveError),
            refused=(error.why, error.at, error.kind) if isinstance(error, RefusedError) else None,
            traceback=traceback.format_exc(),
        )
        unfinished = self._folder / f"rank{self._rank}.unfinished"
        try:
            unfinished.write_text(failure.model_dump_json(), encoding="utf-8")
            unfinished.rename(self._folder / f"rank{self._rank}.json")
        except OSError as problem:  # the launcher then knows that this rank failed, but not why
            sys.stderr.write(f"rank {self._rank}: {error}\nrank {self._rank}: {self._folder}: {problem.strerror}\n")

    def show_stacks(self) -> None:
        """Write the stacks of all threads on ``STACK_SIGNAL`` from now on, also of threads that wait in C."""
        with suppress(OSError):  # no reason to end a training
            stream = (self._folder / f"rank{self._rank}.stack").open("w", encoding="utf-8")
            faulthandler.register(STACK_SIGNAL, file=stream)


class Reports:
    """The launcher's side of its workers' reports. ``folder`` must be empty at first."""

    def __init__(self, folder: Path, workers: int) -> None:
        self._folder = folder
        memory = memoryview(mmap.mmap(-1, 16 * workers)).cast("q")  # a fork shares it
        self._memories = [memory[2 * rank : 2 * rank + 2] for rank in range(workers)]

    def of(self, rank: int) -> Reporter:
        """The reporter for the worker of a rank."""
        return Reporter(self._folder, self._memories[rank], rank)

    def position(self, rank: int) -> Position:
        """The phase and step that a rank reported last."""
        phase, step = self._memories[rank]
        return Position(_PHASES[phase], step)

    def done(self, rank: int) -> bool:
        """Whether a rank has reported that all its work is done."""
        return self.position(rank).phase == "done"

    def failed(self) -> dict[int, SamebitsError]:
        """The errors that workers reported, by rank, in the order of their times."""
        failures = {
            rank: Failure.model_validate_json(path.read_bytes())
            for rank in range(len(self._memories))
            if (path := self._folder / f"rank{rank}.json").exists()
        }
        return {rank: failure.error() for rank, failure in sorted(failures.items(), key=lambda item: item[1].time)}

    def has_stack(self, rank: int) -> bool:
        """Whether a worker has begun to write its stacks."""
        path = self._stack(rank)
        return path.exists() and path.stat().st_size > 0

    def _stack(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.stack"

    def stacks(self) -> str:
        """The stacks that all workers have written."""
        paths = map(self._stack, range(len(self._memories)))
        return "\n".join(f"{path.stem}:\n{path.read_text(encoding='utf-8')}" for path in paths if path.exists())


class Rank(Protocol):
    """What one worker process does; ``model`` is None until it is built."""

    worker: Worker
    model: nn.Module | None

    def run(self) -> None:
        """Do this rank's work."""


def run_rank(make: Callable[[], Rank], placement: Placement, reporter: Reporter) -> None:
    """Run one rank. A failure is reported, and the process ends with its exit code."""
    rank: Rank | None = None
    with failures_reported(
        reporter, lambda error: explain(error, placement=placement, model=rank.model if rank else None)
    ):
        rank = make()
        rank.run()
        # Free the wrapper before the process group. The wrapper's destructor holds Python's lock: a group that it
        # frees would wait for ever for its own threads, which need the lock.
        gc.collect()
        rank.worker.close()


def run_trial(make: Callable[[], Rank], placement: Placement, reporter: Reporter, *, seconds: int) -> None:
    """As ``run_rank``, for a trial: the model's output goes to stderr, and the trial ends after ``seconds``."""
    os.dup2(2, 1)
    if placement.device_type == "cpu":
        hide_gpus()
    signal.alarm(seconds)  # ends a model that never returns
    run_rank(make, placement, reporter)


@contextmanager
def failures_reported(reporter: Reporter, explained: Callable[[BaseException], SamebitsError]) -> Iterator[None]:
    """Report any failure in the block, as ``explained`` words it, and end the process with its exit code."""
    try:
        yield
    except Interrupted as error:
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - the launcher must learn of any failure, even a SystemExit
        failure = error if isinstance(error, SamebitsError) else explained(error)
        reporter.failure(failure)
        if isinstance(failure, WorkerError):
            time.sleep(1)  # if this rank only waited for another, the launcher sees the other's failure first
        raise SystemExit(failure.exit_code) from None
