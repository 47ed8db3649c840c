"""What DistributedDataParallel sends in a step, and when: a communication hook that does what the built-in one does."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from samebits.records.breakdown import Bucket

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Tracer:
    """Notes the all-reduces of each backward pass; ``begin`` is called where one begins."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._steps: list[list[_AllReduce]] = []
        self._begun: list[float | torch.cuda.Event] = []

    def begin_step(self) -> None:
        """The buckets that follow are of another step."""
        self._steps.append([])

    def begin_backward(self) -> None:
        """The times of buckets count from the first backward pass of a step."""
        if len(self._begun) < len(self._steps):
            self._begun.append(self._now())

    def hook(self, group: ProcessGroup | None):  # type: ignore[no-untyped-def]  # DDP reads types
        """A communication hook, whose sum is divided as DDP's own is."""
        ranks = dist.get_world_size(group)

        def all_reduce(_, bucket):  # type: ignore[no-untyped-def]
            noted = _AllReduce(bucket.buffer().nbytes, self._now())
            if self._steps:
                self._steps[-1].append(noted)
            future = dist.all_reduce(bucket.buffer().div_(ranks), group=group, async_op=True).get_future()

            def done(future):  # type: ignore[no-untyped-def]
                noted.done = self._now()
                return future.value()[0]

            return future.then(done)

        return all_reduce

    def buckets(self) -> tuple[Bucket, ...]:
        """The all-reduces of a step, in order, if all steps had as many."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
        steps = [step for step in self._steps if len(step) == len(self._steps[-1])]
        begun = self._begun[-len(steps) :]
        return tuple(
            Bucket(
                size_bytes=same[0].size_bytes,
                ready_ms=median(_ms(start, one.ready) for start, one in zip(begun, same, strict=True)),
                done_ms=median(_ms(start, one.done) for start, one in zip(begun, same, strict=True)),
            )
            for same in zip(*steps, strict=True)
        )

    def _now(self) -> float | torch.cuda.Event:
        """Now, on the host or on the current stream: in a hook's continuation that is one that waits for the sum."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


class _AllReduce:
    """One all-reduce: its bytes, and when it was ready and done."""

    def __init__(self, size_bytes: int, ready: float | torch.cuda.Event) -> None:
        self.size_bytes, self.ready = size_bytes, ready
        self.done = ready


def _ms(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(begin, float):
        assert isinstance(end, float)
        return 1e3 * (end - begin)
    assert not isinstance(end, float)
    return float(begin.elapsed_time(end))
