"""What changed since an earlier comparison: the speed-ups, and the bits of exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from samebits.results.answers import parallel, speed_up
from samebits.results.text import first_numerics

if TYPE_CHECKING:
    from samebits.results.comparison import Comparison, Row


@dataclass(frozen=True)
class Moved:
    """A run's speed-up now, and its former one; ``sign`` is ▲ or ▼ where their intervals do not overlap, else =."""

    sign: str
    name: str
    now: str
    before: str


@dataclass(frozen=True)
class Since:
    """When and where the earlier comparison was made, what moved, and what became of the bits of exact."""

    when: str
    moved: tuple[Moved, ...]
    bits: str


def since(now: Comparison, before: Comparison) -> Since:
    """What changed since ``before``. Speed-ups of other hosts are not compared."""
    same_host = now.host_fingerprint == before.host_fingerprint
    commit = f", commit {before.git.commit[:7]}" if before.git.commit else ""
    when = f"Since {before.created[:10]}{commit}, {'same host' if same_host else 'on another host'}"
    former = {row.name: row for row in before.rows}
    rows = first_numerics(now)
    moved = [_moved(row, former[row.name]) for row in rows if same_host and parallel(row) and row.name in former]
    return Since(when, tuple(one for one in moved if one), _bits(now, former))


def _moved(row: Row, former: Row) -> Moved | None:
    new, old = row.speedup, former.speedup
    if new is None or old is None:
        return None
    sign = "▲" if new.low > old.high else "▼" if new.high < old.low else "="
    return Moved(sign, row.strategy, speed_up(new), speed_up(old))


def _bits(now: Comparison, former: dict[str, Row]) -> str:
    pairs = [(row, former[row.name]) for row in now.rows if row.numerics == "exact" and row.name in former]
    if not pairs:
        return ""
    return "= same exact bits" if all(a.weights_sha256 == b.weights_sha256 for a, b in pairs) else "≠ other exact bits"
