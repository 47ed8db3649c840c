"""Devices, cores and versions of this host, without importing torch and without calling CUDA.

GPUs are counted through NVML, because a process that has called CUDA cannot fork workers that use it. No other package
calls NVML.
"""

from samebits.host.cores import Cores as Cores
from samebits.host.cores import CoreShares as CoreShares
from samebits.host.counters import Counters as Counters
from samebits.host.counters import sample_seconds as sample_seconds
from samebits.host.devices import SILENT_HINT as SILENT_HINT
from samebits.host.devices import allowed_gpus as allowed_gpus
from samebits.host.devices import caution as caution
from samebits.host.devices import count_gpus as count_gpus
from samebits.host.devices import count_present as count_present
from samebits.host.devices import count_visible as count_visible
from samebits.host.devices import hide_gpus as hide_gpus
from samebits.host.devices import may_share_gpus as may_share_gpus
from samebits.host.devices import numbers_of_driver as numbers_of_driver
from samebits.host.devices import visible_uuids as visible_uuids
from samebits.host.driver import cuda_has_started as cuda_has_started
from samebits.host.energy import Rapl as Rapl
from samebits.host.facts import HostFacts as HostFacts
from samebits.host.facts import boot_id as boot_id
from samebits.host.facts import count_cores as count_cores
from samebits.host.facts import host_facts as host_facts
from samebits.host.gpu_meters import TOTALS as TOTALS
from samebits.host.gpu_meters import GpuMeters as GpuMeters
from samebits.host.gpu_meters import GpuReading as GpuReading
from samebits.host.gpus import DriverFacts as DriverFacts
from samebits.host.gpus import Gpu as Gpu
from samebits.host.gpus import GpuPair as GpuPair
from samebits.host.gpus import driver_facts as driver_facts
from samebits.host.gpus import gpu_counters as gpu_counters
from samebits.host.gpus import gpu_links as gpu_links
from samebits.host.gpus import gpu_peers as gpu_peers
from samebits.host.gpus import gpu_slowdowns as gpu_slowdowns
from samebits.host.gpus import gpus_without_persistence as gpus_without_persistence
from samebits.host.memory import data_bytes as data_bytes
from samebits.host.memory import memory_available as memory_available
from samebits.host.memory import memory_limit as memory_limit
from samebits.host.memory import private_bytes as private_bytes
from samebits.host.memory import private_peak as private_peak
from samebits.host.software import TorchBuild as TorchBuild
from samebits.host.software import installed as installed
from samebits.host.software import torch_build as torch_build
