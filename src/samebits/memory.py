"""Peak memory per device: the allocator's figure on GPUs, the process's resident set on CPUs."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from samebits.strategies import Strategy

_GIB = 2**30


def reset_peak(strategy: Strategy) -> None:
    """Start measuring."""
    for index in strategy.cuda_devices:
        torch.cuda.reset_peak_memory_stats(index)
    if not strategy.cuda_devices:
        with contextlib.suppress(OSError):  # some containers forbid it; the peak then includes start-up
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_gib(strategy: Strategy) -> list[float]:
    """Peak of each device of this worker since ``reset_peak``, in GiB."""
    if strategy.cuda_devices:
        return [torch.cuda.max_memory_allocated(index) / _GIB for index in strategy.cuda_devices]
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return [int(line.split()[1]) * 1024 / _GIB]
    return [float("nan")]
