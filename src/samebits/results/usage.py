"""Use of the devices in a training, from its record: rate, energy, memory and disturbances."""

from __future__ import annotations

from typing import TYPE_CHECKING

from samebits.files import Part
from samebits.results.figures import flops, gib, share
from samebits.strategies import STRATEGIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from samebits.records.measurement import Measurement
    from samebits.records.memory import DeviceMemory, Memory
    from samebits.records.run import RunRecord
    from samebits.records.usage import DeviceUsage, Interval
    from samebits.results.comparison import Row
    from samebits.strategies import StrategyName

OTHERS_CORES = 0.5
"""Others disturb a training if they use more cores than this, and fewer are left over."""
HELD_UP = 0.05
"""Share of the time above which the limit of a control group counts as a disturbance."""
SLOWED = 0.05
"""Share of the readings above which a slowdown of a GPU counts as a disturbance."""

_SLOWDOWNS = {
    "sw_thermal_slowdown": "it was too hot",
    "hw_thermal_slowdown": "it was much too hot",
    "hw_power_brake_slowdown": "its power supply asked for it",
}
"""Reasons of NVML for a lower clock. Idling and the power limit are left out: they are normal for a GPU."""


class RowUsage(Part):
    """Energy in joules for a million samples, and the rate of one device in TFLOP/s with its share of the roof.

    The roof is the rate of a product of matrices of the same precision on the device. The rate is that of the fastest
    slice, or without slices of as few steps of the training: either may be slowed down. A figure is None if it was
    not measured; ``energy_unavailable`` and ``roof_unavailable`` say why, unless nothing was measured at all.
    ``uncounted`` lists operations that the rate leaves out.
    """

    energy_j_per_million_samples: float | None = None
    energy_unavailable: str | None = None
    tflops: float | None = None
    roof_tflops: float | None = None
    roof_share: float | None = None
    roof_unavailable: str | None = None
    uncounted: tuple[str, ...] = ()


FEW_STEPS = 10
"""Steps of a training without slices whose time is that of a fast one."""


def _fastest_step(measured: Measurement) -> float:
    """Seconds of a step in the fastest slice, or in the fastest few steps in a row."""
    slices = [sum(one) / measured.slice_steps for one in measured.chunk_seconds.get("strategy", ()) if sum(one) > 0]
    if slices:
        return min(slices)
    steps = measured.step_ms
    few = min(FEW_STEPS, len(steps))
    return min(sum(steps[first : first + few]) for first in range(len(steps) - few + 1)) / few / 1e3


def row_usage(record: RunRecord) -> RowUsage:
    """The figures of a record."""
    usage = record.usage
    if usage is None:
        return RowUsage()
    joules, roof, tflops = usage.training.energy_j, usage.roof, None
    if roof and roof.flops_per_step:
        seconds = _fastest_step(record.measurement)
        labels = record.placement.labels
        shared = sum(label.workers - label.devices for label in labels if label.kind == "oversubscribed")
        tflops = roof.flops_per_step / seconds / (record.placement.devices_used - shared) / 1e12 if seconds else None
    best = roof.roof_flops / 1e12 if roof and roof.roof_flops else None
    return RowUsage(
        energy_j_per_million_samples=1e6 * joules / usage.samples if joules is not None and usage.samples else None,
        energy_unavailable=usage.training.energy_unavailable,
        tflops=tflops,
        roof_tflops=best,
        roof_share=tflops / best if tflops and best else None,
        roof_unavailable=roof.problem if roof else None,
        uncounted=roof.uncounted if roof else (),
    )


# -- what disturbed a training -----------------------------------------------------------------------------------


def disturbances(record: RunRecord) -> list[str]:
    """What slowed the devices down, or used them as well, as sentences."""
    usage = record.usage
    if usage is None:
        return []
    sentences: dict[str, str] = {}  # each is said once
    for interval, when in ((usage.training, "training"), (usage.slices, "its slices")):
        if interval is not None:
            for what, text in _disturbances_of(interval, when, record):
                sentences.setdefault(what, text)
    return list(sentences.values())


def _disturbances_of(interval: Interval, when: str, record: RunRecord) -> Iterator[tuple[str, str]]:
    """The disturbances of an interval: a key that tells them apart, and a sentence."""
    for device in interval.devices:
        if why := _slowed(device):
            yield f"slowed {device.index}", f"GPU {device.index} was slowed down, as {why}"
        if device.shared:
            yield f"shared {device.index}", f"another process was on GPU {device.index} too"
    cores = interval.cores
    if cores is None or record.placement.device_type != "cpu":
        return
    placed = record.placement
    here = (
        placed.devices_by_node[0] if placed.devices_by_node else placed.devices_used
    )  # the machine whose cores are counted
    left = cores.available - here - cores.others
    if cores.others > OTHERS_CORES and left < OTHERS_CORES:
        yield "cores", f"others used {cores.others:.1f} of {cores.available} cores during {when}"
    if cores.throttled is not None and cores.throttled > HELD_UP:
        yield "limit", f"the control group's limit of CPU time held it up for {cores.throttled:.0%} of the time"


def _slowed(device: DeviceUsage) -> str | None:
    """Why the hardware slowed a GPU down in more than a few readings; None if it did not.

    NVML may give ``hw_slowdown`` also while a clock changes (NVML API Reference, NvmlClocksEventReasons). Without one
    of its causes it counts only if most readings have it, and several were taken.
    """
    named = [text for reason, text in _SLOWDOWNS.items() if device.reasons.get(reason, 0.0) > SLOWED]
    if named:
        return " and ".join(named)
    share = device.reasons.get("hw_slowdown", 0.0)
    return "its hardware asked for it" if share > 0.5 and device.readings > 1 else None


# -- in words ----------------------------------------------------------------------------------------------------


def say_memory(memory: Memory, strategy: StrategyName) -> str:
    """The memory that a step takes on the fullest device or in the largest process, and its parts."""
    number = memory.fullest
    device = memory.devices[number]
    where, measured = "", memory.source == "allocator"
    if len(memory.devices) > 1:
        gathers = STRATEGIES[strategy].gathers and number == 0
        where = f" on device {number}, the fullest" if measured else f" in process {number}, the largest"
        where += ", which also holds what dp gathers" if gathers else ""
    rest = "data and workspaces" if measured else "the process itself"
    return (
        f"a step of {memory.samples:,} samples takes {gib(device.peak)} of {gib(device.capacity)}{where}: "
        f"{_parts(device)}, and {gib(device.baseline)} {rest}"
    )


def _parts(device: DeviceMemory) -> str:
    names = {"weights": "weights", "buffers": "buffers", "gradients": "gradients", "optimizer": "optimizer state",
             "activations": "activations"}  # fmt: skip
    parts = {words: getattr(device, name) for name, words in names.items()}
    return ", ".join(f"{gib(count)} {words}" for words, count in parts.items() if count)


def say_use(rows: Sequence[Row]) -> list[str]:
    """How well a device is used, by the first of ``rows`` whose rate and roof are known."""
    for row in rows:
        if row.tflops is not None and row.roof_tflops is not None:
            return [
                f"A device does {flops(row.tflops, row.roof_tflops)} in {row.name}, {share(row.roof_share)} of the "
                f"{flops(row.roof_tflops)} that a product of matrices of this precision reaches here"
                f"{', while something else may have used this host' if row.uncertain else ''}."
            ]
    return []


def say_gaps(rows: Iterable[RowUsage]) -> list[str]:
    """Why energy or roof are missing, and which operations the rate leaves out; each sentence once."""
    said: list[str] = []
    for row in rows:
        if row.energy_unavailable:
            said.append(f"energy: {row.energy_unavailable}")
        if row.roof_unavailable:
            said.append(f"roof: {row.roof_unavailable}")
        if row.uncounted:
            said.append(f"roof: nothing is counted of {', '.join(row.uncounted)}, for which PyTorch has no formula")
    return list(dict.fromkeys(said))
