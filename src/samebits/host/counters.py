"""Counters of this machine during a training: CPU, memory, disk and network from psutil, GPUs from NVML."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from samebits.host.gpus import gpu_counters

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SAMPLE_VARIABLE = "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL"
SAMPLE_SECONDS = 10.0
"""The default of MLflow's own monitor."""


def sample_seconds() -> float:
    """Seconds between samples: the value of MLflow's variable if it is a positive number, else the default."""
    with suppress(ValueError):
        seconds = float(os.environ.get(SAMPLE_VARIABLE, ""))
        if seconds > 0:
            return seconds
    return SAMPLE_SECONDS


class Counters:
    """Counters of this machine, named as MLflow's system metrics.

    ``gpus`` are the CUDA indices of the GPUs in use, counted under the CUDA_VISIBLE_DEVICES of ``environ``. Means cover
    the time since the last sample, and totals that since the object was made. Unreadable counters are left out.
    """

    def __init__(self, gpus: Sequence[int], environ: Mapping[str, str] = os.environ) -> None:
        import psutil  # imported here: in a training on one machine only the sender samples

        self._gpus, self._environ = gpus, environ
        psutil.cpu_percent()
        self._network = psutil.net_io_counters()

    def sample(self) -> dict[str, float]:
        """One sample: percentages, megabytes (10**6 bytes), and ``gpu_counters``."""
        values: dict[str, float] = {}
        for read in (_cpu, _memory, _disk, self._sent):
            # psutil's errors, or its None, where a kernel hides a counter
            with suppress(OSError, RuntimeError, AttributeError):
                values |= read()
        return values | gpu_counters(self._gpus, self._environ)

    def _sent(self) -> dict[str, float]:
        import psutil

        now, before = psutil.net_io_counters(), self._network
        return {
            "network_receive_megabytes": (now.bytes_recv - before.bytes_recv) / 1e6,
            "network_transmit_megabytes": (now.bytes_sent - before.bytes_sent) / 1e6,
        }


def _cpu() -> dict[str, float]:
    import psutil

    return {"cpu_utilization_percentage": psutil.cpu_percent()}


def _memory() -> dict[str, float]:
    import psutil

    memory = psutil.virtual_memory()
    return {
        "system_memory_usage_megabytes": memory.used / 1e6,
        "system_memory_usage_percentage": round(100 * memory.used / memory.total, 1),
    }


def _disk() -> dict[str, float]:
    import psutil

    disk = psutil.disk_usage(os.sep)
    return {
        "disk_usage_percentage": disk.percent,
        "disk_usage_megabytes": disk.used / 1e6,
        "disk_available_megabytes": disk.free / 1e6,
    }
