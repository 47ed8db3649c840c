"""The record of a scaling curve, measured and projected: ``reports/scaling.json``."""

from __future__ import annotations

from typing import Literal

from samebits.files import Part, Record
from samebits.host import HostFacts
from samebits.params import Params
from samebits.records.provenance import GitState
from samebits.records.run import Spread
from samebits.results.scaling.fit import Point
from samebits.results.scaling.model import Coefficients
from samebits.results.scaling.network import Network

MADE_BY = "samebits scale"

ScalingName = Literal["strong", "weak"]
"""Strong scaling shares one global batch out; weak scaling gives each device as many samples."""

STRONG_AND_WEAK: tuple[ScalingName, ...] = ("strong", "weak")


class MeasuredPoint(Part):
    """A measured number of devices; ``speedup`` is the ratio of samples per second to one device.

    A point that does not ``count`` is in no fit, and its ``label`` says why.
    """

    scaling: ScalingName
    devices: int
    rows: int
    step_ms: Spread
    speedup: Spread | None
    counts: bool = True
    label: str | None = None


class ProjectedPoint(Part):
    """A projected number of devices; ``step_ms`` and ``speedup`` are predictions of the fit with their ranges."""

    kind: Literal["projection"] = "projection"
    scaling: ScalingName
    devices: int
    rows: float
    step_ms: Spread
    speedup: Spread
    network: str | None = None


class HeldOut(Part):
    """The prediction for a number of devices by a fit without it, beside the measurement; ``error`` is relative."""

    scaling: ScalingName
    devices: int
    measured_ms: float
    predicted_ms: Spread
    error: float


class Fitted(Part):
    """Coefficients in seconds with their ranges, the number of points, and the relative errors that remain."""

    coefficients: Coefficients
    ranges: dict[str, tuple[float, float]]
    points: int
    scatter: float
    largest_residual: float


class Scaling(Record):
    """``reports/scaling.json``: trainings of ddp in ``fast`` with several numbers of devices.

    The host has ``per_host`` devices. ``points`` are those that count, from all slices of the trainings, corrected for
    the drift of the host. Without a point that counts there is no ``fit``, and nothing is projected.
    """

    task: str
    model: str
    model_parameters: int
    gradient_bytes: int
    messages: int
    global_batch_size: int
    device_type: Literal["cpu", "cuda"]
    per_host: int
    network: Network | None
    params: Params
    host: HostFacts
    git: GitState
    measured: tuple[MeasuredPoint, ...]
    points: tuple[Point, ...]
    fit: Fitted | None
    projections: tuple[ProjectedPoint, ...]
    held_out: tuple[HeldOut, ...]
    notes: tuple[str, ...]
