"""Timed slices: repeats of the training's first steps, interleaved with the same steps of its references.

A slice is cut into chunks, and chunks of the strategy and of the references take turns. A host whose speed drifts then
slows all of them alike, because ratios are taken within a chunk. A noisy host gets more repeats than requested.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from samebits.measuring.prolonging import Prolonging
from samebits.measuring.references import REFERENCES, WARM_UP_SECONDS, WARM_UP_STEPS
from samebits.numerics.allocators import is_out_of_memory
from samebits.records.measurement import Measurement, Repeats, SliceName
from samebits.records.statistics import paired_ratio
from samebits.remarks import Fallback, Missing, OneDevice, Oversubscribed, Reason
from samebits.strategies import BASELINE
from samebits.training.loop import warm_up
from samebits.training.meters import StepClock

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from samebits.measuring.references import References
    from samebits.params.schema import Train
    from samebits.records.run import Ratio
    from samebits.strategies.placement import Placement
    from samebits.training.loop import Trainable

SLICE_SECONDS = 0.5
CHUNKS = 8
CHUNK_SECONDS = {"cpu": 0.0, "cuda": 0.02}
"""Least time of a chunk. On a GPU each begins with an empty queue, and a shorter one would measure that."""
_SHORTEST_STEP = 1e-5  # seconds: no GPU is given a step's work in less


@dataclass(frozen=True, kw_only=True)
class Slices:
    """Seconds of each chunk by name and repeat, of the slowest rank, and whether the losses were repeated.

    ``first_difference`` is the first step, from 1, at which a repeat's loss was not the training's, else None.
    ``problem`` says why nothing or no reference was timed. Only rank 0 has ``repeats``.
    """

    steps: int = 0
    chunk_steps: int = 0
    seconds: dict[SliceName, list[list[float]]] = field(default_factory=dict)
    first_difference: int | None = None
    problem: Missing | None = None
    repeats: Repeats | None = None

    def speedup(self) -> Ratio | None:
        """Times faster than ``single``."""
        return _ratio(self.seconds, "single", "strategy")

    def bound(self) -> Ratio | None:
        """The speed-up without communication and contention between devices: ``single`` over ``share``."""
        return _ratio(self.seconds, "single", "share")

    def price(self) -> Ratio | None:
        """Times slower than ``fast``."""
        return _ratio(self.seconds, "strategy", "fast")

    def measurement(self, step_seconds: Sequence[float]) -> Measurement:
        """The times for the record, with those of the training's own steps."""
        return Measurement(
            step_ms=tuple(float(f"{seconds * 1e3:.4g}") for seconds in step_seconds),
            slice_steps=self.steps,
            chunk_steps=self.chunk_steps,
            chunk_seconds={name: tuple(map(tuple, repeats)) for name, repeats in self.seconds.items()},
            repeats=self.repeats,
        )


def _ratio(seconds: Mapping[SliceName, list[list[float]]], above: SliceName, below: SliceName) -> Ratio | None:
    return paired_ratio(seconds[above], seconds[below]) if seconds.get(above) and seconds.get(below) else None


NOT_ENDED = Slices(problem=Missing(kind="not_ended"))
NO_MEMORY_LEFT = Slices(problem=Missing(kind="no_memory_left"))


def measure_slices(
    trainable: Trainable, references: References, losses: Sequence[float], asked: Train, *, step_seconds: float
) -> Slices:
    """Time at least ``train.repeats - 1`` slices of ``trainable`` and its references, each from the initial state.

    ``losses`` are the training's, which the slices must repeat. Every rank must call it.
    """
    if asked.repeats == 1:
        return Slices(problem=references.problem)
    kind = trainable.worker.device.type
    if seconds := WARM_UP_SECONDS[kind]:  # clocks have fallen while rank 0 made its references alone
        step_seconds = warm_up(trainable, WARM_UP_STEPS[kind], seconds=seconds)
    prolonging = Prolonging(asked.repeats - 1, asked.prolong_s)
    slices = time_slices(
        trainable, references.here, references.names, losses, step_seconds=step_seconds, prolonging=prolonging
    )
    return replace(slices, problem=references.problem or slices.problem)


def time_slices(
    trainable: Trainable,
    references: dict[SliceName, Trainable],
    names: Sequence[SliceName],
    losses: Sequence[float],
    *,
    step_seconds: float,
    prolonging: Prolonging,
) -> Slices:
    """Time slices of ``trainable`` and of the references, as often as rank 0's ``prolonging`` decides.

    ``references`` are those of this rank; ``names`` lists the references of all ranks.
    """
    worker = trainable.worker
    steps, chunk = _lengths(len(losses), step_seconds, CHUNK_SECONDS[worker.device.type])
    timed = _TimedSlices({"strategy": trainable, **references}, ["strategy", *names], losses, steps, chunk)
    more, failed = True, False
    while more:
        prolonging.tell()
        timed.repeat()
        failed = worker.ranks.any_rank(timed.ran_out)
        speedup = partial(_ratio, timed.seconds, "single", "strategy") if "single" in names and not failed else None
        more = worker.ranks.any_rank(worker.rank == 0 and prolonging.wants_more(speedup))
    seconds, problem = timed.seconds, None
    if failed:
        seconds, problem = {"strategy": seconds["strategy"]}, Missing(kind="no_memory")
    elif "single" in names and _ratio(seconds, "single", "strategy") is None:
        problem = Missing(kind="one_pair")
    result = prolonging.result() if worker.rank == 0 else None
    return Slices(
        steps=steps,
        chunk_steps=chunk,
        seconds=seconds,
        first_difference=timed.first_difference,
        problem=problem,
        repeats=result,
    )


def _lengths(trained: int, step_seconds: float, least_seconds: float) -> tuple[int, int]:
    """Steps of a slice and of a chunk. A slice is longer than the training if its chunks would be too short."""
    step = max(step_seconds, 1e-9)
    steps = max(1, min(trained, round(SLICE_SECONDS / step)))
    chunk, least = max(1, steps // CHUNKS), math.ceil(least_seconds / max(step, _SHORTEST_STEP))
    return (steps, chunk) if least <= chunk else (CHUNKS * least, least)


def _passes(start: int, stop: int, trained: int) -> Iterator[range]:
    """The steps from ``start`` up to ``stop`` as steps of the training, which begins again at its end."""
    while start < stop:
        first = start % trained
        taken = min(stop - start, trained - first)
        yield range(first, first + taken)
        start += taken


def why_no_speedup(placement: Placement, slices: Slices) -> Reason | None:
    """Why there is no ratio to ``single``; None if there is one, or if the strategy is ``single``."""
    if placement.strategy == BASELINE.name or slices.speedup():
        return None
    if placement.may_speed_up:
        return slices.problem or Missing(kind="not_measured")
    reasons = (label for label in placement.labels if isinstance(label, Fallback | Oversubscribed | OneDevice))
    return next(reasons, OneDevice())


class _TimedSlices:
    """Slices of a training and of its references, repeat by repeat; all ranks must call ``repeat`` equally often.

    ``here`` are the trainings on this rank; ``order`` names those of all ranks. ``seconds`` are of the slowest rank, by
    name, repeat and chunk. ``first_difference`` is the first step, from 1, whose loss was not the training's.
    ``ran_out``: a reference on this rank ran out of memory.
    """

    def __init__(
        self,
        here: dict[SliceName, Trainable],
        order: list[SliceName],
        losses: Sequence[float],
        steps: int,
        chunk: int,
    ) -> None:
        self.seconds: dict[SliceName, list[list[float]]] = {name: [] for name in order}
        self.first_difference: int | None = None
        self.ran_out = False
        self._here, self._order, self._losses, self._steps, self._chunk = here, order, losses, steps, chunk
        self._worker = here["strategy"].worker
        self._random: dict[SliceName, list[Tensor]] = {}
        # One cycle over all repeats, so that even short slices share a drift.
        self._turns = itertools.cycle(range(len(order)))

    def repeat(self) -> None:
        """Time a slice of each from the initial state, chunk by chunk in turn."""
        times: dict[SliceName, list[float]] = {name: [] for name in self._order}
        for start in range(0, self._steps, self._chunk):
            passes = [*_passes(start, min(start + self._chunk, self._steps), len(self._losses))]
            turn = next(self._turns)
            for name in self._order[turn:] + self._order[:turn]:
                times[name].append(self._time(name, passes))
        for name, values in times.items():
            self.seconds[name].append(self._worker.ranks.max_over_ranks(values))

    def _time(self, name: SliceName, passes: Sequence[range]) -> float:
        """Seconds of a chunk on this rank; 0 if it runs on another rank only."""
        clock = StepClock(self._worker.device)
        for steps in passes:
            if not steps.start and (one := self._here.get(name)):
                one.reset()
                self._random[name] = one.worker.random_state()
            self._worker.ranks.barrier()
            if name == "strategy" or REFERENCES[name].everywhere:
                self._run(name, steps, clock)
            else:  # the other ranks may have to wait for longer than a collective allows
                self._worker.ranks.first_alone(partial(self._run, name, steps, clock))
        return clock.seconds

    def _run(self, name: SliceName, steps: range, clock: StepClock) -> None:
        if name not in self._here:
            return
        one = self._here[name]
        try:
            one.numerics.configure()  # all share this process's switches and random generators
            one.worker.set_random_state(self._random[name])
            losses = one.run(steps.start, one.rates(steps.start, steps.stop), clock)
            self._random[name] = one.worker.random_state()
        except Exception as error:
            if name == "strategy" or REFERENCES[name].waits or not is_out_of_memory(error):  # others wait for this one
                raise
            del self._here[name]
            self.ran_out = True
        else:
            if name == "strategy":
                self._look_at(one.mean_losses(losses), steps)

    def _look_at(self, repeated: list[float], steps: range) -> None:
        """Note the first step whose loss was not repeated."""
        unequal = [step + 1 for step, loss in zip(steps, repeated, strict=True) if loss != self._losses[step]]
        if unequal and (self.first_difference is None or unequal[0] < self.first_difference):
            self.first_difference = unequal[0]
