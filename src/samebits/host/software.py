"""Versions of installed packages, and of CUDA: the one that torch is built for, and the newest that the driver runs."""

from __future__ import annotations

import importlib.util
import runpy
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pynvml

from samebits.errors import HostError
from samebits.here import torch_command

OLDEST_DRIVER = {12: 525, 13: 580}
"""The oldest branch of the driver that runs every release of a major version of CUDA.

NVIDIA, CUDA Compatibility, "Minor Version Compatibility", table 1.
"""
OLDEST_GPU = {12: 5.0, 13: 7.5}
"""The lowest compute capability for which PyTorch has kernels, by the major version of its CUDA.

PyTorch's RELEASE.md, "Release Compatibility Matrix"; CUDA 13 has dropped all before Turing.
"""
OTHER_BUILD = "a torch for an older CUDA, by samebits's docs/guides/gpu-hosts.md"
"""The way out, for a hint, where a driver or a GPU is too old for the GPU lock's torch."""
_SECONDS = 60.0
_QUESTION = "import pynvml; pynvml.nvmlInit(); print(pynvml.nvmlSystemGetCudaDriverVersion_v2())"


class TorchBuild(NamedTuple):
    """The installed torch: its version, None without torch, and the CUDA or the HIP (ROCm) that it is built for."""

    version: str | None
    cuda: str | None
    hip: str | None = None


def rocm_unused(build: TorchBuild) -> tuple[str, str] | None:
    """What a build for ROCm means here, with a hint; None for another build."""
    text = f"torch {build.version} is built for ROCm, which the kit does not use: trainings run on the CPU"
    return (text, f"{torch_command('cpu')} to agree") if build.hip else None


def torch_build() -> TorchBuild:
    """The installed torch, read from its version file, because importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return TorchBuild(version=None, cuda=None)
    facts = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return TorchBuild(version=str(facts["__version__"]), cuda=facts["cuda"], hip=facts.get("hip"))


def installed(*names: str) -> str | None:
    """Version of the first of these packages that is installed."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def cuda_of_driver() -> str | None:
    """The newest CUDA that the driver runs, as ``13.0``; None if unknown.

    NVML opens CUDA's library for this answer, and this process may fork workers. So another process asks NVML.
    """
    with suppress(subprocess.SubprocessError, ValueError):
        done = subprocess.run(
            [sys.executable, "-P", "-c", _QUESTION], capture_output=True, text=True, timeout=_SECONDS, check=True
        )
        number = int(done.stdout)  # 12040 is CUDA 12.4
        return f"{number // 1000}.{number % 1000 // 10}"
    return None


def major(version: str) -> int:
    """The major number of a version."""
    return int(version.split(".")[0])


def require_driver(build: TorchBuild) -> None:
    """Compare the driver with a build of torch that has CUDA; NVML must be initialized.

    A driver of a new enough branch is accepted. An older one may still run a newer CUDA, through NVIDIA's package for
    forward compatibility, and is asked for its CUDA version.

    Raises:
        HostError: the driver is too old.
    """
    cuda = build.cuda
    assert cuda, "a CPU build of torch needs no driver"
    oldest = OLDEST_DRIVER.get(major(cuda))
    try:
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        if oldest is None or major(driver) >= oldest:
            return
    except (pynvml.NVMLError, ValueError):
        return
    runs = cuda_of_driver()
    if runs and major(runs) >= major(cuda):
        return
    newest = f"CUDA {runs}" if runs else "an older CUDA"
    raise HostError(
        f"torch {build.version} is built for CUDA {cuda}, and driver {driver} runs up to {newest}",
        hint=f"{torch_command('cpu')}, or install a driver from {oldest} on, or {OTHER_BUILD}",
    )
