"""Writes a trace of a few steps, for Perfetto or Chrome."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile

from samebits.training.meters import StepClock

if TYPE_CHECKING:
    from pathlib import Path

    from samebits.training.loop import Trainable

TRACED_STEPS = 3


def write_trace(trainable: Trainable, file: Path, total_steps: int) -> None:
    """Write rank 0's operations and kernels in the first steps; every rank must call it.

    The profiler has no schedule, because its second cycle ends a forked process.
    """
    worker, steps = trainable.worker, min(TRACED_STEPS, total_steps)
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
