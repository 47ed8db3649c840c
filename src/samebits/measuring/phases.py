"""The profiling pass: it divides the time of a step into phases, in steps that no speed-up is computed from.

Several kinds of steps take turns: unchanged (plain), with notes of their phases (noted), and without communication on
all devices at once (alone). A backward pass that takes longer than alone communicates or waits. The time that each rank
computes alone shows which rank waits for which, although all end together. A single device also takes turns with half
the batch, which shows the part of a step's cost that does not depend on the batch.
"""

from __future__ import annotations

import math
import os
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from samebits.host import Cores, CoreShares, count_cores
from samebits.measuring.bounds import gradient_bytes, measure_bounds
from samebits.measuring.tracing import OperationCounter, Tracer, read_seconds
from samebits.records.breakdown import Breakdown, Launches, Phases, RankPhases, Reads, Traffic
from samebits.records.progress import tell
from samebits.training.meters import PhaseClock, StepClock, ignore_phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from samebits.training.loop import Trainable

TURNS = 12
TURN_SECONDS = 0.06
TRACED_STEPS = 4

Turn = Literal["plain", "noted", "alone", "half", "one thread"]


@dataclass(frozen=True)
class Twins:
    """Copies of a training for the profiling pass, on this rank.

    ``alone`` trains this rank's part without communication, ``half`` trains half of the batch on the only device, and
    the function ``traced`` makes the copy whose all-reduces a tracer records.
    """

    alone: Trainable | None
    half: Trainable | None
    traced: Callable[[Tracer], Trainable | None]


def break_down(trainable: Trainable, twins: Twins, *, total_steps: int, step_seconds: float) -> Breakdown:
    """Divide the steps of a training into phases; every rank must call it, with twins of the same kinds.

    ``step_seconds``, the same on every rank, sets how many steps a turn has.
    """
    steps = max(1, min(total_steps, round(TURN_SECONDS / max(step_seconds, 1e-9))))
    tell("dividing a step into parts")
    turns = _Turns(trainable, twins, steps, total_steps)
    turns.run()
    traffic, reads, launches = _trace(trainable, twins, total_steps)
    worker = trainable.worker
    ranks = tuple(worker.ranks.gather(turns.here()))
    shares = turns.shares
    (others,) = worker.ranks.max_over_ranks([shares.others if shares else math.inf])  # of the busiest machine
    return Breakdown(
        steps=steps,
        plain_ms=turns.ms("plain"),
        noted_ms=turns.ms("noted"),
        one_thread_ms=turns.ms("one thread"),
        ranks=ranks,
        traffic=traffic,
        reads=reads,
        launches=launches,
        bounds=measure_bounds(trainable, turns.ms("half") if twins.half else None),
        cores=count_cores(),
        other_cores=others if math.isfinite(others) else None,
    )


class _Turns:
    """Steps of each kind, turn by turn."""

    def __init__(self, trainable: Trainable, twins: Twins, steps: int, total_steps: int) -> None:
        self._subjects: dict[Turn, Trainable] = {"plain": trainable, "noted": trainable}
        if twins.alone:
            self._subjects["alone"] = twins.alone
        if twins.half:
            self._subjects["half"] = twins.half
        self._threads = torch.get_num_threads()
        if takes_threads(trainable):
            self._subjects["one thread"] = trainable
        self._steps, self._last_start = steps, max(1, total_steps - steps + 1)
        self._worker = trainable.worker
        self._clock = PhaseClock(self._worker.device)
        self._seconds: dict[Turn, list[float]] = {turn: [] for turn in self._subjects}
        self._phases: dict[Turn, list[Phases]] = {"noted": [], "alone": []}
        self.shares: CoreShares | None = None

    def run(self) -> None:
        """Take all turns; the order of the kinds rotates, so that none of them always follows the same one."""
        for subject in {id(subject): subject for subject in self._subjects.values()}.values():
            subject.reset()
        cores = Cores(os.getppid())  # the launcher and all its workers
        before = cores.read()
        order = list(self._subjects)
        for number in range(TURNS):
            first = number % len(order)
            for turn in order[first:] + order[:first]:
                self._worker.ranks.barrier()
                self._take(turn, number * self._steps % self._last_start)
        after = cores.read()
        if before and after:
            self.shares = CoreShares.between(before, after)
        self._clock.close()

    def _take(self, turn: Turn, start: int) -> None:
        subject, noted = self._subjects[turn], turn in self._phases
        rates = subject.rates(start, start + self._steps)
        if noted:
            subject.watch(self._clock)
        clock = StepClock(self._worker.device)
        if noted:
            self._clock("host")
        with one_thread() if turn == "one thread" else nullcontext():
            subject.run(start, rates, clock)
        if noted:
            self._phases[turn].append(self._clock.take(self._steps))
            subject.watch(ignore_phase)
        self._seconds[turn].append(clock.seconds)

    def ms(self, turn: Turn) -> tuple[float, ...]:
        """Milliseconds of a step of the slowest rank, by turn; empty without such turns. Every rank must call it."""
        if turn not in self._seconds:
            return ()
        return tuple(1e3 * s / self._steps for s in self._worker.ranks.max_over_ranks(self._seconds[turn]))

    def here(self) -> RankPhases:
        """The phases that this rank has noted."""
        return RankPhases(
            noted=tuple(self._phases["noted"]),
            alone=tuple(self._phases["alone"]),
            threads=self._threads,
        )


def takes_threads(trainable: Trainable) -> bool:
    """Whether a model on some rank uses several threads, where a CPU device is one; every rank must call it."""
    taken = trainable.worker.device.type == "cpu" and torch.get_num_threads() > 1
    return trainable.worker.ranks.any_rank(taken)


@contextmanager
def one_thread() -> Iterator[None]:
    """A block in which operations use one thread, even if the model asks for more."""
    threads, asked = torch.get_num_threads(), torch.set_num_threads
    torch.set_num_threads(1)
    torch.set_num_threads = lambda _: None  # type: ignore[assignment]  # the model would set it again
    try:
        yield
    finally:
        torch.set_num_threads = asked
        torch.set_num_threads(threads)


def _trace(trainable: Trainable, twins: Twins, total_steps: int) -> tuple[Traffic | None, Reads, Launches | None]:
    """Trace all-reduces, reads and launches of some steps, which this makes slower."""
    tracer = Tracer(trainable.worker.device)
    several = trainable.worker.world_size > 1
    subject = twins.traced(tracer) if several else trainable
    if subject is None:
        return None, Reads(), None
    subject.reset()
    counter = OperationCounter(lambda: tracer.phase)
    subject.watch(tracer)
    with counter:
        subject.run(0, subject.rates(0, 1), StepClock(trainable.worker.device))
    for step in range(min(TRACED_STEPS, total_steps)):
        tracer.begin_step()
        subject.run(step, subject.rates(step, step + 1), StepClock(trainable.worker.device))
    subject.watch(ignore_phase)
    of_one = read_seconds(trainable.worker.device) if counter.reads else 0.0
    reads = Reads(count=counter.reads, ms=1e3 * of_one * counter.reads)
    traffic = None
    if several:
        sent = sum(buffer.nbytes for buffer in subject.model.buffers()) if subject.sync_buffers else 0
        bytes_of_all = gradient_bytes(trainable)
        traffic = Traffic(buckets=tracer.buckets(), gradient_bytes=bytes_of_all, buffer_bytes=sent)
    return traffic, reads, counter.launches()
