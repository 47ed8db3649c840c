"""Times the all-reduces of DistributedDataParallel, by a communication hook that works like the built-in one."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch.distributed as dist

from samebits.records.breakdown import Bucket
from samebits.training.meters import moment, seconds_between, synchronize

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from samebits.records.breakdown import PhaseName
    from samebits.training.meters import Moment


@dataclass
class _AllReduce:
    """One all-reduce: its bytes, and the moments when it was ready and done."""

    size_bytes: int
    ready: Moment
    done: Moment


class Tracer:
    """Records the all-reduces of each step. As the notes of a training, it is called with each ``phase``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: list[list[_AllReduce]] = []
        self._begun: list[Moment] = []
        self.phase: PhaseName = "host"

    def begin_step(self) -> None:
        """The buckets that follow belong to a new step."""
        self._steps.append([])

    def __call__(self, phase: PhaseName) -> None:
        """Begin a phase. The times of a step's buckets count from its first backward pass."""
        self.phase = phase
        if phase == "backward" and len(self._begun) < len(self._steps):
            self._begun.append(moment(self._device))

    def hook(self, group: ProcessGroup | None):  # type: ignore[no-untyped-def]  # DDP reads types
        """A communication hook that averages gradients as DDP's own does."""
        ranks = dist.get_world_size(group)

        def all_reduce(_, bucket):  # type: ignore[no-untyped-def]
            ready = moment(self._device)
            noted = _AllReduce(bucket.buffer().nbytes, ready, done=ready)
            if self._steps:
                self._steps[-1].append(noted)
            future = dist.all_reduce(bucket.buffer().div_(ranks), group=group, async_op=True).get_future()

            def done(future):  # type: ignore[no-untyped-def]
                noted.done = moment(self._device)  # the stream of this continuation waits for the sum
                return future.value()[0]

            return future.then(done)

        return all_reduce

    def buckets(self) -> tuple[Bucket, ...]:
        """The all-reduces of a step in order; steps with another number of them than the last one are left out."""
        synchronize(self._device)
        steps = [step for step in self._steps if len(step) == len(self._steps[-1])]
        begun = self._begun[-len(steps) :]
        return tuple(
            Bucket(
                size_bytes=same[0].size_bytes,
                ready_ms=median(
                    1e3 * seconds_between(start, one.ready) for start, one in zip(begun, same, strict=True)
                ),
                done_ms=median(1e3 * seconds_between(start, one.done) for start, one in zip(begun, same, strict=True)),
            )
            for same in zip(*steps, strict=True)
        )
