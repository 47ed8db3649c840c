"""What this host has: devices, cores and versions, without importing torch and without touching CUDA.

GPUs are counted through NVML, because a process that has called into CUDA cannot fork workers that use it.
This is the one module that talks to NVML.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import os
import platform
import runpy
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pynvml

from samebits.errors import HostError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_INSTRUCTION_SETS = ("sse4_2", "avx", "avx2", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_tile",
                     "asimd", "sve", "sve2")  # fmt: skip


@contextmanager
def _nvml() -> Iterator[str | None]:
    """Give None when NVML answers, else why it does not."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        yield f"{type(error).__name__}: {error}"
        return
    try:
        yield None
    finally:
        pynvml.nvmlShutdown()


def visible(devices: Sequence[str], setting: str | None) -> list[int]:
    """Indices into ``devices`` (their UUIDs, in PCI order) that CUDA_VISIBLE_DEVICES = ``setting`` leaves.

    CUDA's rules: unset means all; entries are indices or prefixes of a UUID; the first invalid entry ends the
    list; a repeated device makes it empty.

    Raises:
        HostError: the setting names a MIG slice, which NVML does not list.
    """
    if setting is None:
        return list(range(len(devices)))
    if setting.startswith("MIG-"):
        raise HostError(
            f"CUDA_VISIBLE_DEVICES is {setting}: slices of a GPU (MIG) are not supported by UUID",
            hint="name the GPU by its index; CUDA then uses its first slice",
        )
    chosen: list[int] = []
    for entry in (part.strip() for part in setting.split(",")):
        if entry.isdecimal():
            index = int(entry)
        else:
            matches = [i for i, uuid in enumerate(devices) if entry and uuid.startswith(entry)]
            index = matches[0] if len(matches) == 1 else -1
        if not 0 <= index < len(devices):
            break
        if index in chosen:
            return []
        chosen.append(index)
    return chosen


def _gpu_handles(environ: Mapping[str, str]) -> list[Any]:
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        uuids = [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    except pynvml.NVMLError as error:
        raise HostError(f"a GPU cannot be read: {error}", hint="nvidia-smi shows which; it may need a reset") from None
    return [handles[i] for i in visible(uuids, environ.get("CUDA_VISIBLE_DEVICES"))]


def count_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """GPUs that a CUDA program started now would see; 0 where no NVIDIA driver answers or torch has no CUDA."""
    if torch_build()["cuda"] is None:
        return 0
    with _nvml() as problem:
        return 0 if problem else len(_gpu_handles(environ))


def count_cores() -> int:
    """Cores that this process may use: its affinity, and the control group's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores


def torch_build() -> dict[str, str | None]:
    """Version and CUDA release of the installed torch, read from its version file (importing it takes seconds)."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {"version": None, "cuda": None}
    facts = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return {"version": str(facts["__version__"]), "cuda": facts["cuda"]}


def _installed(*names: str) -> str | None:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _cpu() -> dict[str, object]:
    model, flags = platform.processor() or platform.machine(), set[str]()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            model = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = set(value.split())
            break
    sets = [name for name in _INSTRUCTION_SETS if name in flags]
    return {"model": model, "machine": platform.machine(), "cores": count_cores(), "instruction_sets": sets}


def _gpu(handle: Any) -> dict[str, object]:
    """Stable facts of one GPU; what NVML cannot tell is said, not left out."""

    def ask(function: Any, *args: Any) -> Any:
        try:
            answer = function(handle, *args)
        except pynvml.NVMLError as error:
            return f"unavailable: {error}"
        return answer.decode() if isinstance(answer, bytes) else answer

    memory = ask(pynvml.nvmlDeviceGetMemoryInfo)
    capability = ask(pynvml.nvmlDeviceGetCudaComputeCapability)
    return {
        "name": ask(pynvml.nvmlDeviceGetName),
        "memory_gib": memory if isinstance(memory, str) else round(memory.total / 2**30, 2),
        "compute_capability": capability if isinstance(capability, str) else ".".join(map(str, capability)),
        "gpu_cores": ask(pynvml.nvmlDeviceGetNumGpuCores),
    }


def gpu_counters(devices: Sequence[int], environ: Mapping[str, str] = os.environ) -> dict[str, float]:
    """What NVML reads now of some visible GPUs: use in %, memory in % and MB, power in W, temperature, SM clock.

    Names are MLflow's, with the GPU's CUDA index; a counter that cannot be read is left out.
    """
    found: dict[str, float] = {}
    with _nvml() as problem:
        if problem is not None:
            return found
        handles = _gpu_handles(environ)
        for index in (i for i in devices if i < len(handles)):
            for read in _COUNTERS:
                with suppress(pynvml.NVMLError):
                    found |= {f"gpu_{index}_{name}": value for name, value in read(handles[index]).items()}
    return found


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


def driver_facts(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Release of the NVIDIA driver, the newest CUDA that it runs, and the visible GPUs, whatever torch was built for.

    ``problem`` says why no driver answers, and is None where one does.
    """
    facts: dict[str, Any] = {"driver": None, "cuda": None, "gpus": [], "problem": None}
    with _nvml() as problem:
        if problem is not None:
            return {**facts, "problem": problem}
        facts["gpus"] = [_gpu(handle) for handle in _gpu_handles(environ)]
        with suppress(pynvml.NVMLError):
            facts["driver"] = str(pynvml.nvmlSystemGetDriverVersion())
            number = pynvml.nvmlSystemGetCudaDriverVersion()  # 12040 is CUDA 12.4
            facts["cuda"] = f"{number // 1000}.{number % 1000 // 10}"
    return facts


def gpu_peers(environ: Mapping[str, str] = os.environ) -> list[dict[str, Any]]:
    """Every pair of visible GPUs: ``gpus``, and ``access`` and ``nvlink`` as True, False or why NVML cannot tell."""
    with _nvml() as problem:
        if problem is not None:
            return []
        handles = _gpu_handles(environ)
        return [
            {
                "gpus": (first, second),
                "access": _reaches(handles[first], handles[second], pynvml.NVML_P2P_CAPS_INDEX_WRITE),
                "nvlink": _reaches(handles[first], handles[second], pynvml.NVML_P2P_CAPS_INDEX_NVLINK),
            }
            for first, second in itertools.combinations(range(len(handles)), 2)
        ]


def _reaches(first: Any, second: Any, capability: int) -> bool | str:
    try:
        return bool(pynvml.nvmlDeviceGetP2PStatus(first, second, capability) == pynvml.NVML_P2P_STATUS_OK)
    except pynvml.NVMLError as error:
        return f"unavailable: {error}"


def gpu_links(environ: Mapping[str, str] = os.environ) -> list[int]:
    """NVLinks that are up, of each visible GPU."""
    with _nvml() as problem:
        return [] if problem else [_links(handle) for handle in _gpu_handles(environ)]


def _links(handle: Any) -> int:
    up = 0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        with suppress(pynvml.NVMLError):  # a link that this GPU does not have
            up += pynvml.nvmlDeviceGetNvLinkState(handle, link) == pynvml.NVML_FEATURE_ENABLED
    return up


def _multiprocessors(gpus: int) -> list[int]:
    """Multiprocessors of each GPU; imports torch and starts CUDA, so never before a fork."""
    import torch

    return [torch.cuda.get_device_properties(i).multi_processor_count for i in range(gpus)]


def host_facts(environ: Mapping[str, str] = os.environ) -> dict[str, object]:
    """Facts that a timing or a float32 bit may depend on, none of which changes from run to run."""
    nvidia = driver_facts(environ)
    gpus = nvidia["gpus"]
    build = torch_build()
    if gpus and build["cuda"]:
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        for gpu, count in zip(gpus, _multiprocessors(len(gpus)), strict=True):
            gpu["multiprocessors"] = count
    facts: dict[str, object] = {
        "cpu": _cpu(),
        "gpus": gpus,
        "driver": nvidia["driver"],
        "gpus_unavailable": nvidia["problem"],
        "python": platform.python_version(),
        "torch": build["version"],
        "cuda": build["cuda"],
        "nccl": _installed("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
        "numpy": _installed("numpy"),
        "libc": " ".join(platform.libc_ver()).strip() or None,
        **_container(environ),
    }
    return facts


def _container(environ: Mapping[str, str]) -> dict[str, object]:
    """The image that this runs in, as whoever started it says; an empty variable is one that is not known."""
    names = ("image", "image_id", "image_digest", "image_base", "container_toolkit")
    inside = bool(environ.get("SAMEBITS_CONTAINER"))
    return {
        "in_container": inside,
        **{name: (environ.get(f"SAMEBITS_{name.upper()}") or None) if inside else None for name in names},
    }


def fingerprint(facts: Mapping[str, object]) -> str:
    """Twelve hexadecimal digits that two hosts share only if their facts are the same."""
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
