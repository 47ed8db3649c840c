"""Divides the memory of a step into weights, buffers, gradients, optimizer state and activations, by device."""

from __future__ import annotations

import ctypes
import os
import weakref
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from samebits.host import memory_limit, private_bytes
from samebits.numerics.dispatch import EagerDispatchMode, tensors_in
from samebits.records.memory import DeviceMemory, Memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from samebits.training.loop import Trainable
    from samebits.training.worker import Worker


def measure_memory(trainable: Trainable, samples: int) -> Memory | None:
    """Make one more step and return the memory of each device at its peak; ``samples`` are those of a step.

    A step must have been made before, so that optimizer and wrapper have allocated their state. Every rank must call
    it, and the caller restores the state.

    On a GPU the figures come from PyTorch's allocator. They leave out CUDA's own context, the allocations of libraries
    such as NCCL, and gaps between tensors. On a CPU a storage is counted from the operation that makes it until it is
    freed. This leaves out temporary memory inside an operation, and freed memory that the C library keeps. A gradient
    counts as such when autograd has finished it; before that, it counts as an activation. The step is made by the model
    itself: of a recording, which a CPU's exact numerics replay, nothing is freed.

    None for a compiled module, whose kernels make no tensors that could be counted.
    """
    if hasattr(trainable.module, "_orig_mod"):
        return None
    worker = trainable.worker
    with trainable.numerics.own_passes():
        kept = _gradients_that_stay(trainable)
        held = _Held(trainable, kept)
        with _watched(worker) as watch, _gradients_told(trainable, set(kept), watch):
            trainable.step(0, trainable.rates(0, 1)[0])
            watch.see()
    here = [held.with_step(number, watch, _capacity(worker, number)) for number in range(len(watch.most))]
    mine = Memory(source="allocator" if worker.cuda_devices else "counted", samples=samples, devices=tuple(here))
    devices = tuple(device for memory in worker.ranks.gather(mine) for device in memory.devices)
    return mine.model_copy(update={"devices": devices})


def _capacity(worker: Worker, number: int) -> int:
    """Bytes of a device of this worker, or this worker's share if several use the device."""
    workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not worker.cuda_devices:
        return memory_limit() // workers
    total: int = torch.cuda.get_device_properties(worker.cuda_devices[number]).total_memory
    return total // -(-workers // torch.cuda.device_count())


# -- what is there before and after a step ---------------------------------------------------------------------


def _storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Each storage once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage for storage in storages}


def _bytes_of(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Bytes of the tensors' storages on a device. AdamW's step counts may be on the CPU."""
    return sum(s.nbytes() for s in _storages(t for t in tensors if t.device.type == device.type).values())


def _gradients_that_stay(trainable: Trainable) -> dict[int, int]:
    """Drop the gradients; return the bytes of storages that remain, by address: ``ddp`` keeps its buckets."""
    parameters = list(trainable.model.parameters())
    storages = _storages(p.grad for p in parameters if p.grad is not None)
    alive = {key: (weakref.ref(storage), storage.nbytes()) for key, storage in storages.items()}
    storages.clear()
    trainable.optimizer.zero_grad(set_to_none=True)
    return {key: count for key, (storage, count) in alive.items() if storage() is not None}


class _Held:
    """Bytes on this worker's first device that are there also between steps."""

    def __init__(self, trainable: Trainable, kept: dict[int, int]) -> None:
        worker, model = trainable.worker, trainable.model
        self._weights = _bytes_of(model.parameters(), worker.device)
        self._buffers = _bytes_of(model.buffers(), worker.device)
        state = (value for one in trainable.optimizer.state.values() for value in one.values())
        self._optimizer = _bytes_of((value for value in state if isinstance(value, Tensor)), worker.device)
        self._gradients = sum(kept.values())
        if worker.cuda_devices:
            self._there = [torch.cuda.memory_allocated(index) for index in worker.cuda_devices]
        else:
            with suppress(AttributeError, OSError):  # GNU's library only: freed memory would count twice
                ctypes.CDLL(None).malloc_trim(0)
            self._there = [private_bytes()]

    def with_step(self, number: int, watch: _Watch, capacity: int) -> DeviceMemory:
        """The parts of one device. Devices after the first hold a replica, and only during the step."""
        most, there = watch.most[number], self._there[number]
        parts = {"weights": self._weights, "buffers": self._buffers}
        if number:
            replica = sum(parts.values()) <= most
            parts = {name: count if replica else 0 for name, count in parts.items()}
            parts |= {"gradients": 0, "optimizer": 0, "activations": most - sum(parts.values()), "baseline": there}
        else:
            gradients = watch.gradients_then
            held = sum(parts.values()) + self._optimizer + self._gradients
            parts |= {"gradients": self._gradients + gradients, "optimizer": self._optimizer}
            parts |= {"activations": max(0, most - gradients), "baseline": max(0, there - held)}
        return DeviceMemory(**parts, capacity=capacity)


# -- what a step has at the most -------------------------------------------------------------------------------


class _Watch:
    """The ``most`` that a step adds on each device, and the new gradients on the first device at that moment."""

    def __init__(self, read: Callable[[], list[int]]) -> None:
        self._read = read
        self.most = [0 for _ in read()]
        self.gradients_then = 0
        self._gradients = 0

    def see(self) -> None:
        """Update the maximum with the reading since the last call."""
        now = self._read()
        if now[0] > self.most[0]:
            self.gradients_then = self._gradients
        self.most = [max(pair) for pair in zip(self.most, now, strict=True)]

    def gradient(self, count: int) -> None:
        """Add a new gradient of ``count`` bytes."""
        self.see()
        self._gradients += count


@contextmanager
def _watched(worker: Worker) -> Iterator[_Watch]:
    """Watch the devices of a worker during a step."""
    devices = worker.cuda_devices
    if not devices:
        counter = _Counter()
        with counter:
            yield _Watch(lambda: [counter.most])
        return
    for index in devices:
        torch.cuda.reset_peak_memory_stats(index)
    before = [torch.cuda.memory_allocated(index) for index in devices]
    yield _Watch(
        lambda: [torch.cuda.max_memory_allocated(index) - was for index, was in zip(devices, before, strict=True)]
    )


@contextmanager
def _gradients_told(trainable: Trainable, kept: set[int], watch: _Watch) -> Iterator[None]:
    """Add each gradient with memory of its own to the watch, once."""
    told: set[int] = set()

    def tell(parameter: Tensor) -> None:
        with torch._C.DisableTorchFunction():  # exact refuses access to it during a step
            grad = parameter.grad
        if grad is not None and id(parameter) not in told and grad.untyped_storage()._cdata not in kept:
            told.add(id(parameter))
            watch.gradient(grad.untyped_storage().nbytes())

    parameters = [p for p in trainable.model.parameters() if p.requires_grad]
    handles = [p.register_post_accumulate_grad_hook(tell) for p in parameters]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Counter(EagerDispatchMode):
    """Counts bytes of storages that operations make: those ``live`` now, and the ``most`` at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = _storages(_strided((args, kwargs)))
        result = func(*args, **(kwargs or {}))
        for key, storage in _storages(_strided(result)).items():
            if key not in given:
                self.live += storage.nbytes()
                weakref.finalize(storage, self._freed, storage.nbytes()).atexit = False
        self.most = max(self.most, self.live)
        return result

    def _freed(self, count: int) -> None:
        self.live -= count


def _strided(tree: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(tree) if tensor.layout is torch.strided]
