"""The parts of a step, which add up to it, from the records of the profiling pass."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from samebits.files import Part
from samebits.records.breakdown import Phases

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from samebits.records.breakdown import Breakdown, RankPhases

KEPT = 2 / 3
"""Share of the turns that count, the fastest ones. Other processes make some turns slow, and none fast."""


COPIES = ("scatter", "replicate", "gather")
"""Parts in which DataParallel copies."""


class Parts(Part):
    """Milliseconds of a step: the phases of ``Phases`` as means over the ranks, and the parts between ranks.

    ``backward`` is computation alone. ``buffers`` is the time that their synchronisation adds to the forward pass.
    ``waiting`` is for the computation of the slowest rank. ``communication`` is the rest that is not hidden behind the
    backward pass, as far as all-reduces were in flight; ``wrapper`` is what remains, DDP's own work on the host.
    ``queued`` is time without a core.
    """

    data: float
    scatter: float
    replicate: float
    forward: float
    gather: float
    backward: float
    buffers: float
    communication: float
    wrapper: float
    waiting: float
    optimizer: float
    host: float
    queued: float

    @property
    def total(self) -> float:
        """Milliseconds of the whole step."""
        return sum(map(float, self.model_dump().values()))

    def of(self, names: Collection[str]) -> float:
        """Milliseconds of the named parts together."""
        return sum(float(getattr(self, name)) for name in names)


class Turn(NamedTuple):
    """One turn: its parts, each rank's computation in a step, and the longest wait for a core, in ms."""

    parts: Parts
    computing_ms: tuple[float, ...]
    queued_ms: float

    def scaled(self, by: float, names: Collection[str], names_by: float) -> Turn:
        """All milliseconds times ``by``, except the parts in ``names``, which are times ``names_by``."""
        parts = {name: ms * (names_by if name in names else by) for name, ms in self.parts.model_dump().items()}
        return Turn(Parts(**parts), tuple(by * ms for ms in self.computing_ms), by * self.queued_ms)


def turns_of(breakdown: Breakdown) -> list[Turn]:
    """The turns that count, in the order of the measurement."""
    return [_turn(breakdown, turn) for turn in _kept(breakdown)]


def _kept(breakdown: Breakdown) -> list[int]:
    """Numbers of the turns whose plain and noted steps are together the fastest, so both are of the same moments."""
    both = [plain + noted for plain, noted in zip(breakdown.plain_ms, breakdown.noted_ms, strict=True)]
    fastest = sorted(range(len(both)), key=lambda turn: both[turn])
    return sorted(fastest[: max(1, round(KEPT * len(both)))])


def _turn(breakdown: Breakdown, turn: int) -> Turn:
    noted = _means([rank.noted[turn] for rank in breakdown.ranks])
    computing_ms = tuple(_computing(rank, turn) for rank in breakdown.ranks)
    phases = noted.model_dump()
    buffers = communication = wrapper = waiting = 0.0
    if all(rank.alone for rank in breakdown.ranks):
        alone = _means([rank.alone[turn] for rank in breakdown.ranks])
        between = max(0.0, noted.backward - alone.backward)
        waiting = min(between, max(computing_ms) - fmean(computing_ms))
        communication = between - waiting
        phases["backward"] -= between
        if breakdown.traffic and breakdown.traffic.buckets:  # else nothing says how long they were in flight
            wrapper = max(0.0, communication - breakdown.traffic.in_flight_ms)
            communication -= wrapper
        if breakdown.traffic and breakdown.traffic.buffer_bytes:
            buffers = max(0.0, noted.forward - alone.forward)
            phases["forward"] -= buffers
    parts = Parts(**phases, buffers=buffers, communication=communication, wrapper=wrapper, waiting=waiting)
    return Turn(parts, computing_ms, max(rank.noted[turn].queued for rank in breakdown.ranks))


def _computing(rank: RankPhases, turn: int) -> float:
    """A rank's computation in a step, without waits for a core, and without waits for other ranks if it ran alone."""
    phases = rank.alone[turn] if rank.alone else rank.noted[turn]
    return phases.total - phases.queued


def _means(phases: Sequence[Phases]) -> Phases:
    return Phases(**{name: fmean(getattr(one, name) for one in phases) for name in Phases.model_fields})


def mean_parts(turns: Sequence[Turn]) -> Parts:
    """The mean of each part over the turns. Unlike medians, means add up."""
    return Parts(**{name: fmean(getattr(turn.parts, name) for turn in turns) for name in Parts.model_fields})


def plain_ms(breakdown: Breakdown) -> float:
    """Milliseconds of a step without notes, in the turns that the parts are from."""
    return fmean(breakdown.plain_ms[turn] for turn in _kept(breakdown))
