"""How a training used its devices: counters, energy, and its rate against the device's own."""

from __future__ import annotations

from samebits.files import Part


class MeanMax(Part):
    """Mean and maximum of a counter's readings. For a counter that only rises, both are its rate."""

    mean: float
    maximum: float


class DeviceUsage(Part):
    """One GPU of the first machine in an interval, by its CUDA index.

    The name of each of the ``counters`` ends with its unit; an MB has 10**6 bytes. ``unreadable`` says why a counter is
    missing. ``reasons`` is the share of readings with each of NVML's reasons for the clock. ``shared`` is the share of
    readings at which other processes computed on the GPU; None if it cannot be read.
    """

    index: int
    readings: int
    counters: dict[str, MeanMax]
    unreadable: dict[str, str]
    reasons: dict[str, float]
    max_sm_clock_mhz: float | None = None
    energy_j: float | None = None
    shared: float | None = None


class CoreUsage(Part):
    """Available cores, and how many of them the training and other processes kept busy on average.

    Processes with a lower priority than the training do not count. ``throttled`` is the share of time for which the
    control group's limit stopped the training; None without a limit.
    """

    available: int
    training: float
    others: float
    throttled: float | None = None


class Interval(Part):
    """A measured part of a training. ``watts`` and ``energy_j`` are those of all devices in use.

    On a CPU they include other processes, because they are those of the whole processor. ``energy_unavailable`` says
    why they are missing.
    """

    seconds: float
    energy_j: float | None = None
    energy_unavailable: str | None = None
    watts: float | None = None
    devices: tuple[DeviceUsage, ...] = ()
    cores: CoreUsage | None = None


class Roof(Part):
    """Operations of a step, and the highest measured rate of its device.

    ``flops_per_step`` counts multiplications and additions in matrix products, convolutions and attention for a whole
    global batch. ``uncounted`` are other operations of that kind, which are left out. ``roof_flops`` is the rate per
    second of a product of square matrices, in the training's precision on one device. ``problem`` says why a figure is
    missing.
    """

    flops_per_step: float | None = None
    uncounted: tuple[str, ...] = ()
    roof_flops: float | None = None
    problem: str | None = None


class Usage(Part):
    """Readings of the devices during a training, and during the slices after it.

    ``samples`` is the number of samples trained from the first step to the last, which is the interval ``training``.
    ``sampler_share`` is the share of one core's time that the readings took.
    """

    samples: int
    training: Interval
    slices: Interval | None = None
    sampler_share: float
    roof: Roof | None = None
