"""Draw docs/concepts/images and write the table of docs/concepts/dp-and-ddp.md: ``python tools/pictures.py``.

Both come from one small cost model of a step, so that text, table and pictures agree. A test draws them again and
compares the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pages import between, picture, row

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "concepts" / "images"
PAGE = ROOT / "docs" / "concepts" / "dp-and-ddp.md"


@dataclass(frozen=True)
class Example:
    """A step on one device, and the host around it. Times in ms, sizes in MB, ``link`` in MB per ms (GB per s).

    ``issue`` is the time in which Python issues one replica's forward pass. ``link`` is the rate at which a device
    sends to another and receives at the same time.
    """

    forward: float = 16.0
    backward: float = 32.0
    optimizer: float = 2.0
    issue: float = 2.5
    parameters: float = 100.0
    inputs: float = 38.5
    outputs: float = 0.3
    buckets: int = 4
    link: float = 12.0

    @property
    def single(self) -> float:
        """A step on one device."""
        return self.forward + self.backward + self.optimizer


ROUNDS = 4  # turns of each thread in the picture
PCIE = Example()
NVLINK = replace(PCIE, link=200.0)


def dp_phases(host: Example, devices: int) -> dict[str, float]:
    """The phases of a step of ``nn.DataParallel``. Each waits for the one before."""
    away = (devices - 1) / devices
    return {
        "scatter": away * host.inputs / host.link,
        "replicate": host.parameters / host.link if devices > 1 else 0.0,
        "forward": max(host.forward / devices, devices * host.issue),
        "gather": away * host.outputs / host.link,
        "backward": host.backward / devices,
        "reduce": host.parameters / host.link if devices > 1 else 0.0,
        "optimizer": host.optimizer,
    }


def all_reduce(host: Example, devices: int) -> float:
    """A ring all-reduce of all gradients: each device sends and receives 2 (N - 1) / N of them."""
    return 2 * (devices - 1) / devices * host.parameters / host.link


def ddp_phases(host: Example, devices: int) -> dict[str, float]:
    """The phases of a step of ``DistributedDataParallel``. ``all-reduce`` is its part after the backward pass."""
    backward, reduce, buckets = host.backward / devices, all_reduce(host, devices), host.buckets
    ends = max(backward + reduce / buckets, backward / buckets + reduce)
    return {
        "forward": max(host.forward / devices, host.issue),
        "backward": backward,
        "all-reduce": ends - backward,
        "optimizer": host.optimizer,
    }


def speedup(phases: dict[str, float], host: Example) -> float:
    """Speed-up over one device."""
    return host.single / sum(phases.values())


STEPS: dict[str, Callable[[Example, int], dict[str, float]]] = {"dp": dp_phases, "ddp": ddp_phases}

_COLOURS = {
    "scatter": "#56B4E9", "replicate": "#E69F00", "forward": "#009E73", "gather": "#56B4E9", "backward": "#0072B2",
    "reduce": "#E69F00", "all-reduce": "#E69F00", "optimizer": "#CC79A7", "issue": "#999999",
}  # fmt: skip
_STYLE: Any = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.family": "sans-serif",
    "font.size": 10,
}


def _bar(axes: Axes, lane: float, start: float, length: float, phase: str, *, height: float = 0.7) -> None:
    axes.barh(lane, length, left=start, height=height, color=_COLOURS[phase], edgecolor="white", linewidth=0.8)


def _legend(axes: Axes, phases: list[tuple[str, str]]) -> None:
    for phase, label in phases:
        axes.barh(0, 0, color=_COLOURS[phase], label=label)
    axes.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.18), frameon=False)


def _lanes(axes: Axes, names: list[str], end: float) -> None:
    axes.set(xlabel="ms", xlim=(0, end), ylim=(len(names) - 0.4, -0.6))
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)


def dp_step(axes: Axes) -> None:
    """A step under dp on four devices, with the waits for device 0."""
    devices, phases, now = 4, dp_phases(PCIE, 4), 0.0
    for phase, length in phases.items():
        if phase == "forward":
            # Threads take turns with Python's lock. A device works once its thread has issued something.
            turn, work = PCIE.issue / ROUNDS, PCIE.forward / devices / ROUNDS
            for index in range(ROUNDS * devices):
                start = now + index * turn
                _bar(axes, 0, start, turn, "issue")
                _bar(axes, index % devices + 1, min(start, now + length - work), work, "forward")
        elif phase == "backward":
            for device in range(devices):
                _bar(axes, device + 1, now, length, phase)
        else:
            _bar(axes, 1, now, length, phase)
            for device in range(1, devices if phase != "optimizer" else 1):
                _bar(axes, device + 1, now, length, phase, height=0.25)
        now += length
    _lanes(axes, ["Python", *(f"device {device}" for device in range(devices))], now)
    axes.set_title(f"dp, 4 devices: {now:.1f} ms, {speedup(phases, PCIE):.2f}x", loc="left")
    _legend(axes, [("issue", "Python issues a forward pass"), ("forward", "forward"), ("backward", "backward"),
                   ("scatter", "scatter, gather"), ("replicate", "replicate, reduce"),
                   ("optimizer", "optimizer")])  # fmt: skip


def ddp_step(axes: Axes) -> None:
    """A step under ddp on four devices, on the same scale."""
    devices, phases = 4, ddp_phases(PCIE, 4)
    forward, backward = phases["forward"], phases["backward"]
    reduce = all_reduce(PCIE, devices) / PCIE.buckets
    end = sum(phases.values())
    for rank in range(devices):
        _bar(axes, rank, 0.0, forward, "forward")
        _bar(axes, rank - 0.12, forward, backward, "backward", height=0.46)
        now = forward
        for bucket in range(1, PCIE.buckets + 1):
            now = max(now, forward + backward * bucket / PCIE.buckets)
            _bar(axes, rank + 0.24, now, reduce, "all-reduce", height=0.22)
            now += reduce
        _bar(axes, rank, end - PCIE.optimizer, PCIE.optimizer, "optimizer")
    _lanes(axes, [f"rank {rank}" for rank in range(devices)], sum(dp_phases(PCIE, devices).values()))
    axes.set_title(f"ddp, 4 devices: {end:.1f} ms, {speedup(phases, PCIE):.2f}x", loc="left")
    _legend(axes, [("forward", "forward"), ("backward", "backward"), ("all-reduce", "all-reduce of a bucket"),
                   ("optimizer", "optimizer")])  # fmt: skip


def speedups(axes: Axes) -> None:
    """Speed-up against devices, for both and over two links."""
    counts = range(1, 9)
    axes.plot(counts, counts, color="0.35", linestyle="--", linewidth=1.2, label="ideal")
    for name, colour, marker in (("ddp", "#009E73", "^"), ("dp", "#E69F00", "s")):
        for host, line in ((NVLINK, "-"), (PCIE, ":")):
            values = [speedup(STEPS[name](host, devices), host) for devices in counts]
            axes.plot(counts, values, line, color=colour, marker=marker, label=f"{name}, {host.link:g} GB/s")
    axes.grid(alpha=0.3)
    axes.set(xlabel="devices", ylabel="times the speed of one device")
    axes.set_title("The example, by this page's model", loc="left")
    axes.legend()


_DEVICES = ("#4477AA", "#CCBB44", "#228833")
_SHARDS = 8


def shards(axes: Axes) -> None:
    """Whole shards go to devices. What a shard is does not depend on how many devices there are."""
    for lane, (name, ends) in enumerate({"single": (8,), "2 devices": (4, 8), "3 devices": (3, 6, 8)}.items()):
        for shard in range(_SHARDS):
            device = next(number for number, end in enumerate(ends) if shard < end)
            axes.barh(lane, 0.94, left=shard, color=_DEVICES[device], height=0.7)
            axes.text(shard + 0.47, lane, str(shard), ha="center", va="center", color="white", fontweight="bold")
        axes.text(-0.2, lane, name, ha="right", va="center")
    axes.text(_SHARDS + 0.2, 1, "= the same sum", va="center")
    axes.set(xlim=(-1.9, _SHARDS + 2.2), ylim=(2.6, -0.6))
    axes.axis("off")
    axes.set_title("A batch of 8 shards; a colour is a device", loc="left")


_TERMS = ((0, "1011010011"), (2, "1100111010"), (1, "1110001101"), (4, "1001011001"))
"""Numbers as the place of their first bit, from the top of the window, and their bits."""

_KEPT = 9  # bits of the window


def window(axes: Axes) -> None:
    """Each term is rounded to the grid of a window, so that a sum is the same in any order."""
    for line, (start, bits) in enumerate(_TERMS):
        for place, bit in enumerate(bits, start=start):
            kept = place < _KEPT
            axes.barh(line, 0.9, left=place, height=0.78, color="#4477AA" if kept else "0.88")
            axes.text(place + 0.45, line, bit, ha="center", va="center", color="white" if kept else "0.4")
    axes.axvline(_KEPT - 0.05, color="0.2", linewidth=1.5)
    axes.text(_KEPT - 0.2, len(_TERMS) - 0.25, "rounded to this bit", ha="right", va="top")
    axes.set(xlim=(-0.3, 14.2), ylim=(len(_TERMS) + 0.1, -0.6))
    axes.axis("off")
    axes.set_title("Four terms of a sum on the grid of one window", loc="left")


PICTURES: dict[str, tuple[Callable[[Axes], None], tuple[float, float]]] = {
    "dp-step": (dp_step, (7.2, 3.4)),
    "ddp-step": (ddp_step, (7.2, 3.2)),
    "speedups": (speedups, (5.6, 3.7)),
    "shards": (shards, (6.4, 2.0)),
    "window": (window, (6.4, 2.2)),
}


def draw(name: str) -> str:
    """One picture as SVG, the same bytes each time."""
    plot, size = PICTURES[name]
    return picture(name, size, plot, **_STYLE)


def table() -> str:
    """The example's figures as tables."""
    tables = []
    for strategy, counts in (("dp", (1, 2, 4, 8)), ("ddp", (2, 4, 8))):
        names = list(STEPS[strategy](PCIE, 2))
        lines = [row("ms", *names, "step", "speed-up"), row("---", *["---:"] * (len(names) + 2))]
        for devices in counts:
            phases = STEPS[strategy](PCIE, devices)
            cells = (f"{value:.1f}" for value in [*(phases[name] for name in names), sum(phases.values())])
            lines.append(row(f"{strategy}, {devices}", *cells, f"{speedup(phases, PCIE):.2f}x"))
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def page(text: str) -> str:
    """The page with the current tables."""
    return between("<!-- example -->\n", "<!-- /example -->", f"\n{table()}\n\n", text)


if __name__ == "__main__":
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name in PICTURES:
        (IMAGES / f"{name}.svg").write_text(draw(name), encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
