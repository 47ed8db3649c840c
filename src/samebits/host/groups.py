"""The control groups (cgroups) of this process, of version 1 or 2."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

GROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")


def group_folders(controller: str, *, groups: Path = GROUPS, proc: Path = PROC) -> Iterator[tuple[int, Path]]:
    """Version and folder of this process's control group for a controller, and of each group above it.

    Inside a container the path may be the host's; then only the root of the mount exists.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            yield from ((2, folder) for folder in _upwards(groups, path))
        elif controller in controllers.split(","):
            for mount in dict.fromkeys((controllers, controller)):
                yield from ((1, folder) for folder in _upwards(groups / mount, path))


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    here = mount / path.lstrip("/")
    return (folder for folder in (here, *here.parents) if folder.is_relative_to(mount))
