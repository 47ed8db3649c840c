"""What a step of ddp costs: the cost model of ``docs/concepts/dp-and-ddp.md`` with coefficients that can be measured.

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
"""Of the computation that grows with the samples: backward multiplies matrices twice where forward does once."""


class Step(Part):
    """What is done in a step: ``devices`` at once, each with so many ``rows``, ``sharing`` of them on one host.

    ``bytes`` are the gradients that are reduced over all devices in so many ``messages``, 0 where nothing is. A step
    without rows is an all-reduce alone.
    """

    devices: int
    rows: float
    bytes: int = 0
    messages: int = 1
    sharing: int = 1

    @property
    def hops(self) -> int:
        """Messages that a device sends one after the other."""
        return 2 * (self.devices - 1) * self.messages if self.bytes else 0

    @property
    def sent(self) -> float:
        """Bytes that each device sends, and as many does it receive."""
        return 2 * (self.devices - 1) / self.devices * self.bytes

    @property
    def hidable(self) -> float:
        """The share of an all-reduce, and of backward, that can run beside the other: all but the last bucket."""
        return 1 - 1 / self.messages


class Coefficients(Part):
    """What a step is made of, in seconds: of a step, a sample, another device, a byte that is sent, a message.

    ``overlap`` is the share of what could be hidden behind backward that is.
    """

    fixed: float = 0.0
    per_row: float = 0.0
    contention: float = 0.0
    contention_per_row: float = 0.0
    per_byte: float = 0.0
    latency: float = 0.0
    overlap: float = 0.0


LINEAR = ("fixed", "per_row", "contention", "contention_per_row", "per_byte", "latency")
"""The coefficients that a step's time is linear in, in the order of ``columns``."""


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
    """What a step costs by these coefficients."""
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
    """How often each linear coefficient is in a step of which nothing is hidden."""
    one, others = float(step.rows > 0), step.sharing - 1
    return (one, step.rows, one * others, step.rows * others, step.sent, float(step.hops))


def columns_with_overlap(step: Step, overlap: float, *, longer: bool) -> tuple[float, ...]:
    """The same less what is hidden, which is linear once it is known whether communication is ``longer`` than backward.

    Then a share of backward is hidden, else a share of communication.
    """
    base, rows, shared, shared_rows, sent, hops = columns(step)
    hidden = overlap * step.hidable
    if not step.bytes:
        return (base, rows, shared, shared_rows, sent, hops)
    if longer:
        return (base, rows * (1 - hidden * BACKWARD_SHARE), shared, shared_rows, sent, hops)
    return (base, rows, shared, shared_rows, sent * (1 - hidden), hops * (1 - hidden))
