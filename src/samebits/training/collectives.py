"""Communication between the ranks of a training, over a process group and its store; none for a single rank."""

from __future__ import annotations

import copy
import datetime
import itertools
import os
import time
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from samebits.errors import WorkerError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from samebits.files import Part

INIT_METHOD = "SAMEBITS_INIT_METHOD"
"""Environment variable with the process group's ``init_method``; if unset, as under torchrun, ``env://``."""

_POLL_SECONDS = (0.0002, 0.05)
"""Least and most time between two looks for the end of rank 0's work."""
_POLL_SHARE = 1 / 8
"""Share of the time waited so far after which a rank looks again: short work is soon seen, long work not disturbed."""
_PIECE_BYTES = 2**26

T = TypeVar("T")
P = TypeVar("P", bound="Part")


class Collectives:
    """Collectives of a single rank, and the base class. Every rank must call each method."""

    group: dist.ProcessGroup | None = None
    """The group over which gradients are summed, None for all ranks."""

    def __init__(self, device: torch.device, rank: int = 0, world_size: int = 1) -> None:
        self._device = device
        self.rank, self.world_size = rank, world_size

    def join(self) -> None:
        """Meet the other ranks."""

    def close(self) -> None:
        """Leave the other ranks."""

    def all_reduce(self, values: Tensor, *, maximum: bool = False) -> Tensor:  # noqa: ARG002
        """The sum or the maximum over ranks."""
        return values.clone()

    def all_reduce_(self, values: Tensor) -> None:
        """Replace the values by their sum over ranks."""

    def max_over_ranks(self, values: Sequence[float]) -> list[float]:
        """The maximum over ranks of each Python number."""
        numbers = torch.tensor(values, dtype=torch.float64, device=self._device)
        maxima: list[float] = self.all_reduce(numbers, maximum=True).tolist()
        return maxima

    def any_rank(self, holds: bool) -> bool:
        """Whether it holds on some rank."""
        return bool(self.max_over_ranks([holds])[0])

    def all_gather(self, values: Tensor) -> Tensor:
        """Values of all ranks, stacked by rank; all have the same shape."""
        return values.unsqueeze(0)

    def gather(self, part: P) -> list[P]:
        """The records of all ranks, by rank."""
        return [part]

    def broadcast(self, values: Tensor) -> None:
        """Fill a CPU tensor of any type with rank 0's values."""

    def broadcast_bytes(self, data: bytes) -> bytes:
        """The bytes of rank 0."""
        (size,) = self.max_over_ranks([len(data) if self.rank == 0 else 0])
        whole = torch.zeros(int(size), dtype=torch.uint8)
        if self.rank == 0:
            whole.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.broadcast(whole)
        return whole.numpy().tobytes()

    def barrier(self) -> None:
        """Wait for all ranks."""

    def first_alone(self, work: Callable[[], T]) -> T | None:
        """Run ``work`` on rank 0 and return its result there; the other ranks wait and get None."""
        return work()

    def within(self, groups: Sequence[Sequence[int]]) -> Collectives:  # noqa: ARG002 - one rank is one group
        """Collectives whose gradients, sums and maxima cover one of these groups; the rest still covers all ranks."""
        return self


class GroupCollectives(Collectives):
    """Collectives of a process group; environment variables of the launcher give the rank."""

    def __init__(self, device: torch.device, backend: str | None, *, timeout_s: float) -> None:
        super().__init__(device, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        self._backend, self._limit = backend, datetime.timedelta(seconds=timeout_s)
        self._numbers = itertools.count()  # of exchanges over the store, shared with copies of this object

    def join(self) -> None:
        """Join the process group. A rank that waits longer than ``timeout_s`` fails."""
        url = os.environ.get(INIT_METHOD, "env://")
        store, *_ = next(rendezvous(url, self.rank, self.world_size))
        # When torchrun restarts workers, it keeps its store with the keys of the earlier ones.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store: Any = PrefixStore(f"attempt{attempt}", store)  # Any: its set takes bytes, too
        dist.init_process_group(
            self._backend,
            store=self._store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=self._limit,
            device_id=self._device if self._backend == "nccl" else None,
        )
        if dist.get_world_size() != self.world_size:
            raise WorkerError("the process group is not whole", hint="see the launcher's messages")

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def all_reduce(self, values: Tensor, *, maximum: bool = False) -> Tensor:
        """See ``Collectives``."""
        reduced = values.clone()
        dist.all_reduce(reduced, op=dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, group=self.group)
        return reduced

    def all_reduce_(self, values: Tensor) -> None:
        """See ``Collectives``."""
        dist.all_reduce(values, group=self.group)

    def all_gather(self, values: Tensor) -> Tensor:
        """See ``Collectives``."""
        parts = [torch.empty_like(values) for _ in range(self.world_size)]
        dist.all_gather(parts, values.contiguous())
        return torch.stack(parts)

    def gather(self, part: P) -> list[P]:
        """The records of all ranks, by rank: JSON over the store, which takes no memory of a device."""
        key = f"samebits/bytes{next(self._numbers)}"
        self._store.set(f"{key}/{self.rank}", part.model_dump_json())
        keys = [f"{key}/{rank}" for rank in range(self.world_size)]
        self._store.wait(keys, self._limit)
        return [type(part).model_validate_json(self._store.get(one)) for one in keys]

    def broadcast(self, values: Tensor) -> None:
        """Fill with rank 0's values, in pieces that fit on every device."""
        if not values.numel():
            return
        for piece in torch.split(values.flatten().view(torch.uint8), _PIECE_BYTES):
            moved = piece.to(self._device)
            dist.broadcast(moved, src=0)
            piece.copy_(moved)

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()

    def first_alone(self, work: Callable[[], T]) -> T | None:
        """Run ``work`` on rank 0; the others wait on the store, so that no time limit of a collective applies."""
        key = f"samebits/work{next(self._numbers)}"
        if self.rank == 0:
            result = work()
            self._store.set(key, "done")
            return result
        began, (least, most) = time.monotonic(), _POLL_SECONDS
        while not self._store.check([key]):
            time.sleep(min(max(least, _POLL_SHARE * (time.monotonic() - began)), most))
        return None

    def within(self, groups: Sequence[Sequence[int]]) -> GroupCollectives:
        """See ``Collectives``."""
        within = copy.copy(self)
        within.group, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
            [list(ranks) for ranks in groups], timeout=self._limit
        )
        return within
