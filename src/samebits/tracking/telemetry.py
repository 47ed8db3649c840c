"""Counters of the host while a training goes on, under MLflow's own names for system metrics."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from samebits.host import gpu_counters
from samebits.tracking.recorder import metric

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlflow.entities import Metric

SECONDS = 10.0  # as MLflow's own monitor


class Telemetry(threading.Thread):
    """Samples CPU, memory, disk and network through MLflow's monitors, and the GPUs in use through NVML.

    Not MLflow's own monitor of GPUs: it watches every GPU of the host, and its thread ends when the server is away.
    """

    def __init__(self, gpus: Sequence[int], seconds: float | None = None) -> None:
        super().__init__(daemon=True, name="telemetry")
        from mlflow.environment_variables import MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL
        from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
        from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
        from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

        self._seconds = seconds or MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL.get() or SECONDS  # type: ignore[no-untyped-call]
        self._gpus = gpus
        monitors: list[Any] = [CPUMonitor, DiskMonitor, NetworkMonitor]
        self._monitors = [make() for make in monitors]
        self._done, self._lock = threading.Event(), threading.Lock()
        self._points: list[Metric] = []
        self._samples = 0

    def run(self) -> None:
        """Sample until ``stop``; the first sample is taken after one interval, over which MLflow's averages go."""
        while not self._done.wait(self._seconds):
            self.sample()

    def sample(self) -> None:
        """Take one sample of everything."""
        values: dict[str, float] = {}
        for monitor in self._monitors:
            monitor.collect_metrics()
            values |= monitor.aggregate_metrics()
            monitor.clear_metrics()
        values |= gpu_counters(self._gpus)
        when = time.time_ns() // 1_000_000
        with self._lock:
            self._points += [metric(f"system/{name}", value, when, self._samples) for name, value in values.items()]
        self._samples += 1

    def take(self) -> list[Metric]:
        """What was sampled since the last call."""
        with self._lock:
            points, self._points = self._points, []
        return points

    def put_back(self, points: list[Metric]) -> None:
        """Keep points that could not be delivered."""
        with self._lock:
            self._points = points + self._points

    def stop(self) -> None:
        """End the thread."""
        self._done.set()
