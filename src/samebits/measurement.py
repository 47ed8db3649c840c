"""Timed slices beside the training: repeats, and what the same work takes otherwise.

References run on the first device alone: ``single`` does the whole global batch, ``share`` one device's share of it,
and ``fast``, beside an exact ``single``, does the whole batch in PyTorch's own arithmetic. Their chunks are interleaved
with the strategy's own, so that a host whose speed drifts slows all of them alike: ratios are taken within a
chunk.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from samebits.data.batches import Batches, rank_parts
from samebits.metrics import ratios, spread
from samebits.numerics.fast import FastNumerics
from samebits.numerics.make import make_numerics
from samebits.strategies import SingleDeviceStrategy
from samebits.timing import StepClock
from samebits.trainer import Trainable

if TYPE_CHECKING:
    from torch import nn

    from samebits.data.batches import Batch
    from samebits.data.card import Card
    from samebits.metrics import Spread
    from samebits.params import Params
    from samebits.params.schema import NumericsName
    from samebits.placement import Placement
    from samebits.strategies import Strategy

SLICE_SECONDS = 0.75
CHUNKS = 8


@dataclass(frozen=True)
class Slices:
    """Seconds of each chunk by name and repeat (``own`` is the slowest rank's), and whether losses repeated.

    ``first_difference`` is the first step, from 1, at which a repeat's loss was not the training's, else None.
    ``problem`` says why nothing was timed, or no reference.
    """

    steps: int = 0
    chunk_steps: int = 0
    seconds: dict[str, list[list[float]]] = field(default_factory=dict)
    first_difference: int | None = None
    problem: str | None = None

    def speedup(self) -> Spread | None:
        """Times faster than ``single``: median over the chunks, range over the repeats."""
        return self._ratio("single", "own")

    def bound(self) -> Spread | None:
        """What the speed-up would be if communication cost nothing: ``single`` over ``share``."""
        return self._ratio("single", "share")

    def price(self) -> Spread | None:
        """Times slower than ``fast``."""
        return self._ratio("own", "fast")

    def _ratio(self, above: str, below: str) -> Spread | None:
        if not (self.seconds.get(above) and self.seconds.get(below)):
            return None
        pairs = list(zip(self.seconds[above], self.seconds[below], strict=True))
        repeats = spread([sum(a) / sum(b) for a, b in pairs])
        middle = spread([ratio for a, b in pairs for ratio in ratios(a, b)])["median"]
        return {"median": middle, "low": min(repeats["low"], middle), "high": max(repeats["high"], middle)}


def references(placement: Placement, numerics: NumericsName) -> tuple[str, ...]:
    """What a training is compared with."""
    if placement.may_speed_up:
        return "single", "share"
    return ("fast",) if numerics == "exact" and placement.strategy == "single" else ()


def reference(
    name: str, model: nn.Module, data: Batch, card: Card, params: Params, numerics: NumericsName, strategy: Strategy
) -> Trainable:
    """One of ``references``, from a copy of the untrained ``model``, on this worker's first device."""
    if name == "fast":
        numerics = "fast"
    accum, samples, shards = params.train.grad_accum_steps, params.train.global_batch_size, params.shards(numerics)
    if name == "share" and shards:
        most = -(-shards // strategy.placement.devices_used)
        samples, shards = samples // shards * most, most
    elif name == "share":
        samples = strategy.placement.rows_per_device * accum
    layout = rank_parts(samples, shards, accum=accum)
    batches = Batches(data, card, seed=params.seed, global_batch_size=samples, layout=layout, device=strategy.device)
    placement = replace(
        strategy.placement,
        strategy="single",
        devices=(strategy.device.index or 0,),
        devices_used=1,
        rows_per_device=batches.rows,
        world_size=1,
        backend=None,
        labels=(),
    )
    alone = make_numerics(numerics, params, strategy.device, card.loss, tuple(card.target_shape), shards=shards)
    if isinstance(alone, FastNumerics):
        alone.set_precision()
    copied = copy.deepcopy(model)
    alone.adopt(copied)
    copied.to(strategy.device)
    return Trainable(copied, batches, SingleDeviceStrategy(placement, params.train), alone, params)


def time_slices(
    own: Trainable,
    others: dict[str, Trainable],
    names: list[str],
    losses: list[float],
    *,
    step_seconds: float,
    repeats: int,
) -> Slices:
    """Time ``repeats`` slices of ``own`` and of the references, each from the initial state.

    ``others`` is empty on all ranks but the first; ``names`` lists its keys on every rank. ``losses`` are the
    training's, which the slices must repeat.
    """
    strategy = own.strategy
    steps = max(1, min(len(losses), round(SLICE_SECONDS / max(step_seconds, 1e-9))))
    chunk = max(1, steps // CHUNKS)
    order = ["own", *names]
    jobs = {"own": own, **others}
    seconds: dict[str, list[list[float]]] = {name: [] for name in order}
    difference: int | None = None
    random = {}
    for _ in range(repeats):
        for name, job in jobs.items():
            job.reset()
            random[name] = job.strategy.random_state()
        parts: dict[str, list[float]] = {name: [] for name in order}
        for number, start in enumerate(range(0, steps, chunk)):
            stop = min(start + chunk, steps)
            turn = number % len(order)
            for name in order[turn:] + order[:turn]:
                strategy.barrier()
                clock = StepClock(strategy.device)
                if name in jobs:  # the jobs share this process's random generators: each continues its own
                    jobs[name].strategy.set_random_state(random[name])
                    part = jobs[name].run(start, jobs[name].rates(start, stop), clock)
                    random[name] = jobs[name].strategy.random_state()
                parts[name].append(clock.seconds)
                if name == "own":
                    repeated = own.mean_losses(part)
                    unequal = [i for i in range(start, stop) if repeated[i - start] != losses[i]]
                    if unequal and (difference is None or unequal[0] + 1 < difference):
                        difference = unequal[0] + 1
        for name, values in parts.items():
            seconds[name].append(strategy.maximum(values))
    return Slices(steps, chunk, seconds, difference)
