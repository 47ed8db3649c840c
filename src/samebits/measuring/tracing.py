"""Traces single steps: the all-reduces of ddp, reads, launches, and all operations for Perfetto or Chrome."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from samebits.numerics.dispatch import EagerDispatchMode
from samebits.records.breakdown import Bucket, Launches
from samebits.training.meters import StepClock, moment, seconds_between, synchronize

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch.distributed import ProcessGroup

    from samebits.records.breakdown import PhaseName
    from samebits.training.loop import Trainable
    from samebits.training.meters import Moment

_SCALARS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default}
_COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}
_WITHOUT_KERNEL = {
    *_SCALARS,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
_TIMED_READS = 200
_STEPS_FOR_PERFETTO = 3


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


class OperationCounter(EagerDispatchMode):
    """Counts the operations of a step: ``reads`` while ``phase()`` is ``forward``, and launches by phase."""

    def __init__(self, phase: Callable[[], PhaseName]) -> None:
        super().__init__()
        self._phase = phase
        self.reads = 0
        self._launches: Counter[PhaseName] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; count it if it reads a value or computes."""
        outputs, phase = func(*args, **(kwargs or {})), self._phase()
        if phase == "forward":
            self.reads += func in _SCALARS or (func in _COPIES and _to_host(args, outputs))
        self._launches[phase] += _computes(func)
        return outputs

    def launches(self) -> Launches:
        """The operations that compute."""
        passes = self._launches["forward"] + self._launches["backward"]
        return Launches(passes=passes, rest=self._launches.total() - passes)


def _computes(func: Any) -> bool:
    """Whether an operation reads or writes numbers: no view, no allocation, and no note for a profiler."""
    return not (getattr(func, "is_view", False) or func in _WITHOUT_KERNEL or func.namespace == "profiler")


def _to_host(args: Any, outputs: Any) -> bool:
    sources = [value for value in args if isinstance(value, torch.Tensor)]
    return outputs.device.type == "cpu" and any(source.device.type != "cpu" for source in sources)


def read_seconds(device: torch.device) -> float:
    """Seconds to select and read a value of a matrix, on an idle device.

    The matrix requires a gradient, like the outputs of a model.
    """
    values = 1.0 * torch.ones(2, 2, device=device, requires_grad=True)
    values[0, 0].item()
    started = time.perf_counter()
    for row in range(_TIMED_READS):
        values[row % 2, 0].item()
    return (time.perf_counter() - started) / _TIMED_READS


def write_trace(trainable: Trainable, file: Path, total_steps: int) -> None:
    """Write rank 0's operations and kernels in the first steps; every rank must call it.

    The profiler has no schedule, because its second cycle ends a forked process.
    """
    worker, steps = trainable.worker, min(_STEPS_FOR_PERFETTO, total_steps)
    trainable.reset()
    rates = trainable.rates(0, steps)
    worker.ranks.barrier()
    if worker.rank:
        trainable.run(0, rates, StepClock(worker.device))
        return
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if worker.device.type == "cuda" else [])]
    with profile(activities=activities) as profiler:
        for step, rate in enumerate(rates):
            with torch.profiler.record_function(f"step {step + 1}"):
                trainable.run(step, [rate], StepClock(worker.device))
    profiler.export_chrome_trace(str(file))
