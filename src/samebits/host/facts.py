"""Stable facts of this host, which ``host.json`` holds."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from samebits.errors import HostError, counted, first_line
from samebits.files import Part
from samebits.here import torch_command
from samebits.host.devices import count_gpus
from samebits.host.gpus import DriverFacts, Gpu, driver_facts
from samebits.host.groups import GROUPS, PROC, group_folders
from samebits.host.software import installed, torch_build

if TYPE_CHECKING:
    from collections.abc import Mapping

_IMAGE_FACTS = ("image", "image_id", "image_digest", "image_base", "container_toolkit")
_INSTRUCTION_SETS = ("sse4_2", "avx", "avx2", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_tile",
                     "asimd", "sve", "sve2")  # fmt: skip


class Cpu(Part):
    """The processor and the cores that this process may use."""

    model: str
    machine: str
    cores: int
    instruction_sets: tuple[str, ...]


class HostFacts(Part):
    """Facts that a timing or a float32 bit may depend on, and that stay the same from run to run.

    ``gpus_unavailable`` says why no driver answers. Facts of the image are None outside a container, and where the
    container's environment lacks them.
    """

    cpu: Cpu
    gpus: tuple[Gpu, ...]
    driver: str | None
    gpus_unavailable: str | None
    python: str
    torch: str | None
    cuda: str | None
    nccl: str | None
    numpy: str | None
    libc: str | None
    in_container: bool
    image: str | None
    image_id: str | None
    image_digest: str | None
    image_base: str | None
    container_toolkit: str | None

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits that are the same on two hosts only if all facts are."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def count_cores(*, groups: Path = GROUPS, proc: Path = PROC) -> int:
    """Number of cores that this process may use, by its affinity and the lowest quota of its control groups."""
    quotas = []
    for version, folder in group_folders("cpu", groups=groups, proc=proc):
        with suppress(OSError, ValueError):  # no such group, or "max"
            quotas.append(_quota(folder, version))
    return max(1, min([len(os.sched_getaffinity(0)), *(quota for quota in quotas if quota is not None)]))


def _quota(folder: Path, version: int) -> int | None:
    """Whole cores that a control group may use; None without a limit."""
    names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    quota, period = " ".join((folder / name).read_text(encoding="ascii") for name in names).split()
    return None if quota in ("max", "-1") else int(quota) // int(period)


def boot_id() -> str:
    """The random id that the kernel has drawn at its start."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _cpu() -> Cpu:
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
    sets = tuple(name for name in _INSTRUCTION_SETS if name in flags)
    return Cpu(model=model, machine=platform.machine(), cores=count_cores(), instruction_sets=sets)


def _multiprocessors(gpus: int) -> list[int]:
    """Multiprocessors of each GPU. Imports torch and starts CUDA, so never before a fork."""
    import torch

    try:
        return [torch.cuda.get_device_properties(i).multi_processor_count for i in range(gpus)]
    except torch.cuda.DeferredCudaCallError as error:  # not a RuntimeError, although it wraps one
        raise RuntimeError(str(error.__cause__ or error)) from None


def _with_multiprocessors(gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """GPUs with the multiprocessors that CUDA counts. Raises HostError: CUDA does not start, or lacks one of them."""
    try:
        counts = _multiprocessors(len(gpus))
    except (RuntimeError, AssertionError, OSError) as error:  # all that torch raises for errors of CUDA's libraries
        text = f"torch cannot use the {counted(len(gpus), 'GPU')} that the driver shows: {first_line(str(error))}"
        raise HostError(text, hint=f"`samebits doctor` tries each GPU; {torch_command('cpu')} uses none") from None
    return tuple(gpu.model_copy(update={"multiprocessors": count}) for gpu, count in zip(gpus, counts, strict=True))


def host_facts(environ: Mapping[str, str] = os.environ) -> HostFacts:
    """The stable facts of this host. Starts CUDA if torch can use GPUs.

    Raises:
        HostError: a GPU cannot be read, or CUDA does not start.
    """
    build = torch_build()
    usable = count_gpus(environ)  # compares the driver with torch's CUDA
    try:
        nvidia = driver_facts(environ)
    except HostError as error:
        if build.cuda is not None:  # torch would use the GPU that cannot be read
            raise
        nvidia = DriverFacts(problem=error.message)
    gpus = nvidia.gpus
    if usable:
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        gpus = _with_multiprocessors(gpus)
    inside = bool(environ.get("SAMEBITS_CONTAINER"))

    def from_environment(name: str) -> str | None:
        """A fact from the container's environment; an empty variable counts as unknown."""
        return (environ.get(f"SAMEBITS_{name}") or None) if inside else None

    return HostFacts(
        cpu=_cpu(),
        gpus=gpus,
        driver=nvidia.driver,
        gpus_unavailable=nvidia.problem,
        python=platform.python_version(),
        torch=build.version,
        cuda=build.cuda,
        nccl=installed("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
        numpy=installed("numpy"),
        libc=" ".join(platform.libc_ver()).strip() or None,
        in_container=inside,
        **{name: from_environment(name.upper()) for name in _IMAGE_FACTS},
    )
