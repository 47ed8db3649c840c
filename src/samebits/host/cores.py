"""Use of this process's cores, by this training and by other processes."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from samebits.host.groups import GROUPS, PROC, group_folders

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class CoreTimes:
    """CPU seconds so far: ``busy`` of the usable cores by all processes, ``training`` by this training.

    ``throttled`` are the seconds in which a limit of the control group stopped its processes; None without a limit.
    """

    at: float
    cores: int
    busy: float
    training: float
    throttled: float | None


@dataclass(frozen=True, kw_only=True)
class CoreShares:
    """Usable cores, and the mean number of them that this training and others kept busy.

    ``throttled`` is the share of time in which a limit stopped this training, for each core that it used; None without
    a limit.
    """

    cores: int
    training: float
    others: float
    throttled: float | None

    @classmethod
    def between(cls, before: CoreTimes, after: CoreTimes) -> CoreShares | None:
        """The means over an interval; None if it is too short for clocks with a hundred ticks a second."""
        seconds = after.at - before.at
        if seconds < _SHORTEST:
            return None
        training = max(0.0, after.training - before.training) / seconds
        others = max(0.0, (after.busy - before.busy) / seconds - training)
        throttled = None
        if before.throttled is not None and after.throttled is not None:
            throttled = (after.throttled - before.throttled) / seconds / max(1.0, training)
        throttled = None if throttled is None else round(throttled, 4)
        return cls(cores=after.cores, training=round(training, 3), others=round(others, 3), throttled=throttled)


_SHORTEST = 0.2


class Cores:
    """Reader of the kernel's CPU clocks: of the cores, and of a process with its descendants."""

    def __init__(self, root_pid: int, *, proc: Path = PROC, cgroups: Path = GROUPS) -> None:
        self._root, self._proc = root_pid, proc
        self._ticks = os.sysconf("SC_CLK_TCK")
        self._cpus = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        self._niced = os.nice(0) > 0
        limits = (folder / "cpu.stat" for _, folder in group_folders("cpu", groups=cgroups, proc=proc))
        self._limit = next((file for file in limits if file.is_file()), None)

    def processes(self) -> set[int]:
        """The process and its descendants that still run, by process id."""
        return set(self._family())

    def read(self) -> CoreTimes | None:
        """The clocks now; None if the kernel hides them."""
        try:
            training = sum(self._family().values())
            busy = self._busy()
        except (OSError, ValueError, IndexError):
            return None
        return CoreTimes(time.monotonic(), len(self._cpus), busy=busy, training=training, throttled=self._throttled())

    def _busy(self) -> float:
        """Busy seconds of the usable cores, with the time that a hypervisor gave to other guests.

        Processes that are nicer than this training do not count, because they give way. Interrupts do not count,
        because no process's clock has them, and many are this training's own.
        """
        seconds = 0.0
        for line in (self._proc / "stat").read_text(encoding="ascii").splitlines():
            name, *columns = line.split()
            if name in self._cpus:
                user, nice, system, steal = (int(columns[i]) for i in (0, 1, 2, 7))
                seconds += (user + nice * self._niced + system + steal) / self._ticks
        return seconds

    def _family(self) -> dict[int, float]:
        """CPU seconds of each process of the family, with those of its ended children."""
        parents: dict[int, int] = {}
        seconds: dict[int, float] = {}
        for folder in self._proc.iterdir():
            if not folder.name.isdecimal():
                continue
            with suppress(OSError):  # the process has ended
                columns = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
                parents[int(folder.name)] = int(columns[1])
                counts = self._niced or int(columns[16]) <= 0  # as in ``_busy``
                seconds[int(folder.name)] = counts * sum(map(int, columns[11:15])) / self._ticks
        family, generation = set[int](), {self._root}
        while generation:
            family |= generation
            generation = {pid for pid, parent in parents.items() if parent in generation} - family
        return {pid: seconds[pid] for pid in family if pid in seconds}

    def _throttled(self) -> float | None:
        if self._limit is None:
            return None
        try:
            lines = dict(line.split() for line in self._limit.read_text(encoding="ascii").splitlines())
        except (OSError, ValueError):
            return None
        if "throttled_usec" in lines:  # version 2
            return int(lines["throttled_usec"]) / 1e6
        return int(lines["throttled_time"]) / 1e9 if "throttled_time" in lines else None
