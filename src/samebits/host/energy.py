"""Energy of the processor's packages, from the kernel's RAPL counters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from samebits.errors import reason

POWERCAP = Path("/sys/class/powercap")


@dataclass
class _Package:
    """A package's counter in microjoules: it wraps after ``range``, and ``seen`` is its last value."""

    file: Path
    range: int
    seen: int


class Rapl:
    """Energy of all packages since the object was made, by all processes on them.

    A counter wraps after some minutes at full load, so it must be read more often. ``problem`` says why there is no
    counter. Format: the kernel's Documentation/power/powercap/powercap.rst.
    """

    def __init__(self, root: Path = POWERCAP) -> None:
        self.problem: str | None = None
        self._joules = 0.0
        self._packages: list[_Package] = []
        try:
            for zone in sorted(root.glob("intel-rapl:*")):
                if (zone / "name").read_text(encoding="ascii").startswith("package"):
                    file = zone / "energy_uj"
                    limit = int((zone / "max_energy_range_uj").read_text(encoding="ascii"))
                    self._packages.append(_Package(file, limit, _microjoules(file)))
        except (OSError, ValueError) as error:
            self._fail(reason(error))
        if not self._packages and not self.problem:
            self._fail("the kernel shows no RAPL counter of a package, nor is there a GPU's")

    def joules(self) -> float | None:
        """Joules so far; None if there is a ``problem``."""
        try:
            for package in self._packages:
                now = _microjoules(package.file)
                self._joules += (now - package.seen + (package.range if now < package.seen else 0)) / 1e6
                package.seen = now
        except (OSError, ValueError) as error:
            self._fail(reason(error))
        return None if self.problem else self._joules

    def _fail(self, why: str) -> None:
        self.problem, self._packages = why, []


def _microjoules(file: Path) -> int:
    return int(file.read_text(encoding="ascii"))
