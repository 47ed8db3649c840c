"""The record of a scaling curve: points, the fit, projections, and predictions of held-out points."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from samebits.records.provenance import git_state
from samebits.records.run import Spread
from samebits.results.figures import times
from samebits.results.scaling.curve import STRONG_AND_WEAK, Fitted, HeldOut, ProjectedPoint, Scaling
from samebits.results.scaling.fit import fit
from samebits.results.scaling.measure import gradients_of, points_of
from samebits.results.scaling.model import Coefficients, Step

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from samebits.params import Params
    from samebits.records.run import Run
    from samebits.results.scaling.curve import MeasuredPoint, ScalingName
    from samebits.results.scaling.fit import Fit, Point
    from samebits.results.scaling.measure import PlannedTraining
    from samebits.results.scaling.network import Network

MOST_SCATTER = 0.15
"""Typical relative error of a fit from which nothing is projected."""

MOST_RANGE = 4.0
"""Ends of a projected step's range, as a ratio, from which the points do not determine it."""

_APART = 1.5  # range of a coefficient over the candidates, as a factor, from which it counts as undetermined


def assemble(
    params: Params,
    pairs: Sequence[tuple[PlannedTraining, Run]],
    *,
    projected: Sequence[int],
    network: Network | None,
    per_host: int,
    notes: Sequence[str] = (),
) -> Scaling:
    """Fit the points of the trainings, and project to the numbers ``projected`` with ``per_host`` devices a host."""
    batch = params.train.global_batch_size
    record = pairs[0][1].record
    gradients = gradients_of(pairs[0][1])
    measured, points, trainings, told = points_of(pairs, batch)
    fits = any(point.devices == 1 for point in points) and any(point.bytes for point in points)
    cost_model = fit(points) if fits else None
    projections: list[ProjectedPoint] = []
    further = sorted({*projected} - {one.devices for one in measured if one.counts})
    to = partial(project, batch=batch, gradients=gradients, per_host=per_host, network=network)
    alone = next((one.step_ms.median / 1e3 for one in measured if one.devices == 1), 0.0)
    unfit = cost_model is not None and cost_model.scatter > MOST_SCATTER
    for scaling in STRONG_AND_WEAK if not unfit else ():
        most = _most_devices(measured, scaling)
        if cost_model and most and most.speedup and most.speedup.high < 1:
            text = f"{scaling} scaling: the {most.devices} devices of this host do less than one of them does"
            told.append(f"{text} ({times(most.speedup)}), so no more of them are projected: samebits explain says why")
        elif cost_model:
            projections += (to(cost_model, devices, scaling=scaling, fewer=most, alone=alone) for devices in further)
    if not cost_model:
        told.append("no training counts that timed one device beside several, so nothing is projected")
    elif unfit:
        text = f"the fit misses the points by {cost_model.scatter:.0%}, so nothing is projected"
        told.append(f"{text}: measure when nothing else runs")
    elif projections:
        known = [one for one in projections if one.step_ms.high <= MOST_RANGE * one.step_ms.low]
        if len(known) < len(projections):
            told.append(f"steps whose range spans a factor of more than {MOST_RANGE:g} are not projected")
        projections = known
        told += _caution(cost_model, network, per_host, max(projected))
    return Scaling(
        task=params.data.task,
        model=params.model.name,
        model_parameters=record.model_parameters,
        gradient_bytes=gradients.bytes,
        messages=gradients.messages,
        global_batch_size=batch,
        device_type=record.placement.device_type,
        per_host=per_host,
        network=network,
        params=params,
        host=record.host,
        git=git_state(),
        measured=tuple(sorted(measured, key=lambda one: (STRONG_AND_WEAK.index(one.scaling), one.devices))),
        points=tuple(points),
        fit=_fitted(cost_model) if cost_model else None,
        projections=tuple(projections),
        held_out=tuple(held_out(points, trainings)) if cost_model else (),
        notes=(*notes, *told),
    )


def _most_devices(measured: Sequence[MeasuredPoint], scaling: ScalingName) -> MeasuredPoint | None:
    """The training with the most devices among those that count; None if none has several devices."""
    several = [one for one in measured if one.counts and one.scaling == scaling and one.devices > 1]
    return max(several, key=lambda one: one.devices, default=None)


def _caution(cost_model: Fit, network: Network | None, per_host: int, most: int) -> list[str]:
    """Notes on the limits of the projections."""
    notes = []
    if most > per_host and network is None:
        notes.append(
            f"beyond the {per_host} of this host, projections are of several hosts like it, joined by links as fast as "
            "those inside: --network says what is between hosts"
        )
    within = [cost_model.range_of(name) for name in ("per_byte", "latency")]
    if all(high > _APART * low for low, high in within):  # either may be zero, or account for all of it
        text = "the points do not tell latency from bandwidth, so both are in the ranges"
        several = {point.devices for point in cost_model.points if point.bytes}
        notes.append(f"{text}: measure more numbers of devices" if len(several) < 2 < per_host else text)
    return notes


def _fitted(cost_model: Fit) -> Fitted:
    return Fitted(
        coefficients=cost_model.coefficients,
        ranges={name: cost_model.range_of(name) for name in Coefficients.model_fields},
        points=len(cost_model.points),
        scatter=cost_model.scatter,
        largest_residual=max(map(abs, cost_model.residuals)),
    )


def project(
    cost_model: Fit,
    devices: int,
    *,
    scaling: ScalingName,
    batch: int,
    gradients: Step,
    per_host: int,
    network: Network | None = None,
    fewer: MeasuredPoint | None = None,
    alone: float,
) -> ProjectedPoint:
    """Project to ``devices``, of which each host has ``per_host``; ``gradients`` has the bytes and messages of a step.

    ``batch`` is the number of samples in a step of one device, which ``strong`` shares out. The ``network`` counts if
    there are several hosts. A step takes no less time than a measured one of ``fewer`` devices with as many samples.
    ``alone`` is the measured step of one device in seconds, which the speed-up is of.
    """
    rows = batch / devices if scaling == "strong" else batch
    step = gradients.model_copy(update={"devices": devices, "rows": rows, "sharing": min(devices, per_host)})
    beyond = network if devices > per_host else None
    estimate = cost_model.estimate(step, beyond)
    if fewer and fewer.devices < devices and fewer.rows == rows:
        estimate = Spread(**{name: max(seconds, getattr(fewer.step_ms, name) / 1e3) for name, seconds in estimate})
    gain = alone * devices * rows / batch
    return ProjectedPoint(
        scaling=scaling,
        devices=devices,
        rows=rows,
        step_ms=_milliseconds(estimate),
        speedup=Spread(median=gain / estimate.median, low=gain / estimate.high, high=gain / estimate.low),
        network=beyond.text if beyond else None,
    )


def _milliseconds(seconds: Spread) -> Spread:
    return Spread(median=1e3 * seconds.median, low=1e3 * seconds.low, high=1e3 * seconds.high)


def held_out(points: Sequence[Point], trainings: Sequence[tuple[ScalingName, Point]]) -> Iterator[HeldOut]:
    """Predictions for each number of devices, by a fit to the points of the other numbers.

    Each number above 1 is held out in turn, if the remaining points have another number that communicates.
    """
    for devices in sorted({point.devices for _, point in trainings}):
        seen = [point for point in points if point.devices != devices]
        if devices == 1 or not any(point.devices > 1 and point.bytes for point in seen):
            continue
        cost_model = fit(seen)
        for scaling, point in trainings:
            if point.devices == devices:
                estimate = cost_model.estimate(point)
                yield HeldOut(
                    scaling=scaling,
                    devices=devices,
                    measured_ms=1e3 * point.seconds,
                    predicted_ms=_milliseconds(estimate),
                    error=estimate.median / point.seconds - 1,
                )
