"""The newest CUDA that NVIDIA's driver runs, against the one that torch is built for."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import pynvml

from samebits.errors import HostError

if TYPE_CHECKING:
    from samebits.host.software import TorchBuild

OLDEST_DRIVER = {12: 525, 13: 580}
"""The oldest branch of the driver that runs every release of a major version of CUDA.

NVIDIA, CUDA Compatibility, "Minor Version Compatibility", table 1.
"""
_SECONDS = 60.0
_QUESTION = "import pynvml; pynvml.nvmlInit(); print(pynvml.nvmlSystemGetCudaDriverVersion_v2())"


def cuda_of_driver() -> str | None:
    """The newest CUDA that the driver runs, as ``13.0``; None where that is not told.

    It is asked in a process of its own: NVML opens CUDA's library to tell it, and this process may fork workers.
    """
    with suppress(subprocess.SubprocessError, ValueError):
        done = subprocess.run(
            [sys.executable, "-P", "-c", _QUESTION], capture_output=True, text=True, timeout=_SECONDS, check=True
        )
        number = int(done.stdout)  # 12040 is CUDA 12.4
        return f"{number // 1000}.{number % 1000 // 10}"
    return None


def major(version: str) -> int:
    """The first number of a version."""
    return int(version.split(".")[0])


def require_driver(build: TorchBuild) -> None:
    """Compare the driver with a build of torch that has CUDA; NVML must have been initialized.

    The driver's own number says enough as long as it is new enough. An older one may run a newer CUDA yet, through
    NVIDIA's package for forward compatibility, and is then asked.

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
        hint=f"make repro TORCH=cpu, or install a driver from {oldest} on",
    )
