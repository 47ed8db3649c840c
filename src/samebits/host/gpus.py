"""NVML's facts on the visible devices: stable ones, current counters, and the links between GPUs."""

from __future__ import annotations

import itertools
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pynvml

from samebits.errors import HostError
from samebits.files import Part
from samebits.host.devices import Device, chosen, is_silent, nvml, readable, text_of
from samebits.host.software import cuda_of_driver

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class Gpu(Part):
    """Stable facts of one GPU or one slice (MIG). A text in place of a number says why NVML does not tell it.

    ``multiprocessors`` are known only after CUDA has started.
    """

    name: str
    memory_gib: float | str
    compute_capability: str
    gpu_cores: int | str
    multiprocessors: int | None = None


class DriverFacts(Part):
    """NVIDIA's driver, the newest CUDA that it runs, and the visible GPUs, whatever torch is built for.

    ``problem`` says why no driver answers; None if one does. With ``silent``, one is here nevertheless.
    """

    driver: str | None = None
    cuda: str | None = None
    gpus: tuple[Gpu, ...] = ()
    problem: str | None = None
    silent: bool = False


class GpuPair(Part):
    """Two visible GPUs and their links. A text in place of a bool says why NVML does not tell it."""

    gpus: tuple[int, int]
    access: bool | str
    nvlink: bool | str


def _gpu(device: Device) -> Gpu:
    """Facts of a device, with a text in place of each that NVML does not tell."""

    def ask(function: Any, handle: Any = device.handle) -> Any:
        try:
            answer = function(handle)
        except pynvml.NVMLError as error:
            return f"unavailable: {error}"
        return answer.decode() if isinstance(answer, bytes) else answer

    memory = ask(pynvml.nvmlDeviceGetMemoryInfo)
    capability = ask(pynvml.nvmlDeviceGetCudaComputeCapability, device.gpu)
    return Gpu(
        name=ask(pynvml.nvmlDeviceGetName),
        memory_gib=memory if isinstance(memory, str) else round(memory.total / 2**30, 2),
        compute_capability=capability if isinstance(capability, str) else ".".join(map(str, capability)),
        gpu_cores=_CORES_OF_A_SLICE if device.slice else ask(pynvml.nvmlDeviceGetNumGpuCores),
    )


_CORES_OF_A_SLICE = "unavailable: NVML knows those of a whole GPU"


def gpu_counters(devices: Sequence[int], environ: Mapping[str, str] = os.environ) -> dict[str, float]:
    """Current counters of visible GPUs: use in %, memory in % and MB, power in W, temperature in °C, SM clock in MHz.

    Names are MLflow's, with the GPU's CUDA index. Unreadable counters are left out. A slice (MIG) has memory alone: the
    other counters are those of the whole GPU, which other processes use too.
    """
    counters: dict[str, float] = {}
    with nvml() as problem, suppress(HostError):
        known = [] if problem else chosen(environ)
        for index in (i for i in devices if i < len(known)):
            device = known[index]
            if isinstance(device, str):
                continue
            for read in (_memory,) if device.slice else _COUNTERS:
                with suppress(pynvml.NVMLError):
                    counters |= {f"gpu_{index}_{name}": value for name, value in read(device.handle).items()}
    return counters


def _memory(handle: Any) -> dict[str, float]:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return {
        "memory_usage_percentage": round(100 * memory.used / memory.total, 1),
        "memory_usage_megabytes": memory.used / 1e6,
    }


_COUNTERS: tuple[Callable[[Any], dict[str, float]], ...] = (
    _memory,
    lambda handle: {"utilization_percentage": float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)},
    lambda handle: {"power_usage_watts": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000},
    lambda handle: {"temperature_celsius": float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))},
    lambda handle: {"sm_clock_mhz": float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))},
)


def gpu_slowdowns(environ: Mapping[str, str] = os.environ) -> dict[int, str]:
    """Why the hardware slows visible GPUs down now, by CUDA index; unreadable GPUs are left out."""
    slowdowns = {}
    with nvml() as problem, suppress(HostError):
        for index, device in enumerate([] if problem else chosen(environ)):
            if isinstance(device, Device):
                with suppress(pynvml.NVMLError):
                    reasons = pynvml.nvmlDeviceGetCurrentClocksEventReasons(device.gpu)
                    if named := [text for bit, text in _SLOWDOWNS.items() if reasons & bit]:
                        slowdowns[index] = " and ".join(named)
    return slowdowns


_SLOWDOWNS = {
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "it is too hot",
    pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "it is much too hot",
    pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "its power supply asks for it",
}
"""Without idling and the power limit, which any GPU at work may reach."""


def gpus_without_persistence(environ: Mapping[str, str] = os.environ) -> list[int]:
    """CUDA indices of the visible GPUs whose persistence mode is off; without those for which NVML does not tell it."""
    found = []
    with nvml() as problem, suppress(HostError):
        for index, device in enumerate([] if problem else chosen(environ)):
            if isinstance(device, Device):
                with suppress(pynvml.NVMLError):
                    if pynvml.nvmlDeviceGetPersistenceMode(device.gpu) == pynvml.NVML_FEATURE_DISABLED:
                        found.append(index)
    return found


def driver_facts(environ: Mapping[str, str] = os.environ, *, ask_cuda: bool = False) -> DriverFacts:
    """The driver and the visible GPUs; the driver's CUDA version only with ``ask_cuda``, which starts a process.

    Raises:
        HostError: a GPU cannot be read.
    """
    with nvml() as problem:
        if problem is not None:
            return DriverFacts(problem=text_of(problem), silent=is_silent(problem, environ))
        gpus = tuple(_gpu(device) for device in readable(environ))
        driver = None
        with suppress(pynvml.NVMLError):
            driver = str(pynvml.nvmlSystemGetDriverVersion())
        return DriverFacts(driver=driver, cuda=cuda_of_driver() if ask_cuda else None, gpus=gpus)


def gpu_peers(environ: Mapping[str, str] = os.environ) -> list[GpuPair]:
    """Every pair of visible GPUs."""
    with nvml() as problem:
        handles = [] if problem else [device.handle for device in readable(environ)]
        return [
            GpuPair(
                gpus=(first, second),
                access=_reaches(handles[first], handles[second], pynvml.NVML_P2P_CAPS_INDEX_WRITE),
                nvlink=_reaches(handles[first], handles[second], pynvml.NVML_P2P_CAPS_INDEX_NVLINK),
            )
            for first, second in itertools.combinations(range(len(handles)), 2)
        ]


def _reaches(first: Any, second: Any, capability: int) -> bool | str:
    try:
        return bool(pynvml.nvmlDeviceGetP2PStatus(first, second, capability) == pynvml.NVML_P2P_STATUS_OK)
    except pynvml.NVMLError as error:
        return f"unavailable: {error}"


def gpu_links(environ: Mapping[str, str] = os.environ) -> list[int]:
    """Number of active NVLinks of each visible GPU."""
    with nvml() as problem:
        return [] if problem else [_links(device.gpu) for device in readable(environ)]


def _links(handle: Any) -> int:
    up = 0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        with suppress(pynvml.NVMLError):  # a link that this GPU does not have
            up += pynvml.nvmlDeviceGetNvLinkState(handle, link) == pynvml.NVML_FEATURE_ENABLED
    return up
