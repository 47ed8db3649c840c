"""Phases of a step, measured by the profiling pass, by rank and by turn. Works without torch."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from samebits.files import Part

PhaseName = Literal["data", "scatter", "replicate", "forward", "gather", "backward", "optimizer", "host"]
"""A phase of a step. ``host`` is the time between all others; ``dp`` alone scatters, replicates and gathers."""


class Phases(Part):
    """Milliseconds of a step by phase, on one rank and in one turn.

    ``queued`` is the time in which a ready thread waited for a core; no other phase includes it. On a GPU, phases lie
    between events of its stream, and ``queued`` is 0.
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
        """The whole step in milliseconds."""
        return sum(map(float, self.model_dump().values()))


class RankPhases(Part):
    """One rank's phases by turn: of ordinary steps (``noted``), and of steps without communication (``alone``).

    ``threads`` is the number of threads that one PyTorch operation may use. ``alone`` is empty for a strategy without
    ranks.
    """

    noted: tuple[Phases, ...]
    alone: tuple[Phases, ...] = ()
    threads: int


class Bucket(Part):
    """An all-reduce of gradients on rank 0: when its input was ready and its sum was done.

    Times are in ms from the start of the backward pass, medians over the traced steps.
    """

    size_bytes: int
    ready_ms: float
    done_ms: float


class Traffic(Part):
    """Communication of ddp: the all-reduces of a step in order, bytes of all gradients, and of synchronised buffers."""

    buckets: tuple[Bucket, ...]
    gradient_bytes: int
    buffer_bytes: int

    @property
    def bytes_per_step(self) -> int:
        """Bytes of gradients that a step reduces."""
        return sum(bucket.size_bytes for bucket in self.buckets)

    @property
    def in_flight_ms(self) -> float:
        """Milliseconds of a step in which some all-reduce was ready and not done."""
        taken = end = 0.0
        for bucket in sorted(self.buckets, key=lambda one: one.ready_ms):
            taken += max(0.0, bucket.done_ms - max(bucket.ready_ms, end))
            end = max(end, bucket.done_ms)
        return taken


class Reads(Part):
    """How often the forward pass of a step reads a value from the device into Python, and how long that takes."""

    count: int = 0
    ms: float = 0.0


class Launches(Part):
    """Operations of a step that compute on the device of rank 0. On a GPU each launches a kernel, some launch more.

    ``passes`` are those of the forward and backward passes with the loss. The ``rest`` makes batches and updates
    weights.
    """

    passes: int
    rest: int

    @property
    def total(self) -> int:
        """All of a step."""
        return self.passes + self.rest


class AllReduce(Part):
    """One all-reduce of ``size_bytes`` without other work: the shortest of several times, of the slowest rank.

    ``bus_gb_per_s`` is bytes / time * 2 (n - 1) / n, the bus bandwidth of nccl-tests.
    """

    size_bytes: int
    ms: float
    bus_gb_per_s: float


class Bounds(Part):
    """Bounds of this host.

    ``all_reduces`` are ordered by size; the last one has the size of the real gradients. ``copy_gb_per_s`` counts the
    bytes that a copy within one device's memory reads and writes. ``optimizer_floor_ms`` is the time of the optimizer's
    memory traffic at that rate. ``half_ms`` are steps with half the batch on one device; None if the batch cannot be
    halved, or if several devices share it.
    """

    all_reduces: tuple[AllReduce, ...] = ()
    copy_gb_per_s: float
    host_to_device_gb_per_s: float | None = None
    optimizer_floor_ms: float
    half_ms: Annotated[tuple[float, ...], Field(min_length=1)] | None = None


class Breakdown(Part):
    """The profiling pass of a training.

    Kinds of steps took turns of ``steps`` steps: plain (``plain_ms``), with their phases measured (``noted_ms``), and
    without communication. Each figure is ms of a step, by turn, of the slowest rank. If a model uses more threads than
    its device has, ``one_thread_ms`` has turns that were limited to that number. ``launches`` is None if no step was
    traced. ``other_cores`` is the number of cores that other processes kept busy; None if it cannot be read.
    """

    steps: PositiveInt
    plain_ms: tuple[PositiveFloat, ...] = Field(min_length=1)
    noted_ms: tuple[float, ...]
    one_thread_ms: tuple[float, ...] = ()
    ranks: tuple[RankPhases, ...] = Field(min_length=1)
    traffic: Traffic | None = None
    reads: Reads = Reads()
    launches: Launches | None = None
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
