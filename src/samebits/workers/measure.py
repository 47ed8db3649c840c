"""Measurements after a training: timed slices, the rounding twin, and the phases of a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from samebits.measuring.phases import Twins, break_down
from samebits.measuring.references import REFERENCES, make_reference, make_references, reference_names
from samebits.measuring.rounding import measure_rounding
from samebits.measuring.same_draws import measure_same_draws
from samebits.measuring.slices import NO_MEMORY_LEFT, Slices, measure_slices
from samebits.numerics.allocators import is_out_of_memory
from samebits.strategies import BASELINE
from samebits.training.loop import Snapshot

if TYPE_CHECKING:
    from torch import nn

    from samebits.measuring.references import References
    from samebits.records.breakdown import Breakdown
    from samebits.records.run import Rounding
    from samebits.strategies.placement import Placement
    from samebits.training.datasets import AnyData
    from samebits.training.loop import Trainable
    from samebits.training.setup import Setup
    from samebits.workers.sampler import Sampler


@dataclass(frozen=True)
class Measurements:
    """The measurements of a training. Only fast numerics have ``rounding``, ``breakdown`` and ``same_draws``."""

    slices: Slices
    rounding: Rounding | None = None
    breakdown: Breakdown | None = None
    same_draws: tuple[float, ...] | None = None


def has_twins(setup: Setup, placement: Placement) -> bool:
    """Whether this rank will train copies of the model beside it, for which it must keep the untrained model."""
    if setup.params.train.repeats == 1 or placement.fallback:
        return False
    names = reference_names(placement, setup.numerics.name)
    here = [name for name in names if setup.worker.rank == 0 or REFERENCES[name].everywhere]
    return setup.numerics.name == "fast" or bool(here)


def measure(
    trainable: Trainable,
    losses: list[float],
    *,
    untrained: nn.Module | None,
    data: AnyData,
    setup: Setup,
    placement: Placement,
    step_seconds: float,
    sampler: Sampler,
) -> Measurements:
    """Measure a finished training; every rank must call it. A fallback is not measured, since ``single`` shows it all.

    ``untrained`` is the model as built, None on a rank that trains no copies. ``losses`` are the training's.
    """
    if placement.fallback:
        return Measurements(Slices())
    worker, params = setup.worker, setup.params
    twin = params.train.repeats > 1 and setup.numerics.name == "fast"
    final = Snapshot(trainable.model) if twin else None
    same_draws = measure_same_draws(trainable, params) if setup.draws else None
    told = partial(Measurements, same_draws=same_draws)
    worker.ranks.barrier()  # time to save a large model must not count as waiting in the next measurement
    measured = told(NO_MEMORY_LEFT)
    try:
        references = make_references(untrained, data, setup, placement)
        with sampler.during("slices"):
            slices = measure_slices(trainable, references, losses, params.train, step_seconds=step_seconds)
        measured = told(slices)
        if final is None:
            return measured
        rounding = measure_rounding(trainable, losses, final, seed=params.seed, step_seconds=step_seconds)
        measured = told(slices, rounding)
        if slices.problem is not None and slices.problem.kind == "no_memory" and "share" not in slices.seconds:
            references.release()
            return measured  # there is no memory for twins either
        make = partial(make_reference, untrained=untrained, data=data, setup=setup, placement=placement)
        if (twins := _twins(make, references, setup, placement)) is None:
            return measured
        breakdown = break_down(trainable, twins, total_steps=len(losses), step_seconds=step_seconds)
        return told(slices, rounding, breakdown)
    except Exception as error:
        if worker.world_size > 1 or not is_out_of_memory(error):  # other ranks wait for this one
            raise
        return measured
    finally:
        trainable.numerics.configure()  # a reference in other numerics may have been timed last


def _twins(make: partial[Trainable | None], references: References, setup: Setup, placement: Placement) -> Twins | None:
    """Copies for the profiling pass. The references are released first, because memory may not hold both.

    None if some rank has no room for its copy: the traced copy takes more, and the other ranks would wait for it.
    """
    alone = references.here.get("together")
    references.release()
    if placement.world_size > 1 and alone is None:
        alone = make("together")
        if setup.worker.ranks.any_rank(alone is None):
            return None
    half = make("half") if placement.strategy == BASELINE.name and setup.split.has_halves else None
    return Twins(alone=alone, half=half, traced=lambda tracer: make("traced", tracer=tracer))
