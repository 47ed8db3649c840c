"""Checks of GPUs and the links between them, cores, shared memory, open files, and disks."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from samebits.doctor.finding import Finding, check, failed, ok, skipped, warning
from samebits.errors import counted
from samebits.here import of_kit
from samebits.host import (
    caution,
    count_cores,
    gpu_counters,
    gpu_links,
    gpu_peers,
    gpu_slowdowns,
    gpus_without_persistence,
    numbers_of_driver,
)
from samebits.host.locks import LOCKS_HINT, lacks_locks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from samebits.host import Gpu, GpuPair

GIB = 2**30
BUSY_PERCENT = 10.0
MIN_SHARED_MEMORY = 1 * GIB  # Docker's default is 64 MB
MIN_OPEN_FILES = 4096
MIN_DISK, LOW_DISK = 1 * GIB, 10 * GIB


@check("devices")
def devices(gpus: Sequence[Gpu], environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Each GPU with its memory, and whether other processes use it."""
    noted = caution(environ)
    findings = [warning(*noted)] if noted else []
    if not gpus:
        hidden = ": CUDA_VISIBLE_DEVICES hides them" if environ.get("CUDA_VISIBLE_DEVICES") == "" else ""
        return findings or [ok(f"no GPU{hidden}; trainings run on CPU cores")]
    counters = gpu_counters(range(len(gpus)), environ)
    numbers = numbers_of_driver(environ)
    findings += [_device(index, gpu, counters, numbers) for index, gpu in enumerate(gpus)]
    for index, reason in gpu_slowdowns(environ).items():
        hint = "look at its cooling and its power supply; figures measured now are no measure of this GPU"
        findings.append(warning(f"its clocks are held down, because {reason}", hint, name=f"gpu {index}"))
    if off := gpus_without_persistence(environ):
        what = f"persistence mode is off on {counted(len(off), 'GPU')}"
        text = f"{what}: the driver takes seconds to start a GPU that no program has open"
        hint = "`sudo nvidia-smi -pm 1`, or run nvidia-persistenced"
        findings.append(warning(text, hint, name="persistence"))
    if len({gpu.name for gpu in gpus}) > 1:
        hint = "choose GPUs of one kind with CUDA_VISIBLE_DEVICES"
        findings.append(warning("the GPUs differ: dp and ddp wait for the slowest at every step", hint))
    return findings


def _device(index: int, gpu: Gpu, counters: Mapping[str, float], numbers: Sequence[int]) -> Finding:
    name, memory = f"gpu {index}", gpu.memory_gib
    text = f"{gpu.name}, {f'memory {memory}' if isinstance(memory, str) else f'{memory:.1f} GiB'}"
    if index < len(numbers) and numbers[index] != index:
        text += f", GPU {numbers[index]} of nvidia-smi"
    used = counters.get(f"gpu_{index}_memory_usage_percentage", 0.0)
    busy = counters.get(f"gpu_{index}_utilization_percentage", 0.0)
    if max(used, busy) <= BUSY_PERCENT:
        return ok(text, name=name)
    hint = "see whose it is with nvidia-smi, and wait or choose other GPUs with CUDA_VISIBLE_DEVICES"
    return warning(f"{text}, {used:.0f}% of it and {busy:.0f}% of its time taken by others", hint, name=name)


@check("float64")
def float64(gpus: Sequence[Gpu]) -> list[Finding]:
    """How fast the GPUs compute in float64, as ``exact`` does; nothing for those whose rate is not known here."""
    known = {_FLOAT64[one]: one for one in (gpu.compute_capability for gpu in gpus) if one in _FLOAT64}
    findings = []
    for rate, capability in sorted(known.items()):
        low, high = slower_in_exact(capability)
        text = f"1/{rate} of float32's rate: exact is estimated to take {low:g} to {high:g} times as long as fast"
        measured = f"{of_kit('`make gpu-check ONLY=cost`')} measures it"
        hint = f"{measured}; the GPUs with half the rate are those for data centers, as A100"
        findings.append(warning(text, hint) if rate > 2 else ok(text))
    return findings


_FLOAT64 = {"7.0": 2, "7.5": 32, "8.0": 2, "8.6": 64, "8.9": 64, "9.0": 2, "10.0": 2, "10.3": 64, "12.0": 64}
"""float32 operations in the time of one of float64, by compute capability (CUDA C++ Programming Guide, "Throughput of
Native Arithmetic Instructions")."""
_SLOWER = ((1.5, 8.0), (20.0, 45.0))
"""Estimates for the built-in models, from few and large products to many short kernels: at half the rate, and below."""


def slower_in_exact(capability: str) -> tuple[float, float]:
    """How many times as long as ``fast`` a step of ``exact`` is estimated to take on a GPU, at least and at most."""
    return _SLOWER[_FLOAT64[capability] > 2]


@check("peer access")
def peers(environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Whether GPUs can access each other's memory, and whether through NVLink."""
    pairs, links = gpu_peers(environ), gpu_links(environ)
    if not pairs:
        return [skipped("needs two GPUs"), skipped("needs two GPUs", name="nvlink")]
    return [_access(pairs, environ), _nvlink(pairs, links)]


def _access(pairs: Sequence[GpuPair], environ: Mapping[str, str]) -> Finding:
    if environ.get("NCCL_P2P_DISABLE", "0") != "0":
        return warning("NCCL_P2P_DISABLE is set: ddp copies every gradient through the host", "unset NCCL_P2P_DISABLE")
    without = [pair for pair in pairs if pair.access is not True]
    if not without:
        return ok(f"between {_pairs(pairs)}")
    return warning(
        f"not between {_named(without)}: dp's replicas and ddp's gradients go through the host's memory",
        "`nvidia-smi topo -p2p w` says why: GeForce cards have no such access, a virtual machine needs the GPUs' whole "
        "group",
    )


def _nvlink(pairs: Sequence[GpuPair], links: Sequence[int]) -> Finding:
    without = [pair for pair in pairs if pair.nvlink is not True]
    up = ", ".join(map(str, sorted(set(links))))
    if not without:
        return ok(f"between {_pairs(pairs)}, {up} links up on each GPU", name="nvlink")
    if any(links):
        hint = "see `nvidia-smi nvlink --status`; behind NVSwitch the fabric manager must run"
        return warning(f"not between {_named(without)}, with {up} links up", hint, name="nvlink")
    hint = "a larger train.global_batch_size sends fewer bytes for each sample"
    return warning("none: gradients cross PCIe, so ddp gains less from a large model", hint, name="nvlink")


def _pairs(pairs: Sequence[object]) -> str:
    return f"all {len(pairs)} pairs" if len(pairs) > 1 else "the two GPUs"


def _named(pairs: Sequence[GpuPair]) -> str:
    """The first three pairs, and NVML's reason if it does not tell of the first."""
    names = [f"{pair.gpus[0]} and {pair.gpus[1]}" for pair in pairs[:3]]
    reason = next((f" ({value})" for value in (pairs[0].access, pairs[0].nvlink) if isinstance(value, str)), "")
    return ", ".join(names) + (f" and {len(pairs) - 3} more pairs" if len(pairs) > 3 else "") + reason


@check("cores")
def cores(gpus: int) -> Finding:
    """Number of cores that this process may use, by its affinity and its control groups' quota."""
    usable, existing = count_cores(), os.cpu_count() or 1
    text = f"{usable} of {existing} usable"
    hint = "give the container or the job more, for instance with docker's --cpus"
    if gpus and usable < gpus:
        return warning(f"{text}, for {gpus} GPUs that need one each", hint)
    if not gpus and usable < 2:
        return warning(f"{text}: one device, so dp and ddp have nothing to share the work with", hint)
    return ok(text)


@check("shared memory")
def shared_memory(gpus: int, folder: Path = Path("/dev/shm")) -> Finding:  # noqa: S108 - read only
    """Whether NCCL has enough shared memory. Without GPUs nothing uses it."""
    hint = "docker's --shm-size 1g or --ipc=host, in Compose shm_size or ipc: host"
    if not folder.is_dir():
        return warning(f"no {folder}: NCCL cannot start", hint) if gpus else skipped(f"no {folder}")
    usage = shutil.disk_usage(folder)
    text = f"{size(usage.free)} free of {size(usage.total)} in {folder}"
    if gpus and usage.free < MIN_SHARED_MEMORY:
        return warning(f"{text}: NCCL may fail with a bus error", hint)
    return ok(text)


@check("open files")
def open_files() -> Finding:
    """Whether this process may open enough files for many ranks or for MLflow's server."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return ok("no limit")
    if soft >= MIN_OPEN_FILES:
        return ok(f"up to {soft}")
    raisable = hard == resource.RLIM_INFINITY or hard >= MIN_OPEN_FILES
    hint = f"ulimit -n {MIN_OPEN_FILES}" if raisable else f"docker's --ulimit nofile={MIN_OPEN_FILES}, or limits.conf"
    return warning(f"up to {soft}: many ranks or MLflow's server may run out of them", hint)


@check("disk")
def disk(folder: Path, *, name: str) -> Finding:
    """Free space and locks in a folder that trainings write to."""
    if not os.access(folder, os.W_OK | os.X_OK):
        return failed("cannot be written to", "check the folder's owner, or whether it is mounted read-only", name=name)
    if reason := lacks_locks(folder):
        return failed(f"files cannot be locked: {reason}", LOCKS_HINT, name=name)
    free = shutil.disk_usage(folder).free
    text, hint = f"{size(free)} free", "free some space; `dvc gc --workspace` removes what runs left"
    if name != "disk":
        hint = "free some space, or set TMPDIR to a folder with more"
    if free < MIN_DISK:
        return failed(f"{text}, needs {size(MIN_DISK)}", hint, name=name)
    if free < LOW_DISK:
        return warning(f"{text}, which a few checkpoints may fill", hint, name=name)
    return ok(text, name=name)


def size(count: float) -> str:
    """A number of bytes as a text, in GiB or MiB."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"
