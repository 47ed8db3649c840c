"""A stand-in for NVIDIA's management library, which simulates hosts with GPUs.

``nvml.c`` is the library. Each file of ``hosts`` describes a host, one word and its value a line. ``driver`` is a
version, ``cuda`` the newest CUDA that it runs. ``gpus N`` adds N GPUs, which the lines below describe; ``gpu I`` goes
back to one of them. ``slice PROFILE MIB`` adds a MIG slice with the properties so far. ``fails QUESTION ERROR`` lets
NVML answer a question of ``nvml.c``'s list, or ``all``, with an error. ``count_fails ERROR`` and ``driver_fails ERROR``
do the same for the two questions about no single GPU. ``p2p_write`` and ``p2p_nvlink`` are NVML's status of peer
access, 0 for access. Counters rise with time: energy by ``milliwatts``, traffic by ``pcie_bytes_per_s`` and
``nvlink_kib_per_s``. ``process PID`` adds a compute process, and
``persistence off`` ends persistence mode. A later line overrules an earlier one. If
``STAND_IN_NVML_CLOCK`` names a file, its number is the time in seconds.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_HERE = Path(__file__).resolve().parent
TOLD = _HERE / "told"
"""Folder whose ``sitecustomize`` Python imports when it starts."""

HOSTS = {file.stem: file for file in sorted((_HERE / "hosts").glob("*.txt"))}
CUDA = "13.0"
"""CUDA version that torch's version file then names."""


def build(folder: Path) -> Path:
    """Compile the library into a folder, as ``libnvidia-ml.so.1``. Raises CalledProcessError: it does not compile."""
    library = folder / "libnvidia-ml.so.1"
    command = ["cc", "-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{library.name}"]
    subprocess.run([*command, "-o", str(library), str(_HERE / "nvml.c")], check=True)
    return library


def environ(library: Path, host: Path, *, cuda: str | None = CUDA) -> dict[str, str]:
    """Environment in which a process finds the library, and a torch built for ``cuda`` or for the CPU."""
    paths = {"LD_LIBRARY_PATH": library.parent, "PYTHONPATH": TOLD}
    joined = {name: ":".join(filter(None, [str(path), os.environ.get(name)])) for name, path in paths.items()}
    return {**joined, "STAND_IN_NVML": str(host), "STAND_IN_CUDA": cuda or ""}
