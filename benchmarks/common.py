"""What the benchmarks share: interleaved slices, paired ratios with their spread, and where results are kept.

A shared machine's speed moves by a factor of two within minutes. Variants therefore take turns in short slices,
ratios are formed within a round, and the median is given with a distribution-free interval of it and the range.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from samebits.files import write_json
from samebits.host import fingerprint, host_facts
from samebits.provenance import git_state, versions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from samebits.strategies import Strategy

RESULTS = Path(__file__).parent / "results"


class Ratio(TypedDict):
    """Median of paired ratios, its 95% interval by order statistics, the range, and how many there are."""

    median: float
    interval: tuple[float, float]
    range: tuple[float, float]
    rounds: int


def ratio_of(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """Summarise above / below of paired slices."""
    values = sorted(a / b for a, b in zip(above, below, strict=True))
    count = len(values)
    # The k-th smallest of n values is below the median with probability P(Binomial(n, 1/2) >= k).
    tail, k = 0.5**count, 0
    while tail + math.comb(count, k + 1) * 0.5**count <= 0.025 and k + 1 < count // 2:
        k += 1
        tail += math.comb(count, k) * 0.5**count
    middle = count // 2
    median = values[middle] if count % 2 else (values[middle - 1] + values[middle]) / 2
    return {
        "median": median,
        "interval": (values[k], values[count - 1 - k]),
        "range": (values[0], values[-1]),
        "rounds": count,
    }


@dataclass(frozen=True)
class Variant:
    """Something to time: ``run`` is timed, ``reset`` before it is not."""

    run: Callable[[], None]
    reset: Callable[[], None]


def interleave(
    variants: Mapping[str, Variant], rounds: int, strategy: Strategy, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds of each variant's slice in each round, of the slowest rank; who begins changes from round to round."""
    names = list(variants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            variants[name].reset()
            strategy.barrier()
            started = clock()
            variants[name].run()
            spent = torch.tensor([clock() - started], dtype=torch.float64)
            seconds[name].append(float(strategy.gather(spent).max()))
    return seconds


def verdict(ratio: Ratio) -> str:
    """What the interval allows to say of a ratio to the reference."""
    low, high = ratio["interval"]
    if low <= 1.0 <= high:
        return "no difference shown"
    return "slower" if low > 1.0 else "faster"


def show(name: str, ratio: Ratio) -> None:
    """Print a ratio in one line."""
    (low, high), (least, most) = ratio["interval"], ratio["range"]
    print(
        f"{name}: {ratio['median']:.3f}x (95% interval of the median {low:.3f} to {high:.3f}, range {least:.2f} to "
        f"{most:.2f}, {ratio['rounds']} rounds): {verdict(ratio)}"
    )


def save(name: str, record: dict[str, Any]) -> Path:
    """Write ``results/<host>/<name>.json`` with the host's facts, the commit and the versions beside the figures."""
    facts = host_facts()
    cpu: Any = facts["cpu"]
    gpus: Any = facts["gpus"]
    device = f"{len(gpus)}x-{gpus[0]['name']}" if gpus else f"{cpu['model']}-{cpu['cores']}-cores"
    host = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    path = RESULTS / host / f"{name}.json"
    write_json(
        path,
        {
            "benchmark": name,
            **record,
            "host": facts,
            "host_fingerprint": fingerprint(facts),
            "git": git_state(),
            "versions": versions(),
        },
    )
    return path
