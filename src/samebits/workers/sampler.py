"""Reads the counters of the devices during a training, in a thread of rank 0 that limits and reports its own cost."""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from samebits.host import TOTALS, Cores, CoreShares, GpuMeters, Rapl
from samebits.records.usage import CoreUsage, DeviceUsage, Interval, MeanMax, Usage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from samebits.host import GpuReading
    from samebits.records.usage import Roof
    from samebits.strategies.placement import Placement
    from samebits.training.loop import TrainResult

SAMPLE_SECONDS = 1.0
CPU_SHARE = 0.005
"""Share of one core's time that readings may take; they become rarer if they take more."""
WAIT_SHARE = 0.05
"""Share of the time that may be spent in NVML, mostly waiting."""
SHORTEST_ENERGY = {"cuda": 1.0, "cpu": 0.1}
"""Seconds. NVML updates its energy counter about ten times a second, RAPL a thousand times."""

IntervalName = Literal["training", "slices"]


class Sampler:
    """Samples the devices of a placement while a block runs, if it is ``on``.

    Only rank 0 has it ``on``; of several machines, it reads the devices of the first. ``roof`` is measured after the
    training.
    """

    def __init__(self, placement: Placement, *, on: bool, seconds: float = SAMPLE_SECONDS) -> None:
        self._on, self._seconds, self._placement = on, seconds, placement
        self._intervals: dict[IntervalName, Interval] = {}
        self._cpu_seconds = 0.0
        self.roof: Roof | None = None

    @contextmanager
    def during(self, name: IntervalName) -> Iterator[None]:
        """Sample while the block runs; the first and the last reading are taken outside of it."""
        if not self._on:
            yield
            return
        watch = _Watch(self._placement, self._seconds)
        try:
            watch.start()
            yield
            self._intervals[name] = watch.stop()
        finally:
            watch.close()
            self._cpu_seconds += watch.cpu_seconds

    def usage(self, training: TrainResult, samples: int) -> Usage | None:
        """The usage during a training with ``samples`` a step; it covers the steps since the training was continued."""
        interval = self._intervals.get("training")
        if interval is None:
            return None
        steps = len(training.losses) - max(training.resumed, default=0)
        watched = sum(one.seconds for one in self._intervals.values())
        return Usage(
            samples=steps * samples,
            training=interval,
            slices=self._intervals.get("slices"),
            sampler_share=round(self._cpu_seconds / watched, 6) if watched else 0.0,
            roof=self.roof,
        )


class _Watch:
    """The readings of one interval."""

    def __init__(self, placement: Placement, seconds: float) -> None:
        self._placement, self._seconds = placement, seconds
        self._cuda = placement.device_type == "cuda"
        here = placement.devices_by_node[0] if placement.devices_by_node else placement.devices_used
        self._gpus = GpuMeters(placement.devices[:here] if self._cuda else ())
        self._cores = Cores(os.getppid())  # the launcher, whose children are the ranks
        self._pids = self._cores.processes() if self._cuda else set[int]()
        self._rapl: Rapl | None = None
        self._readings: list[dict[int, GpuReading]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="sampler", daemon=True)
        self.cpu_seconds = 0.0

    def start(self) -> None:
        """Read the counters that only rise, and start the thread."""
        self._first_cores = self._cores.read()
        self._first = self._gpus.read(self._pids)
        self._rapl = None if self._cuda else Rapl()
        self._started = time.monotonic()
        self._thread.start()

    def stop(self) -> Interval:
        """Read for the last time and return the interval."""
        seconds = time.monotonic() - self._started
        last = self._gpus.read(self._pids)
        seconds_by_totals = time.monotonic() - self._started
        joules = self._rapl.joules() if self._rapl else None
        last_cores = self._cores.read()
        self.close()
        shares = CoreShares.between(self._first_cores, last_cores) if self._first_cores and last_cores else None
        devices = tuple(
            device_usage(index, first, [one[index] for one in (*self._readings, last)], seconds_by_totals)
            for index, first in self._first.items()
        )
        why = self._why_no_energy(devices, seconds)
        if self._cuda and why is None:
            joules = sum(device.energy_j or 0.0 for device in devices)
        return Interval(
            seconds=round(seconds, 4),
            energy_j=None if why or joules is None else round(joules, 3),
            energy_unavailable=why,
            watts=None if why or joules is None else round(joules / seconds, 2),
            devices=devices,
            cores=shares
            and CoreUsage(
                available=shares.cores, training=shares.training, others=shares.others, throttled=shares.throttled
            ),
        )

    def close(self) -> None:
        """End the thread and release NVML."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._gpus.close()

    def _sample(self) -> None:
        """Read until the interval ends, first after half the period."""
        pause = self._seconds / 2
        while not self._ended.wait(pause):
            began = time.monotonic()
            if self._cuda:
                self._readings.append(self._gpus.read(self._pids, slow=True))
            elif self._rapl:
                self._rapl.joules()  # before its counter wraps around
            used = time.thread_time() - self.cpu_seconds
            self.cpu_seconds += used
            pause = pause_after(self._seconds, used, time.monotonic() - began)

    def _why_no_energy(self, devices: Sequence[DeviceUsage], seconds: float) -> str | None:
        placement = self._placement
        if placement.devices_by_node:
            return "of several machines, counters of the first alone are read"
        if self._rapl and self._rapl.problem:
            return self._rapl.problem
        for device in devices:
            if device.energy_j is None:
                lost, why = device.unreadable.get("device"), device.unreadable.get("energy_j")
                return lost or f"GPU {device.index}: {why}"
        if seconds < SHORTEST_ENERGY[placement.device_type]:
            return f"a training of {seconds:.2g} s is too short for counters of energy"
        return None


def pause_after(seconds: float, used: float, took: float) -> float:
    """Seconds until the next reading, after one with ``used`` seconds of a core and ``took`` seconds in all."""
    return max(seconds, used / CPU_SHARE, took / WAIT_SHARE)


def device_usage(index: int, first: GpuReading, readings: Sequence[GpuReading], seconds: float) -> DeviceUsage:
    """The usage of one GPU from its readings; the last of them is ``seconds`` after ``first``."""
    last = readings[-1]
    names = [name for name in dict.fromkeys(name for one in readings for name in one.values) if name not in TOTALS]
    values = {name: [one.values[name] for one in readings if name in one.values] for name in names}
    rise = {
        name: last.values[name] - first.values[name]
        for name in TOTALS
        if name in first.values and first.values[name] <= last.values.get(name, -1.0)
    }
    ceiling = values.pop("max_sm_clock_mhz", None)
    counters = {name: MeanMax(mean=round(fmean(of), 3), maximum=round(max(of), 3)) for name, of in values.items()}
    for name, value in rise.items():
        if name != "energy_j" and seconds > 0:
            rate = round(value / seconds, 3)
            counters[f"{name}_per_s"] = MeanMax(mean=rate, maximum=rate)
    told = [one.reasons for one in readings if one.reasons is not None]
    shared = [one.shared for one in readings if one.shared is not None]
    went_back = {name: "its counter went back" for name in TOTALS if name in last.values and name not in rise}
    unreadable = {
        name: why
        for name, why in {**went_back, **first.unreadable, **last.unreadable}.items()
        if name not in rise and f"{name}_per_s" not in counters and not (name == "shared" and shared)
    }
    return DeviceUsage(
        index=index,
        readings=len(readings),
        counters=counters,
        unreadable=unreadable,
        reasons={name: round(sum(name in one for one in told) / len(told), 3) for name in sorted({*sum(told, ())})},
        max_sm_clock_mhz=max(ceiling) if ceiling else None,
        energy_j=round(rise["energy_j"], 3) if "energy_j" in rise else None,
        shared=round(fmean(shared), 3) if shared else None,
    )
