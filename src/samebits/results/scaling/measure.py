"""The trainings of a scaling curve: their plan, their runs by the stages' scripts, and the points from them."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Literal, NamedTuple

from samebits.errors import HostError, UserError, counted
from samebits.host import count_cores, count_gpus
from samebits.records.run import Spread, read_run
from samebits.records.statistics import ratios, spread
from samebits.results.scaling.curve import MADE_BY, STRONG_AND_WEAK, MeasuredPoint, ScalingName
from samebits.results.scaling.fit import Point
from samebits.results.scaling.model import Step
from samebits.results.verify import prepare_in, train_in
from samebits.strategies.ddp import DDP
from samebits.strategies.placement import Devices

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from samebits.batch_split import BatchSplit
    from samebits.params import Params
    from samebits.records.measurement import Measurement, SliceName
    from samebits.records.run import Run

REPEATS = 5  # the training, then four times its slices
LEARNING_RATE = 1e-4  # no training diverges, whatever the batch; only times matter
DRIFT = 0.15  # relative drift of the same step between trainings, above which a note tells of it
_MIB = 2**20


class PlannedTraining(NamedTuple):
    """One training of ddp; each device has ``samples`` of a global batch.

    ``few`` is a training with as few samples as a projection gives a device.
    """

    kind: Literal["strong", "weak", "few"]
    devices: int
    samples: int

    @property
    def global_batch_size(self) -> int:
        """Samples of all devices."""
        return self.devices * self.samples

    @property
    def name(self) -> str:
        """The name of the training's folder."""
        return f"{self.kind}-{self.devices}"


def parse_counts(option: str, text: str) -> tuple[int, ...]:
    """Read numbers of devices, such as ``1,2,4``. Raises UserError: the text is something else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 10 and int(part) for part in parts):
        raise UserError(f"{option}: got {text!r}, expected numbers from 1 with commas", hint=f"such as {option} 1,2,4")
    return tuple(sorted({int(part) for part in parts}))


def describe(training: PlannedTraining, run: Run) -> str:
    """One line about a finished training."""
    each = f"{training.devices} devices with {training.samples} samples each"
    return f"{each}, median step {run.timing.step_time_ms:.3g} ms"


def devices_here() -> Devices:
    """What this host has. Raises HostError: its GPUs cannot be counted."""
    return Devices(gpus=count_gpus(), cores=count_cores())


def default_devices(params: Params) -> tuple[int, ...]:
    """The numbers 1, 2, 4 ... as far as this host has devices and they divide the batch.

    Raises:
        HostError: this host has one device.
        UserError: the batch divides by none of these numbers.
    """
    host, whole = devices_here(), params.batch_split("fast")
    most = host.existing
    if most < 2:
        text = f"this host has {counted(most, host.kind)}, expected 2 devices or more to scale over"
        hint = "train.oversubscribe: true with --devices 1,2 lets workers share it, and nothing is projected from that"
        raise HostError(text, hint=hint)
    counts = tuple(n for n in (2**i for i in range(20)) if n <= most and whole.over(ranks=n).even)
    if len(counts) < 2:
        text = f"the {whole.units} samples of a micro-batch divide by none of 2, 4, ... up to {most} devices"
        raise UserError(text, hint="change train.global_batch_size, or name numbers with --devices")
    return counts


def default_projections(params: Params, devices: Sequence[int]) -> tuple[int, ...]:
    """Two, four and eight times the most devices that are measured, as far as there are samples for them."""
    most = params.batch_split("fast").units
    return tuple(n for n in (max(devices) * factor for factor in (2, 4, 8)) if n <= most)


def plan(params: Params, devices: Sequence[int], projected: Sequence[int]) -> tuple[list[PlannedTraining], list[str]]:
    """The trainings to run, and notes on those that are left out.

    Raises:
        HostError: this host has too few devices, and ``train.oversubscribe`` is off.
        UserError: the batch cannot be shared out.
    """
    host, whole = devices_here(), params.batch_split("fast")
    more = sorted({n for n in devices if n > 1})
    if not more:
        raise UserError("--devices: got 1 alone, expected more than one number", hint="such as --devices 1,2")
    for n in more:
        if n > host.existing and not params.train.oversubscribe:
            text = f"--devices: got {n}, this host has {counted(host.existing, host.kind)}"
            hint = "--project says what more would do; train.oversubscribe: true tries them without counting them"
            raise HostError(text, hint=hint)
        if not whole.over(ranks=n).even:
            text = f"--devices: got {n}, expected a divisor of the {whole.units} samples of a micro-batch"
            raise UserError(text, hint="change train.global_batch_size or --devices")
    for n in projected:
        if n > whole.units:
            text = f"--project: got {n} devices for {whole.units} samples of a micro-batch"
            raise UserError(text, hint="raise train.global_batch_size, or name fewer devices")
    trainings, notes = [PlannedTraining("strong", n, _samples_of_one(whole, n)) for n in more], []
    for weak in (PlannedTraining("weak", n, whole.samples) for n in more):
        batch = weak.global_batch_size
        if not params.data.is_drawn and batch > params.data.num_samples:
            text = f"weak scaling on {weak.devices} devices was left out: its batch has {batch} samples, more than data"
            notes.append(text)
        else:
            trainings.append(weak)
    few = PlannedTraining("few", more[0], _samples_of_one(whole, max(projected, default=1)))
    if few.devices <= host.existing and few.samples < _samples_of_one(whole, more[-1]):
        trainings.append(few)
    return trainings, notes


def _samples_of_one(whole: BatchSplit, devices: int) -> int:
    return whole.over(ranks=devices).share().samples


def train(params: Params, trainings: Sequence[PlannedTraining], scratch: Path, *, steps: int) -> Iterator[Run]:
    """Make the data and run each training in ``scratch``, by the stages' scripts.

    Raises:
        SamebitsError: a stage failed.
        Interrupted: a signal ended it.
    """
    largest = max(training.global_batch_size for training in trainings)
    data = params.data.model_copy(update={"num_samples": max(params.data.num_samples, largest)})
    for number, training in enumerate(trainings):
        split = replace(params.batch_split("fast"), samples=training.global_batch_size)
        changes = {
            "numerics": ("fast",),
            "global_batch_size": split.samples,
            "epochs": max(params.train.epochs, math.ceil(steps / split.batches_of(data.num_samples))),
            "repeats": REPEATS,
            "optimizer": params.train.optimizer.model_copy(update={"lr": LEARNING_RATE}),
            "schedule": params.train.schedule.model_copy(update={"warmup_steps": 0}),
        }
        changed = params.model_copy(update={"data": data, "train": params.train.model_copy(update=changes)})
        if not number:
            prepare_in(scratch, changed)
        arguments = ["--strategy", DDP.name, "--num-devices", training.devices, "--steps", steps]
        yield read_run(train_in(scratch, changed, training.name, *arguments), made_by=MADE_BY)


class Points(NamedTuple):
    """Points of the trainings: rows of the table, all points that count, and the point of each whole training."""

    measured: list[MeasuredPoint]
    points: list[Point]
    trainings: list[tuple[ScalingName, Point]]
    notes: list[str]


def gradients_of(run: Run) -> Step:
    """What a step of a run sends: the traced messages, or else a message for each bucket of float32 gradients."""
    traffic = run.record.breakdown.traffic if run.record.breakdown else None
    if traffic is not None and traffic.buckets:
        return Step(devices=1, rows=0, bytes=traffic.gradient_bytes, messages=len(traffic.buckets))
    size = 4 * run.record.model_parameters
    bucket = run.record.params.train.ddp.bucket_cap_mb * _MIB
    return Step(devices=1, rows=0, bytes=size, messages=max(1, math.ceil(size / bucket)))


def points_of(pairs: Sequence[tuple[PlannedTraining, Run]], batch: int) -> Points:
    """The points of trainings whose global batch for one device is ``batch``.

    All trainings but ``few`` time one device with the whole ``batch``. The speed of a host drifts between trainings, so
    the times of each training are scaled to the median time of that step.
    """
    anchors = {training: one for training, run in pairs if (one := _anchor(training, run.record.measurement))}
    collected = Points([], [], [], [])
    usual = median(anchors.values()) if anchors else None
    if usual:
        low, high = usual / max(anchors.values()), usual / min(anchors.values())
        if high > 1 + DRIFT or low < 1 - DRIFT:
            collected.notes.append(f"the host's speed drifted between trainings by a factor of {high / low:.2f}")
        alone = _around(1e3 * usual, [1e3 * seconds for seconds in anchors.values()])
        collected.measured.extend(
            MeasuredPoint(scaling=scaling, devices=1, rows=batch, step_ms=alone, speedup=spread([1.0]))
            for scaling in STRONG_AND_WEAK
        )
    for training, run in pairs:
        drift = usual / anchors[training] if usual and training in anchors else 1.0
        _add(collected, training, run, drift)
    return collected


_ANCHORS: dict[str, SliceName] = {"strong": "single", "weak": "share"}


def _anchor(training: PlannedTraining, measurement: Measurement) -> float | None:
    """Seconds of a step of one device with the batch that all trainings time; None if it was not timed."""
    name = _ANCHORS.get(training.kind)
    return median(_chunks(measurement, name)) if name and name in measurement.chunk_seconds else None


def _add(collected: Points, training: PlannedTraining, run: Run, drift: float) -> None:
    """Add the points and notes of one training, with its times multiplied by ``drift``."""
    measurement, reason = run.record.measurement, run.record.speedup_unavailable
    if "strategy" not in measurement.chunk_seconds:
        why = reason.sentence() if reason else "its slices did not end"
        collected.notes.append(f"{training.name} was not timed: {why}")
        return
    devices, rows = training.devices, training.samples
    shared = Step(devices=devices, rows=rows, sharing=devices)
    gradients = gradients_of(run)
    whole = shared.model_copy(update={"bytes": gradients.bytes, "messages": gradients.messages})
    steps: dict[SliceName, Step] = {"share": Step(devices=1, rows=rows), "together": shared, "strategy": whole}
    if training.kind != "weak":  # there one device has more samples than any device of a projection
        steps["single"] = Step(devices=1, rows=training.global_batch_size)
    labels = run.record.placement.labels
    label = next((one.sentence() for one in labels if one.kind == "oversubscribed"), None)
    points = {
        name: Point(**step.model_dump(), seconds=drift * median(_chunks(measurement, name)))
        for name, step in steps.items()
        if name in measurement.chunk_seconds
    }
    if label is None:
        collected.points.extend(points.values())
    if training.kind == "few":
        return
    if label is None:
        if _ANCHORS[training.kind] not in measurement.chunk_seconds:
            why = reason.sentence() if reason else "no slice was paired"
            collected.notes.append(f"{training.kind}, {devices} devices: {why}")
        collected.trainings.append((training.kind, points["strategy"]))
    repeats = [1e3 * drift * sum(chunks) / measurement.slice_steps for chunks in measurement.chunk_seconds["strategy"]]
    collected.measured.append(
        MeasuredPoint(
            scaling=training.kind,
            devices=devices,
            rows=rows,
            step_ms=_around(1e3 * points["strategy"].seconds, repeats),
            speedup=None if label else _speedup(training, measurement),
            counts=label is None,
            label=f"oversubscribed: {label}" if label else None,
        )
    )


def _speedup(training: PlannedTraining, measurement: Measurement) -> Spread | None:
    """Ratio of samples per second to one device, from paired chunks; None if no device was timed alone."""
    name = _ANCHORS[training.kind]
    if name not in measurement.chunk_seconds:
        return None
    factor = training.devices if training.kind == "weak" else 1
    above, below = (measurement.chunk_seconds[one] for one in (name, "strategy"))
    repeats = [factor * sum(a) / sum(b) for a, b in zip(above, below, strict=True)]
    middle = median(factor * ratio for a, b in zip(above, below, strict=True) for ratio in ratios(a, b))
    return _around(middle, repeats)


def _around(middle: float, values: Sequence[float]) -> Spread:
    """A median of chunks, and the range of the repeats, which may lie beside it."""
    return Spread(median=middle, low=min(middle, *values), high=max(middle, *values))


def _chunks(measurement: Measurement, name: SliceName) -> list[float]:
    """Seconds of a step in each chunk of a slice."""
    steps, chunk = measurement.slice_steps, measurement.chunk_steps
    lengths = [min(chunk, steps - start) for start in range(0, steps, chunk)]
    return [
        seconds / length
        for repeat in measurement.chunk_seconds[name]
        for seconds, length in zip(repeat, lengths, strict=True)
    ]
