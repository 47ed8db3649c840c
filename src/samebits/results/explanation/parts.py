"""The parts of a step, which add up to it, out of what the profiling pass noted."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from samebits.files import Part
from samebits.records.breakdown import Phases

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from samebits.records.breakdown import Breakdown, RankPhases

KEPT = 2 / 3
"""Share of the turns that count, the fastest ones: a host that others use makes some turns slow, and none fast."""


class Parts(Part):
    """Milliseconds of a step: phases as in ``Phases``, as means over the ranks, and what is between ranks.

    ``backward`` is the computation alone. ``buffers`` is what synchronising them adds to the forward pass; ``waiting``
    is for the slowest rank's own computation; ``communication`` is all else that is not hidden behind the backward
    pass; ``queued`` is time for which there was no core.
    """

    data: float
    scatter: float
    replicate: float
    forward: float
    gather: float
    backward: float
    buffers: float
    communication: float
    waiting: float
    optimizer: float
    host: float
    queued: float

    @property
    def total(self) -> float:
        """The whole step, in the unit of its parts."""
        return sum(map(float, self.model_dump().values()))

    def of(self, names: Collection[str]) -> float:
        """What some of the parts take."""
        return sum(float(getattr(self, name)) for name in names)


class Turn(NamedTuple):
    """What one turn says: its parts, each rank's own computation of a step, and the longest wait for a core, in ms."""

    parts: Parts
    computing_ms: tuple[float, ...]
    queued_ms: float

    def scaled(self, by: float, names: Collection[str], names_by: float) -> Turn:
        """With all milliseconds times ``by``, but those of some parts times ``names_by``."""
        parts = {name: ms * (names_by if name in names else by) for name, ms in self.parts.model_dump().items()}
        return Turn(Parts(**parts), tuple(by * ms for ms in self.computing_ms), by * self.queued_ms)


def turns_of(breakdown: Breakdown) -> list[Turn]:
    """Every turn that counts, in the order in which they were taken."""
    return [_turn(breakdown, turn) for turn in _kept(breakdown)]


def _kept(breakdown: Breakdown) -> list[int]:
    """The turns whose plain and noted steps are the fastest, so that both are of the same moments."""
    both = [plain + noted for plain, noted in zip(breakdown.plain_ms, breakdown.noted_ms, strict=True)]
    fastest = sorted(range(len(both)), key=lambda turn: both[turn])
    return sorted(fastest[: max(1, round(KEPT * len(both)))])


def _turn(breakdown: Breakdown, turn: int) -> Turn:
    noted = _means([rank.noted[turn] for rank in breakdown.ranks])
    computing_ms = tuple(_computing(rank, turn) for rank in breakdown.ranks)
    phases = noted.model_dump()
    buffers = communication = waiting = 0.0
    if all(rank.alone for rank in breakdown.ranks):
        alone = _means([rank.alone[turn] for rank in breakdown.ranks])
        between = max(0.0, noted.backward - alone.backward)
        waiting = min(between, max(computing_ms) - fmean(computing_ms))
        communication = between - waiting
        phases["backward"] -= between
        if breakdown.traffic and breakdown.traffic.buffer_bytes:
            buffers = max(0.0, noted.forward - alone.forward)
            phases["forward"] -= buffers
    parts = Parts(**phases, buffers=buffers, communication=communication, waiting=waiting)
    return Turn(parts, computing_ms, max(rank.noted[turn].queued for rank in breakdown.ranks))


def _computing(rank: RankPhases, turn: int) -> float:
    """What a rank computes in a step, without waiting for a core or for others where it is known without them."""
    phases = rank.alone[turn] if rank.alone else rank.noted[turn]
    return phases.total - phases.queued


def _means(phases: Sequence[Phases]) -> Phases:
    return Phases(**{name: fmean(getattr(one, name) for one in phases) for name in Phases.model_fields})


def mean_parts(turns: Sequence[Turn]) -> Parts:
    """The mean of each part over turns, so that they add up."""
    return Parts(**{name: fmean(getattr(turn.parts, name) for turn in turns) for name in Parts.model_fields})


def plain_ms(breakdown: Breakdown) -> float:
    """A step without notes, in the same turns as the parts."""
    return fmean(breakdown.plain_ms[turn] for turn in _kept(breakdown))
