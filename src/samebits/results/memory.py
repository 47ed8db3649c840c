"""What a step takes of a device's memory, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from samebits.results.ratios import three_digits
from samebits.strategies import STRATEGIES

if TYPE_CHECKING:
    from samebits.records.memory import DeviceMemory, Memory
    from samebits.strategies import StrategyName

_GIB = 2**30


def gib(count: float) -> str:
    """Bytes in GiB or MiB, with three digits."""
    return f"{three_digits(count / _GIB)} GiB" if count >= _GIB else f"{three_digits(count / 2**20)} MiB"


def say_memory(memory: Memory, strategy: StrategyName) -> str:
    """What a step takes on the fullest device, and what of it."""
    number = memory.fullest
    device = memory.devices[number]
    where = ""
    if len(memory.devices) > 1:
        gathers = STRATEGIES[strategy].gathers and number == 0
        where = f" on device {number}, the fullest" + (", which also holds what dp gathers" if gathers else "")
    rest = "data and workspaces" if memory.source == "allocator" else "the process itself"
    return (
        f"a step of {memory.samples:,} samples takes {gib(device.peak)} of {gib(device.capacity)}{where}: "
        f"{_parts(device)}, and {gib(device.baseline)} {rest}"
    )


def _parts(device: DeviceMemory) -> str:
    names = {"weights": "weights", "buffers": "buffers", "gradients": "gradients", "optimizer": "optimizer state",
             "activations": "activations"}  # fmt: skip
    parts = {words: getattr(device, name) for name, words in names.items()}
    return ", ".join(f"{gib(count)} {words}" for words, count in parts.items() if count)
