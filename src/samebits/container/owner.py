"""Who removes a container: the process that made it, or, where that was killed, whoever comes next."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from docker import DockerClient

OWNER = "samebits.owner"
"""Label with the process that removes a container."""


def sweep(client: DockerClient) -> list[str]:
    """Remove the caller's containers whose owner has ended without doing so; their ids.

    An owner in another namespace of processes cannot be seen and is left alone. After a restart of the host none lives.
    """
    from docker.errors import APIError

    swept = []
    for container in client.containers.list(all=True, filters={"label": OWNER}, ignore_removed=True):
        owner = container.labels[OWNER]
        uid, boot, space, pid, _ = [*owner.split(":"), "", "", "", ""][:5]
        if uid != str(os.geteuid()):
            continue
        if boot != _boot() or (space == _space() and identity(pid) != owner):
            with suppress(APIError):
                container.remove(force=True, v=True)
                swept.append(str(container.id))
    return swept


def identity(pid: int | str) -> str:
    """A process of the caller's: where it is, its number, and its time of start, because numbers come again."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return ""
    return f"{os.geteuid()}:{_boot()}:{_space()}:{pid}:{fields[19]}"


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _space() -> str:
    return str(Path("/proc/self/ns/pid").stat().st_ino)
