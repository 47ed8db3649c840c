"""References: other trainings of the same model, with which a training is timed in turns."""

from __future__ import annotations

import copy
import gc
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from samebits.errors import UserError, first_line
from samebits.numerics.allocators import is_out_of_memory
from samebits.remarks import Missing
from samebits.strategies import BASELINE
from samebits.training.loop import warm_up
from samebits.training.setup import Setup
from samebits.training.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from samebits.batch_split import BatchSplit
    from samebits.measuring.tracing import Tracer
    from samebits.params.schema import NumericsName
    from samebits.records.measurement import SliceName
    from samebits.strategies.placement import Placement
    from samebits.training.datasets import AnyData
    from samebits.training.loop import Trainable

    ReferenceName = SliceName | Literal["traced", "half"]

WARM_UP_STEPS = {"cpu": 3, "cuda": 10}
WARM_UP_SECONDS = {"cpu": 0.0, "cuda": 1.0}
"""Least time of the warm-up before a timed measurement. A GPU raises its clocks only under load."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A kind of reference: ``part`` gives its share of the batch and its worker.

    It is timed in slices if it is ``wanted``. ``everywhere``: it runs on every rank; others run on the first device.
    ``waits``: its ranks wait for each other, so every rank must have it. ``numerics``: it uses these instead of the
    training's.
    """

    part: Callable[[Setup, Placement], tuple[BatchSplit, Worker]]
    wanted: Callable[[Placement, NumericsName], bool] = lambda *_: False
    everywhere: bool = False
    waits: bool = False
    numerics: NumericsName | None = None


def _on_one_device(setup: Setup, _: Placement) -> tuple[BatchSplit, Worker]:
    return setup.split.over(), Worker([setup.worker.device])


REFERENCES: dict[ReferenceName, Reference] = {
    # the whole batch on one device
    "single": Reference(part=_on_one_device, wanted=lambda placement, _: placement.may_speed_up),
    # one device's share of the batch, on one device
    "share": Reference(
        part=lambda setup, _: (setup.split.share(), setup.worker.alone()),
        wanted=lambda placement, _: placement.may_speed_up,
    ),
    # all devices at once, without communication
    "together": Reference(
        part=lambda setup, _: (setup.split, setup.worker.alone()),
        wanted=lambda placement, _: placement.may_speed_up and placement.has_ranks,
        everywhere=True,
    ),
    # the training itself, without communication between machines
    "node": Reference(
        part=lambda setup, placement: (setup.split, setup.worker.within(placement.ranks_by_node)),
        wanted=lambda placement, _: placement.may_speed_up and max(placement.devices_by_node, default=1) > 1,
        everywhere=True,
        waits=True,
    ),
    # the same on one device, in fast numerics
    "fast": Reference(
        part=_on_one_device,
        wanted=lambda placement, numerics: numerics == "exact" and placement.strategy == BASELINE.name,
        numerics="fast",
    ),
    # the training itself, with notes of its all-reduces
    "traced": Reference(part=lambda setup, _: (setup.split, setup.worker), waits=True),
    # half the batch on one device
    "half": Reference(part=lambda setup, _: (setup.split.over(devices=2).share(), setup.worker.alone())),
}


def reference_names(placement: Placement, numerics: NumericsName) -> tuple[SliceName, ...]:
    """Names of the references that are timed beside a training."""
    return tuple(name for name, one in REFERENCES.items() if one.wanted(placement, numerics))  # type: ignore[misc]


@dataclass
class References:
    """The warm references of this rank, and the names of all. ``problem`` says why some or all are missing."""

    names: tuple[SliceName, ...] = ()
    here: dict[SliceName, Trainable] = field(default_factory=dict)
    problem: Missing | None = None

    def release(self) -> None:
        """Free the memory of this rank's references; captured modules are in cycles, so this needs the collector."""
        self.here.clear()
        gc.collect()


def make_references(untrained: nn.Module | None, data: AnyData, setup: Setup, placement: Placement) -> References:
    """Make the references of a training. Every rank must call it.

    ``untrained`` is the model as built, None on a rank without references. A reference that does not fit on the device
    becomes the ``problem``. If it is ``single``, which has the whole batch on one device, the others stay.
    """
    if setup.params.train.repeats == 1:
        return References(problem=Missing(kind="one_repeat"))
    references = References()
    worker = setup.worker
    for name in reference_names(placement, setup.numerics.name):
        make = partial(make_reference, name, untrained=untrained, data=data, setup=setup, placement=placement)
        everywhere = REFERENCES[name].everywhere
        reference = make() if everywhere else worker.ranks.first_alone(make)
        if reference is not None:
            references.here[name] = reference
        lacks = reference is None and (worker.rank == 0 or everywhere)
        if not worker.ranks.any_rank(lacks):
            references.names += (name,)
            continue
        references.problem = Missing(kind="no_memory")
        if name != "single":
            references.release()
            return References(problem=references.problem)
    return references


def make_reference(
    name: ReferenceName,
    *,
    untrained: nn.Module | None,
    data: AnyData,
    setup: Setup,
    placement: Placement,
    tracer: Tracer | None = None,
) -> Trainable | None:
    """A warm reference on this worker's first device, from an ``untrained`` model; None if it does not fit there.

    It is set up like a training of its own, except that the share of a strategy that cannot be compiled is not compiled
    either.
    """
    assert untrained is not None
    reference = REFERENCES[name]
    numerics = reference.numerics or setup.numerics.name
    split, worker = reference.part(setup, placement)
    if tracer:
        worker = worker.hooked(tracer.hook)
    if numerics == "fast":
        split = replace(split, shards=None)
    part = Setup(setup.params, numerics, setup.card, split=split, worker=worker)
    part.numerics.configure()
    try:
        model = part.place(copy_of(untrained))
        made = part.trainable(model, part.batches(data))
        made.require_same_again(0)
        warm_up(made, WARM_UP_STEPS[setup.worker.device.type])
    except Exception as error:
        if reference.waits or not is_out_of_memory(error):
            raise
        return None
    finally:
        setup.numerics.configure()  # the training goes on, in other numerics perhaps
    return made


def copy_of(model: nn.Module) -> nn.Module:
    """A copy that shares nothing with the model. Raises UserError: something in the model cannot be copied."""
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise UserError(
            f"the model cannot be copied, to be timed beside the training: {first_line(str(error))}",
            hint="keep what cannot be copied out of it, or set train.repeats to 1, which times nothing",
        ) from error
