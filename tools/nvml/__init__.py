"""A stand-in for NVIDIA's management library, which answers as GPU hosts that nobody here has.

``nvml.c`` is the library. The files of ``hosts`` describe a host each, a word and its value a line: ``driver`` and
``cuda``, the newest that it runs; then ``gpus N`` for N more GPUs, which the lines below it are about, or ``gpu I`` for
one of them again. ``slice PROFILE MIB`` is a MIG slice of what was said so far. ``fails QUESTION ERROR`` is an answer
by an error of NVML's; the question is one of ``nvml.c``'s list, or ``all``. ``count_fails ERROR`` and ``driver_fails
ERROR`` are the same of the two questions that are of no one GPU. ``p2p_write`` and ``p2p_nvlink`` are NVML's status of
peer access, 0 where there is one. Counters rise with time: the energy by ``milliwatts``, traffic by
``pcie_bytes_per_s`` and ``nvlink_kib_per_s``. ``process PID`` is one more process that computes. A later line overrules
an earlier one. Where ``STAND_IN_NVML_CLOCK`` names a file, its number is the time in seconds.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_HERE = Path(__file__).resolve().parent
TOLD = _HERE / "told"
"""What Python imports when it starts, from this folder."""

HOSTS = {file.stem: file for file in sorted((_HERE / "hosts").glob("*.txt"))}
CUDA = "13.0"
"""What the build of torch is told to be for."""


def build(folder: Path) -> Path:
    """Compile the library into a folder, as ``libnvidia-ml.so.1``. Raises CalledProcessError: it does not compile."""
    library = folder / "libnvidia-ml.so.1"
    command = ["cc", "-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{library.name}"]
    subprocess.run([*command, "-o", str(library), str(_HERE / "nvml.c")], check=True)
    return library


def environ(library: Path, host: Path, *, cuda: str | None = CUDA) -> dict[str, str]:
    """Variables by which a process finds the library on its search path, and torch built for ``cuda`` or the CPU."""
    paths = {"LD_LIBRARY_PATH": library.parent, "PYTHONPATH": TOLD}
    joined = {name: ":".join(filter(None, [str(path), os.environ.get(name)])) for name, path in paths.items()}
    return {**joined, "STAND_IN_NVML": str(host), "STAND_IN_CUDA": cuda or ""}
