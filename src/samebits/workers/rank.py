"""One rank in its process: where it is, how it runs and fails, and what the launcher learns of that."""

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
"""Has a worker write where each of its threads is."""


class Position(NamedTuple):
    """Where a rank is; ``step``, from 1, is of the training."""

    phase: Phase
    step: int

    @property
    def text(self) -> str:
        """To follow what happened to the rank."""
        return f" at step {self.step}" if self.phase == "training" else _WHERE[self.phase]


class Failure(Part):
    """What ended a rank, at a ``time`` in seconds since 1970.

    ``waited``: it was left waiting for others; ``refused``: why ``exact`` cannot keep its word for the model, where in
    it that is, and the module's class.
    """

    time: float
    message: str
    hint: str
    exit_code: int
    waited: bool
    refused: tuple[str, str, str] | None
    traceback: str

    def error(self) -> SamebitsError:
        """The error itself, as the launcher raises it."""
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
    """What one worker tells its launcher: in memory that they share, and in files in the launch's ``folder``."""

    def __init__(self, folder: Path, memory: memoryview, rank: int) -> None:
        self._folder, self._memory, self._rank = folder, memory, rank

    def at(self, phase: Phase, step: int = 0) -> None:
        """Say where this rank is, in memory that the launcher sees."""
        self._memory[0], self._memory[1] = _PHASES.index(phase), step

    def done(self) -> None:
        """Say that all work is done: an exit code of 0 alone says nothing, a model's own code may end the process."""
        self.at("done")

    def failure(self, error: SamebitsError) -> None:
        """Leave an error for the launcher, as plain data."""
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
        except OSError as problem:  # then the launcher knows that this rank failed, and not of what
            sys.stderr.write(f"rank {self._rank}: {error}\nrank {self._rank}: {self._folder}: {problem.strerror}\n")

    def show_stacks(self) -> None:
        """From now on a signal has this process write where its threads are, also when they wait in C."""
        with suppress(OSError):  # no reason to end a training
            stream = (self._folder / f"rank{self._rank}.stack").open("w", encoding="utf-8")
            faulthandler.register(STACK_SIGNAL, file=stream)


class Reports:
    """What the launcher knows of the workers of one launch. ``folder`` is theirs, and is empty at first."""

    def __init__(self, folder: Path, workers: int) -> None:
        self._folder = folder
        memory = memoryview(mmap.mmap(-1, 16 * workers)).cast("q")  # a fork shares it
        self._memories = [memory[2 * rank : 2 * rank + 2] for rank in range(workers)]

    def of(self, rank: int) -> Reporter:
        """What the worker of a rank reports by."""
        return Reporter(self._folder, self._memories[rank], rank)

    def position(self, rank: int) -> Position:
        """Where a rank said last that it is."""
        phase, step = self._memories[rank]
        return Position(_PHASES[phase], step)

    def done(self, rank: int) -> bool:
        """Whether a rank has done all its work."""
        return self.position(rank).phase == "done"

    def failed(self) -> dict[int, SamebitsError]:
        """The errors that workers left, by rank, the first of them first."""
        failures = {
            rank: Failure.model_validate_json(path.read_bytes())
            for rank in range(len(self._memories))
            if (path := self._folder / f"rank{rank}.json").exists()
        }
        return {rank: failure.error() for rank, failure in sorted(failures.items(), key=lambda item: item[1].time)}

    def has_stack(self, rank: int) -> bool:
        """Whether a worker has begun to write where it was at the last signal."""
        path = self._stack(rank)
        return path.exists() and path.stat().st_size > 0

    def _stack(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.stack"

    def stacks(self) -> str:
        """Where the threads of all workers were at the last signal."""
        paths = map(self._stack, range(len(self._memories)))
        return "\n".join(f"{path.stem}:\n{path.read_text(encoding='utf-8')}" for path in paths if path.exists())


class Rank(Protocol):
    """What one worker process does; ``model`` is None until it is built."""

    worker: Worker
    model: nn.Module | None

    def run(self) -> None:
        """Work as one rank among the others."""


def run_rank(make: Callable[[], Rank], placement: Placement, reporter: Reporter) -> None:
    """Run one rank; a failure is reported, and the process ends with its exit code."""
    rank: Rank | None = None
    with failures_reported(
        reporter, lambda error: explain(error, placement=placement, model=rank.model if rank else None)
    ):
        rank = make()
        rank.run()
        # The wrapper must be gone before the process group: freed by the wrapper's destructor, which keeps
        # Python's lock, the group would wait for ever for threads of its own that need the lock.
        gc.collect()
        rank.worker.close()


def run_trial(make: Callable[[], Rank], placement: Placement, reporter: Reporter, *, seconds: int) -> None:
    """As ``run_rank``, of a trial: what a model prints is no answer of its command, and it ends after ``seconds``."""
    os.dup2(2, 1)
    if placement.device_type == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what NVML does not show must not be found by PyTorch either
    signal.alarm(seconds)  # ends a model that never comes back
    run_rank(make, placement, reporter)


@contextmanager
def failures_reported(reporter: Reporter, explained: Callable[[BaseException], SamebitsError]) -> Iterator[None]:
    """Report whatever fails in the block, ``explained``, and end the process with its exit code."""
    try:
        yield
    except Interrupted as error:
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever it is, a SystemExit too, the launcher must learn of it
        failure = error if isinstance(error, SamebitsError) else explained(error)
        reporter.failure(failure)
        if isinstance(failure, WorkerError):
            time.sleep(1)  # a rank that failed for want of another lets the launcher see that one first
        raise SystemExit(failure.exit_code) from None
