"""Where the time of a step goes, as the profiling pass measured it: by rank and by turn; read without torch."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from samebits.files import Part

PhaseName = Literal["data", "scatter", "replicate", "forward", "gather", "backward", "optimizer", "host"]
"""What a step is doing; ``host`` is all between the others. Scattering, replicating and gathering are dp's."""


class Phases(Part):
    """Milliseconds of a step by phase, on one rank and in one turn.

    ``queued`` is the time in which a thread was ready and waited for a core; it is in no other phase. On a GPU phases
    are between events on its stream, and nothing is queued.
    """

    data: float = 0.0
    scatter: float = 0.0
    replicate: float = 0.0
    forward: float = 0.0
    gather: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    host: float = 0.0
    queued: float = 0.0

    @property
    def total(self) -> float:
        """The whole step, in the unit of its phases."""
        return sum(map(float, self.model_dump().values()))


class RankPhases(Part):
    """One rank's phases, by turn: in steps as they are (``noted``), and in steps without communication (``alone``).

    ``threads`` is how many threads an operation of PyTorch's may use. ``alone`` is empty where a strategy has no ranks.
    """

    noted: tuple[Phases, ...]
    alone: tuple[Phases, ...] = ()
    threads: int


class Bucket(Part):
    """An all-reduce of gradients: when the first rank's part was ready, in ms from the start of the backward pass.

    ``done_ms`` is when the sum was there; medians over the traced steps, of rank 0.
    """

    size_bytes: int
    ready_ms: float
    done_ms: float


class Traffic(Part):
    """What ddp sends: the all-reduces of one step in order, the bytes of all gradients, and of synchronised buffers."""

    buckets: tuple[Bucket, ...]
    gradient_bytes: int
    buffer_bytes: int

    @property
    def bytes_per_step(self) -> int:
        """Bytes of gradients that are reduced in a step."""
        return sum(bucket.size_bytes for bucket in self.buckets)


class Reads(Part):
    """How often a forward pass reads a value of the device into Python, in one step, and how long that takes."""

    count: int = 0
    ms: float = 0.0


class AllReduce(Part):
    """An all-reduce alone, of so many bytes: the least of several times, of the slowest rank.

    ``bus_gb_per_s`` is bytes / time * 2 (n - 1) / n, as nccl-tests count it.
    """

    size_bytes: int
    ms: float
    bus_gb_per_s: float


class Bounds(Part):
    """What this host can do at best.

    ``all_reduces`` by size, the last one that of the real gradients; ``copy_gb_per_s`` is bytes read and written in a
    copy inside one device's memory; ``optimizer_floor_ms`` is the optimizer's own traffic at that rate. ``half_ms`` is
    a step of half the batch on one device; None where the batch cannot be halved, or where several devices share it.
    """

    all_reduces: tuple[AllReduce, ...] = ()
    copy_gb_per_s: float
    host_to_device_gb_per_s: float | None = None
    optimizer_floor_ms: float
    half_ms: Annotated[tuple[float, ...], Field(min_length=1)] | None = None


class Breakdown(Part):
    """The profiling pass of a training.

    Steps took turns, ``steps`` of them each: as they are timed (``plain_ms``), with notes of their phases
    (``noted_ms``), and without communication; ms of a step, by turn, of the slowest rank. Where a model asks for more
    threads than its device has, it was also held to that number (``one_thread_ms``). ``other_cores`` is how many cores'
    worth of time other processes used meanwhile, None where it cannot be read.
    """

    steps: PositiveInt
    plain_ms: tuple[PositiveFloat, ...] = Field(min_length=1)
    noted_ms: tuple[float, ...]
    one_thread_ms: tuple[float, ...] = ()
    ranks: tuple[RankPhases, ...] = Field(min_length=1)
    traffic: Traffic | None = None
    reads: Reads = Reads()
    bounds: Bounds
    cores: PositiveInt
    other_cores: float | None

    @model_validator(mode="after")
    def _every_turn_is_whole(self) -> Self:
        some = (self.one_thread_ms, self.bounds.half_ms, *(rank.alone for rank in self.ranks))
        for taken in (self.noted_ms, *(rank.noted for rank in self.ranks), *filter(None, some)):
            if len(taken) != len(self.plain_ms):
                raise ValueError(f"{len(taken)} turns beside {len(self.plain_ms)} of plain_ms")
        if len({bool(rank.alone) for rank in self.ranks}) > 1:
            raise ValueError("some ranks have turns alone, and some have none")
        return self
