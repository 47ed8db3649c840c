"""From points to projections: one fit, what it says of other numbers of devices, and how wrong such fits were."""

from __future__ import annotations

from typing import TYPE_CHECKING

from samebits.records.run import Spread
from samebits.results.scaling.curve import Fitted, HeldOut, ProjectedPoint
from samebits.results.scaling.fit import Estimate, fit
from samebits.results.scaling.model import LINEAR, Step

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from samebits.results.scaling.curve import MeasuredPoint, ScalingName
    from samebits.results.scaling.fit import Fit, Point
    from samebits.results.scaling.network import Network

_MILLI = 1e3


def fitted(cost_model: Fit) -> Fitted:
    """A fit as it is recorded."""
    return Fitted(
        coefficients=cost_model.coefficients,
        ranges={name: cost_model.range_of(name) for name in (*LINEAR, "overlap")},
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
) -> ProjectedPoint:
    """What ``devices`` would do, ``per_host`` of them on each host; ``gradients`` says what a step sends.

    ``batch`` are the samples of one device's step, which ``strong`` shares out. The network counts where there is more
    than one host. With as many samples on each, a step takes no less than the measured one of ``fewer`` devices.
    """
    rows = batch / devices if scaling == "strong" else batch
    step = gradients.model_copy(update={"devices": devices, "rows": rows, "sharing": min(devices, per_host)})
    beyond = network if devices > per_host else None
    estimate = cost_model.estimate(step, beyond)
    if fewer and fewer.devices < devices and fewer.rows == rows:
        ends = fewer.step_ms.median, fewer.step_ms.low, fewer.step_ms.high
        estimate = estimate.at_least(Estimate(*(one / _MILLI for one in ends)))
    alone = cost_model.estimate(Step(devices=1, rows=batch)).seconds
    gain = alone * devices * rows / batch
    return ProjectedPoint(
        scaling=scaling,
        devices=devices,
        rows=rows,
        step_ms=_milliseconds(estimate),
        speedup=Spread(median=gain / estimate.seconds, low=gain / estimate.high, high=gain / estimate.low),
        network=beyond.text if beyond else None,
    )


def _milliseconds(estimate: Estimate) -> Spread:
    return Spread(median=_MILLI * estimate.seconds, low=_MILLI * estimate.low, high=_MILLI * estimate.high)


def held_out(points: Sequence[Point], trainings: Sequence[tuple[ScalingName, Point]]) -> Iterator[HeldOut]:
    """What fits say of trainings with a number of devices that they have not seen.

    Each number above 1 is left out in turn, if another one is left that communicates.
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
                    measured_ms=_MILLI * point.seconds,
                    predicted_ms=_milliseconds(estimate),
                    error=estimate.seconds / point.seconds - 1,
                )
