"""Upper bounds of a host, each measured alone: all-reduces, copies, and the memory traffic of an optimizer."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import torch

from samebits.records.breakdown import AllReduce, Bounds
from samebits.training.meters import synchronize

if TYPE_CHECKING:
    from collections.abc import Callable

    from samebits.training.loop import Trainable
    from samebits.training.worker import Worker

_SIZES = tuple(2**power for power in (12, 16, 20, 22, 24, 26, 28))
_TIMES = 5
_SECONDS = 0.3  # for all sizes together: a slow link skips some, but never the size of the gradients
_COPY_BYTES = {"cpu": 2**25, "cuda": 2**28}


def measure_bounds(trainable: Trainable, half_ms: tuple[float, ...] | None) -> Bounds:
    """The bounds of a training on its devices; every rank must call it."""
    worker, device = trainable.worker, trainable.worker.device
    worker.ranks.barrier()
    copy = _copy_gb_per_s(device)
    return Bounds(
        all_reduces=_all_reduces(worker, gradient_bytes(trainable)) if worker.world_size > 1 else (),
        copy_gb_per_s=copy,
        host_to_device_gb_per_s=_host_to_device_gb_per_s(device) if device.type == "cuda" else None,
        optimizer_floor_ms=_optimizer_bytes(trainable) / copy / 1e6,
        half_ms=half_ms,
    )


def gradient_bytes(trainable: Trainable) -> int:
    """Bytes of the gradients of all trained parameters."""
    return sum(p.nbytes for p in trainable.model.parameters() if p.requires_grad)


def _optimizer_bytes(trainable: Trainable) -> int:
    """Bytes that a step must move: it reads and writes parameters and state, and reads gradients."""
    total = 0
    for group in trainable.optimizer.param_groups:
        for p in group["params"]:
            state = [value for value in trainable.optimizer.state[p].values() if isinstance(value, torch.Tensor)]
            total += 3 * p.nbytes + sum(2 * value.nbytes for value in state)
    return total


def _all_reduces(worker: Worker, bytes_of_gradients: int) -> tuple[AllReduce, ...]:
    """Time all-reduces of as many sizes as time allows. Sizes take turns, so that a slow moment affects all alike."""
    ranks, device = worker.ranks, worker.device
    sizes = (*(size for size in _SIZES if size < bytes_of_gradients), bytes_of_gradients)
    values = {size: torch.zeros(-(-size // 4), device=device) for size in sizes}
    seconds: dict[int, list[float]] = {}
    spent = 0.0
    for size, tensor in values.items():
        (once,) = ranks.max_over_ranks([min(_times(partial(ranks.all_reduce_, tensor), device, 1))])
        spent += _TIMES * once
        if spent < _SECONDS or size in (_SIZES[0], bytes_of_gradients):
            seconds[size] = [once]
    for _ in range(_TIMES):
        for size, measured in seconds.items():
            measured += _times(partial(ranks.all_reduce_, values[size]), device, 1, warm=False)
    return tuple(
        _all_reduce(values[size].nbytes, min(ranks.max_over_ranks(measured)), worker.world_size)
        for size, measured in seconds.items()
    )


def _all_reduce(size_bytes: int, seconds: float, ranks: int) -> AllReduce:
    bus = size_bytes / seconds * 2 * (ranks - 1) / ranks / 1e9
    return AllReduce(size_bytes=size_bytes, ms=1e3 * seconds, bus_gb_per_s=bus)


def _copy_gb_per_s(device: torch.device) -> float:
    source = torch.ones(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source).copy_(source)
    return 2 * source.nbytes / min(_times(lambda: target.copy_(source), device)) / 1e9


def _host_to_device_gb_per_s(device: torch.device) -> float:
    source = torch.ones(_COPY_BYTES["cpu"], dtype=torch.uint8, pin_memory=True)
    target = source.to(device)
    return source.nbytes / min(_times(lambda: target.copy_(source, non_blocking=True), device)) / 1e9


def _times(work: Callable[[], object], device: torch.device, times: int = _TIMES, *, warm: bool = True) -> list[float]:
    """Seconds of each call; with ``warm``, one call before them does not count."""
    seconds = []
    for _ in range(warm + times):
        started = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return seconds[warm:]
