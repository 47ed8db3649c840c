"""How a training used its devices: what counters said meanwhile, energy, and the rate against the device's own."""

from __future__ import annotations

from samebits.files import Part


class MeanMax(Part):
    """Mean and maximum of a counter's readings; of one that only rises, its rate, twice the same."""

    mean: float
    maximum: float


class DeviceUsage(Part):
    """One GPU in an interval, by its CUDA index; of several machines, one of the first.

    ``counters`` are in the unit that ends their name, MB of 10**6 bytes; ``unreadable`` says why one is missing.
    ``reasons`` is the share of readings at which NVML gave a reason for its clock. ``shared`` is the share at which
    others computed on it too, None where that cannot be read.
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
    """Cores that may be used, and how many of them the training and others kept busy on average.

    What is nicer than the training does not count. ``throttled`` is the share of the time in which the control group's
    limit held the training up, None without a limit.
    """

    available: int
    training: float
    others: float
    throttled: float | None = None


class Interval(Part):
    """A part of a training while it was watched; ``watts`` and ``energy_j`` are those of all devices in use.

    On a CPU they are of the whole processor, whoever computes on it. ``energy_unavailable`` says why there are none.
    """

    seconds: float
    energy_j: float | None = None
    energy_unavailable: str | None = None
    watts: float | None = None
    devices: tuple[DeviceUsage, ...] = ()
    cores: CoreUsage | None = None


class Roof(Part):
    """What a step computes, and the most that its device was seen to do.

    ``flops_per_step`` is of a whole global batch: multiplications and additions of products of matrices, convolutions
    and attention; ``uncounted`` are other operations of that kind, which count nothing. ``roof_flops`` is a second's,
    in a product of square matrices of the training's precision on one device. ``problem`` says why one is missing.
    """

    flops_per_step: float | None = None
    uncounted: tuple[str, ...] = ()
    roof_flops: float | None = None
    problem: str | None = None


class Usage(Part):
    """What was read of the devices beside a training, and in the slices after it.

    ``samples`` were trained in the first interval, which begins with the first step and ends with the last.
    ``sampler_share`` is the share of one core's time that the reading took.
    """

    samples: int
    training: Interval
    slices: Interval | None = None
    sampler_share: float
    roof: Roof | None = None
