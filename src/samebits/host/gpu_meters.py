"""Repeated NVML readings of a training's devices."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pynvml

from samebits.errors import HostError
from samebits.host.devices import Device, chosen, nvml, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

REASONS = {
    pynvml.nvmlClocksEventReasonGpuIdle: "gpu_idle",
    pynvml.nvmlClocksEventReasonApplicationsClocksSetting: "applications_clocks_setting",
    pynvml.nvmlClocksEventReasonSwPowerCap: "sw_power_cap",
    pynvml.nvmlClocksThrottleReasonHwSlowdown: "hw_slowdown",
    pynvml.nvmlClocksEventReasonSyncBoost: "sync_boost",
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "sw_thermal_slowdown",
    pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "hw_thermal_slowdown",
    pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "hw_power_brake_slowdown",
    pynvml.nvmlClocksEventReasonDisplayClockSetting: "display_clock_setting",
}
"""Reasons why a clock is not higher, by bit (NVML API Reference, NvmlClocksEventReasons)."""

TOTALS = ("energy_j", "nvlink_tx_mb", "nvlink_rx_mb")
"""Values that only rise; their differences count. All other values are momentary."""

_ALL_LINKS = 0xFFFFFFFF  # NVML's scope for the sum over all links of a GPU
_FIELDS = {
    "nvlink_tx_mb": (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _ALL_LINKS, 1024e-6),
    "nvlink_rx_mb": (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, _ALL_LINKS, 1024e-6),
}
_PCIE = {
    "pcie_tx_mb_per_s": pynvml.NVML_PCIE_UTIL_TX_BYTES,
    "pcie_rx_mb_per_s": pynvml.NVML_PCIE_UTIL_RX_BYTES,
}
_NOT_OF_A_SLICE = "NVML counts it for the whole GPU, not for a slice (MIG)"


@dataclass
class GpuReading:
    """One reading of one device.

    The name of each of the ``values`` ends in its unit; MB are 10**6 bytes. ``unreadable`` says why a value is missing.
    ``reasons`` are the current ones of ``REASONS``, and ``shared`` is whether other processes compute on the device;
    None if unreadable.
    """

    values: dict[str, float] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    reasons: tuple[str, ...] | None = None
    shared: bool | None = None

    @contextmanager
    def noted(self, *names: str) -> Iterator[None]:
        """Keep an NVML error of the block as the reason why the named values are missing."""
        try:
            yield
        except pynvml.NVMLError as error:
            self.unreadable |= dict.fromkeys(names, str(error))


class GpuMeters:
    """Visible devices, by CUDA index. NVML stays initialized until ``close``."""

    def __init__(self, devices: Sequence[int], environ: Mapping[str, str] = os.environ) -> None:
        self._stack = ExitStack()
        self._devices: dict[int, Device | str] = {}
        missing = "NVML does not list it"
        known: list[Device | str] = []
        try:
            if devices and (problem := self._stack.enter_context(nvml())):
                missing = text_of(problem)
            elif devices:
                known = chosen(environ)
        except HostError as error:
            missing = error.message
        self._devices = {i: known[i] if i < len(known) else missing for i in dict.fromkeys(devices)}

    def close(self) -> None:
        """Release NVML."""
        self._stack.close()
        self._devices = {}

    def read(self, pids: Collection[int] = (), *, slow: bool = False) -> dict[int, GpuReading]:
        """One reading of each device; ``pids`` are the processes of this training.

        PCIe traffic is read only if ``slow``, because NVML measures it for 20 ms. NVML's byte counters are no
        alternative: they have 32 bits and wrap several times a second.
        """
        return {index: _read(device, pids, slow=slow) for index, device in self._devices.items()}


def _read(device: Device | str, pids: Collection[int], *, slow: bool) -> GpuReading:
    reading = GpuReading()
    if isinstance(device, str):
        reading.unreadable["device"] = device
        return reading
    for name, ask in _VALUES.items():
        if device.slice is not None and name != "memory_used_mib":
            reading.unreadable[name] = _NOT_OF_A_SLICE
            continue
        with reading.noted(name):
            reading.values[name] = float(ask(device.handle))
    if device.slice is None:
        _read_traffic(device.gpu, reading, slow=slow)
    else:
        reading.unreadable |= dict.fromkeys((*_FIELDS, *_PCIE), _NOT_OF_A_SLICE)
    with reading.noted("reasons"):
        bits = pynvml.nvmlDeviceGetCurrentClocksEventReasons(device.gpu)
        reading.reasons = tuple(name for bit, name in REASONS.items() if bits & bit)
    _read_processes(device, pids, reading)
    return reading


_VALUES: dict[str, Callable[[Any], float]] = {
    "utilization_percent": lambda gpu: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
    "memory_used_mib": lambda device: pynvml.nvmlDeviceGetMemoryInfo(device).used / 2**20,
    "power_w": lambda gpu: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
    "energy_j": lambda gpu: pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3,
    "sm_clock_mhz": lambda gpu: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
    "max_sm_clock_mhz": lambda gpu: pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_SM),
    "temperature_c": lambda gpu: pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU),
}


def _read_traffic(gpu: Any, reading: GpuReading, *, slow: bool) -> None:
    """NVLink traffic so far, and the current rate over PCIe."""
    with reading.noted(*_FIELDS):
        fields = pynvml.nvmlDeviceGetFieldValues(gpu, [(number, scope) for number, scope, _ in _FIELDS.values()])
        for (name, (_, _, unit)), value in zip(_FIELDS.items(), fields, strict=True):
            if value.nvmlReturn == pynvml.NVML_SUCCESS:
                reading.values[name] = value.value.ullVal * unit
            else:
                reading.unreadable[name] = str(pynvml.NVMLError(value.nvmlReturn))
    for name, counter in _PCIE.items() if slow else ():
        with reading.noted(name):
            reading.values[name] = pynvml.nvmlDeviceGetPcieThroughput(gpu, counter) / 1e3


def _read_processes(device: Device, pids: Collection[int], reading: GpuReading) -> None:
    """Whether other processes compute on a device.

    In a container, some drivers list process ids of the host. So the answer counts only if the list has a process of
    this training.
    """
    with reading.noted("shared"):
        listed = {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(device.handle)}
        if listed.isdisjoint(pids):
            reading.unreadable["shared"] = "NVML's list of processes has none of this training's own"
        else:
            reading.shared = not listed <= {*pids}
