"""The cost model of a step of ddp in ``docs/concepts/dp-and-ddp.md``, with measurable coefficients.

A step of N devices with r samples each takes

    fixed + per_row r + (n - 1) (contention + contention_per_row r) + communication - hidden

where n of the N devices share a host, and the all-reduce is that of a ring, in K messages:

    communication = latency 2 (N - 1) K + per_byte 2 (N - 1) / N bytes
    hidden        = overlap (1 - 1/K) min(communication, backward),   backward = 2/3 per_row r
"""

from __future__ import annotations

from typing import NamedTuple

from samebits.files import Part

BACKWARD_SHARE = 2 / 3
"""Share of backward in the computation per sample: it has two matrix products for each one of forward."""


class Step(Part):
    """The work of a step: ``devices`` at once, each with ``rows`` samples; ``sharing`` of them are on one host.

    ``bytes`` of gradients are reduced over all devices in ``messages``; 0 if none are. A step without rows is an
    all-reduce alone.
    """

    devices: int
    rows: float
    bytes: int = 0
    messages: int = 1
    sharing: int = 1

    @property
    def hops(self) -> int:
        """Messages that a device sends one after another."""
        return 2 * (self.devices - 1) * self.messages if self.bytes else 0

    @property
    def sent(self) -> float:
        """Bytes that each device sends; it receives as many."""
        return 2 * (self.devices - 1) / self.devices * self.bytes

    @property
    def hidable(self) -> float:
        """Share of an all-reduce, and of backward, that can overlap with the other: all but the last bucket."""
        return 1 - 1 / self.messages


class Coefficients(Part):
    """Seconds for each step, sample, further device, byte sent and message.

    ``overlap`` is the hidden share of the time that backward could hide.
    """

    fixed: float = 0.0
    per_row: float = 0.0
    contention: float = 0.0
    contention_per_row: float = 0.0
    per_byte: float = 0.0
    latency: float = 0.0
    overlap: float = 0.0


LINEAR = ("fixed", "per_row", "contention", "contention_per_row", "per_byte", "latency")
"""Coefficients in which the time of a step is linear, in the order of ``columns``."""


class Costs(NamedTuple):
    """The parts of a step in seconds: computation, communication, and how much of it is hidden behind backward."""

    compute: float
    communication: float
    hidden: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.compute + (self.communication - self.hidden)


def costs(by: Coefficients, step: Step) -> Costs:
    """The cost of a step with these coefficients."""
    base, rows, shared, shared_rows, sent, hops = columns(step)
    compute = base * by.fixed + rows * by.per_row + shared * by.contention + shared_rows * by.contention_per_row
    communication = sent * by.per_byte + hops * by.latency
    hidden = by.overlap * step.hidable * min(communication, _backward(by, step))
    return Costs(compute, communication, hidden)


def _backward(by: Coefficients, step: Step) -> float:
    return BACKWARD_SHARE * by.per_row * step.rows


def is_longer(by: Coefficients, step: Step) -> bool:
    """Whether communication takes longer than backward."""
    return costs(by, step).communication > _backward(by, step)


def columns(step: Step) -> tuple[float, ...]:
    """The factor of each linear coefficient in a step without any overlap."""
    one, others = float(step.rows > 0), step.sharing - 1
    return (one, step.rows, one * others, step.rows * others, step.sent, float(step.hops))


def columns_with_overlap(step: Step, overlap: float, *, longer: bool) -> tuple[float, ...]:
    """The factors of a step with overlap. They are linear given whether communication is ``longer`` than backward.

    If it is, a share of backward is subtracted, and else a share of communication.
    """
    base, rows, shared, shared_rows, sent, hops = columns(step)
    hidden = overlap * step.hidable
    if not step.bytes:
        return (base, rows, shared, shared_rows, sent, hops)
    if longer:
        return (base, rows * (1 - hidden * BACKWARD_SHARE), shared, shared_rows, sent, hops)
    return (base, rows, shared, shared_rows, sent * (1 - hidden), hops * (1 - hidden))
