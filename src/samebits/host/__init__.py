"""What this host has: devices, cores and versions, without importing torch and without touching CUDA.

GPUs are counted through NVML, because a process that has called into CUDA cannot fork workers that use it. This is the
one room that talks to NVML.
"""

from samebits.host.cores import Cores, CoreShares
from samebits.host.counters import Counters, sample_seconds
from samebits.host.devices import (
    allowed_gpus,
    caution,
    count_gpus,
    count_present,
    count_visible,
    may_share_gpus,
    visible_uuids,
)
from samebits.host.energy import Rapl
from samebits.host.facts import HostFacts, boot_id, count_cores, host_facts
from samebits.host.gpu_meters import TOTALS, GpuMeters, GpuReading
from samebits.host.gpus import (
    DriverFacts,
    Gpu,
    GpuPair,
    driver_facts,
    gpu_counters,
    gpu_links,
    gpu_peers,
    gpu_slowdowns,
)
from samebits.host.memory import data_bytes, memory_available, memory_limit, private_bytes, private_peak
from samebits.host.software import TorchBuild, installed, torch_build

__all__ = [
    "TOTALS",
    "CoreShares",
    "Cores",
    "Counters",
    "DriverFacts",
    "Gpu",
    "GpuMeters",
    "GpuPair",
    "GpuReading",
    "HostFacts",
    "Rapl",
    "TorchBuild",
    "allowed_gpus",
    "boot_id",
    "caution",
    "count_cores",
    "count_gpus",
    "count_present",
    "count_visible",
    "data_bytes",
    "driver_facts",
    "gpu_counters",
    "gpu_links",
    "gpu_peers",
    "gpu_slowdowns",
    "host_facts",
    "installed",
    "may_share_gpus",
    "memory_available",
    "memory_limit",
    "private_bytes",
    "private_peak",
    "sample_seconds",
    "torch_build",
    "visible_uuids",
]
