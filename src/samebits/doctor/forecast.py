"""The largest batch that fits, told from two steps of different batches: what a step takes is linear in its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class PeakMemory(NamedTuple):
    """The most bytes that each device had in a step of a global batch of so many samples."""

    samples: int
    peaks: tuple[int, ...]


class Forecast(NamedTuple):
    """The largest global batch that is expected to fit, in samples, and the number of the device that sets it."""

    samples: int
    device: int


def largest_batch(small: PeakMemory, large: PeakMemory, rooms: Sequence[int]) -> Forecast | None:
    """Go on along each device's own line until the first of them is full; None where none of them rises.

    ``rooms`` are bytes by device. Each device has its own line because under ``dp`` the first one also holds the whole
    batch, all outputs and the sum of the gradients. A peak is the largest of several lines (forward, backward,
    optimizer), so that it may bend upwards: a forecast far beyond ``large`` may be too high.
    """
    assert large.samples > small.samples, "two different batches are needed"
    forecasts = []
    for number, (a, b) in enumerate(zip(small.peaks, large.peaks, strict=True)):
        bytes_per_sample = (b - a) / (large.samples - small.samples)
        if bytes_per_sample > 0:
            more = (rooms[number] - b) / bytes_per_sample
            forecasts.append(Forecast(max(0, int(large.samples + more)), number))
    return min(forecasts, default=None)
