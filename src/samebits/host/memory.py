"""Memory limits of this process, by the host and its control groups, and its own memory use."""

from __future__ import annotations

import resource
from contextlib import suppress
from typing import TYPE_CHECKING

from samebits.host.groups import GROUPS, PROC, group_folders

if TYPE_CHECKING:
    from pathlib import Path

_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
"""By version of control groups: the files with limit and use, and the line of ``memory.stat`` with the cache."""
_STATM = ("size", "resident", "shared", "text", "lib", "data")


def memory_limit(*, groups: Path = GROUPS, proc: Path = PROC) -> int:
    """Bytes that all processes here may use together: the host's memory, or the lowest limit of a control group."""
    limits = [limit for limit, _ in _group_limits(groups, proc)]
    return min([_bytes_in(proc / "meminfo")["MemTotal"], *limits])


def memory_available(*, groups: Path = GROUPS, proc: Path = PROC) -> int:
    """Bytes of that limit that are free now. Pages of files that the kernel can drop count as free."""
    left = [max(0, limit - used) for limit, used in _group_limits(groups, proc)]
    return min([_bytes_in(proc / "meminfo")["MemAvailable"], *left])


def private_bytes() -> int:
    """Resident bytes of this process without a file behind them, which the kernel cannot drop."""
    status = _status()
    return status["RssAnon"] if "RssAnon" in status else _pages("resident") - _pages("shared")


def private_peak() -> int:
    """Peak of ``private_bytes`` since the process was forked, or since the peak was reset.

    The kernel keeps the peak of all resident bytes. The current bytes of files and shared memory are subtracted.
    """
    status = _status()
    shared = status["RssFile"] + status["RssShmem"] if "RssFile" in status else _pages("shared")
    return status.get("VmHWM", 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) - shared


def data_bytes() -> int:
    """Bytes of this process that RLIMIT_DATA counts: private writable memory, touched or not."""
    status = _status()
    return status["VmData"] if "VmData" in status else _pages("data")


def _status() -> dict[str, int]:
    """The kernel's figures on this process, in bytes by name. Kernels of sandboxes have fewer than Linux."""
    return _bytes_in(PROC / "self" / "status")


def _bytes_in(file: Path) -> dict[str, int]:
    """The lines ``Name:   123 kB`` of a kernel file, in bytes by name."""
    lines = file.read_text(encoding="ascii", errors="replace").splitlines()
    fields = (line.partition(":") for line in lines if line.endswith(" kB"))
    return {name: 1024 * int(value.split()[0]) for name, _, value in fields}


def _pages(name: str) -> int:
    """A figure of ``statm``, which all kernels have, in bytes. The file counts pages."""
    count = (PROC / "self" / "statm").read_text(encoding="ascii").split()[_STATM.index(name)]
    return int(count) * resource.getpagesize()


def _group_limits(groups: Path, proc: Path) -> list[tuple[int, int]]:
    """Limit and use in bytes, of this process's control group and of each above it that has a limit."""
    limits = []
    for version, folder in group_folders("memory", groups=groups, proc=proc):
        with suppress(OSError, ValueError, StopIteration):  # no such group, or "max"
            limit_file, use_file, cache_line = _FILES[version]
            limit, used = (int((folder / name).read_text(encoding="ascii")) for name in (limit_file, use_file))
            lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
            cache = next(int(line.split()[1]) for line in lines if line.split()[0] == cache_line)
            limits.append((limit, used - cache))
    return limits
