"""The network between two machines: round trips and all-reduces between workers of each pair of nodes."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import time
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # documented, unlisted
from torch.distributed.rendezvous import rendezvous

from samebits.errors import HostError, WorkerError, first_line
from samebits.files import Part
from samebits.host.addresses import own_ip
from samebits.workers.connectivity import knock, open_port
from samebits.workers.rank import failures_reported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch.distributed import Store  # type: ignore[attr-defined]

    from samebits.workers.rank import Reporter

Backend = Literal["gloo", "nccl"]

PAIR_SECONDS = 15.0  # for two machines to connect
BYTES = 2**24  # of an all-reduce
_ROUND_TRIPS, _ALL_REDUCES = 100, 5
_POLL_SECONDS = 0.05


class NodePair(Part):
    """Two nodes by rank, and medians of their measurements, or the ``problem`` between them.

    ``bytes_per_second`` is the size of an all-reduce's tensor over its time. For two ranks this is the bus bandwidth of
    nccl-tests.
    """

    first: int
    second: int
    backend: Backend
    round_trip_seconds: float | None = None
    bytes_per_second: float | None = None
    problem: str = ""


def measure_pairs(backend: Backend, file: Path, reporter: Reporter) -> None:
    """Measure all pairs, in one worker of each node. Node 0's appends each pair to ``file``, as a line of JSON."""

    def unforeseen(error: BaseException) -> WorkerError:
        return WorkerError(f"{type(error).__name__}: {first_line(str(error))}", hint="see what the other machines say")

    with failures_reported(reporter, unforeseen):
        _measure_pairs(backend, file)


def _measure_pairs(backend: Backend, file: Path) -> None:
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = PrefixStore(f"pairs/{backend}", next(rendezvous("env://", rank, count))[0])
    for first, second in itertools.combinations(range(count), 2):
        key = f"{first}-{second}"
        if rank in (first, second):
            pair = _measure(
                PrefixStore(key, store), int(rank == second), NodePair(first=first, second=second, backend=backend)
            )
            if rank == first:
                store.set(key, pair.model_dump_json())
        _wait(partial(store.check, [key]), f"nodes {first} and {second} have not measured")
        if rank == 0:
            with file.open("a", encoding="utf-8") as stream:
                stream.write(store.get(key).decode() + "\n")
    store.add("left", 1)
    if rank == 0:  # its launcher runs the store
        _wait(lambda: store.add("left", 0) == count, "a node has not left")


def _wait(done: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + 3 * PAIR_SECONDS
    while not done():
        if time.monotonic() > deadline:
            raise HostError(f"{otherwise} for {3 * PAIR_SECONDS:g} s", hint="see what the other machines say")
        time.sleep(_POLL_SECONDS)


def _measure(store: Store, rank: int, pair: NodePair) -> NodePair:
    device = torch.device("cuda", 0) if pair.backend == "nccl" else torch.device("cpu")
    limit = datetime.timedelta(seconds=PAIR_SECONDS)
    # Before gloo, which takes more than a minute to fail.
    if pair.backend == "gloo" and (problem := _unreachable(store, rank)):
        return pair.model_copy(update={"problem": problem})
    try:
        dist.init_process_group(pair.backend, store=store, rank=rank, world_size=2, timeout=limit)
        times = list(_times(device, rank))
    except RuntimeError as error:  # all that PyTorch raises for errors of the network
        return pair.model_copy(update={"problem": first_line(str(error))})
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    trips, reductions = times[:_ROUND_TRIPS], times[_ROUND_TRIPS:]
    return pair.model_copy(update={"round_trip_seconds": median(trips), "bytes_per_second": BYTES / median(reductions)})


def _unreachable(store: Store, rank: int) -> str:
    """Why one node does not reach an ephemeral port of the other; empty if both do."""
    ip = own_ip(os.environ.get("GLOO_SOCKET_IFNAME"), os.environ["MASTER_ADDR"])
    for listening in (1, 0):
        if rank == listening:
            with open_port(ip) as server:
                store.set(f"at/{listening}", json.dumps([ip, server.getsockname()[1]]))
                store.wait([f"tried/{listening}"], datetime.timedelta(seconds=PAIR_SECONDS))
        else:
            store.set(f"tried/{listening}", knock(ip, *json.loads(store.get(f"at/{listening}"))))
        if problem := store.get(f"tried/{listening}").decode():
            return problem
    return ""


def _times(device: torch.device, rank: int) -> Iterator[float]:
    """Seconds of each round trip, then of each all-reduce, without a first one of each, which opens connections."""
    ball, gradients = torch.zeros(1, device=device), torch.zeros(BYTES // 4, device=device)

    def round_trip() -> None:
        for sender in (0, 1):
            (dist.send if rank == sender else dist.recv)(ball, 1 - rank)

    for work, times in ((round_trip, _ROUND_TRIPS), (lambda: dist.all_reduce(gradients), _ALL_REDUCES)):
        for turn in range(times + 1):
            begun = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if turn:
                yield time.perf_counter() - begun
