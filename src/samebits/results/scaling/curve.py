"""What was measured of a model's scaling, and what is projected from it: ``reports/scaling.json``."""

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
"""Of the same global batch shared out, or of as many samples on each device."""

STRONG_AND_WEAK: tuple[ScalingName, ...] = ("strong", "weak")


class MeasuredPoint(Part):
    """A number of devices that was trained with; ``speedup`` is in samples per second over one device.

    What does not ``count`` is in no fit, and its ``label`` says why.
    """

    scaling: ScalingName
    devices: int
    rows: int
    step_ms: Spread
    speedup: Spread | None
    counts: bool = True
    label: str | None = None


class ProjectedPoint(Part):
    """A number of devices that nobody trained with; ``step_ms`` and ``speedup`` are ranges around what the fit says."""

    kind: Literal["projection"] = "projection"
    scaling: ScalingName
    devices: int
    rows: float
    step_ms: Spread
    speedup: Spread
    network: str | None = None


class HeldOut(Part):
    """What a fit without a number of devices says of it, beside what was measured; ``error`` is relative."""

    scaling: ScalingName
    devices: int
    measured_ms: float
    predicted_ms: Spread
    error: float


class Fitted(Part):
    """Coefficients in seconds with their ranges, and the relative errors that they leave of so many points."""

    coefficients: Coefficients
    ranges: dict[str, tuple[float, float]]
    points: int
    scatter: float
    largest_residual: float


class Scaling(Record):
    """``reports/scaling.json``: trainings of ddp in ``fast`` with several numbers of devices.

    ``per_host`` devices share the host; ``points`` are those that count, of all slices of the trainings, their drift
    taken out. Without a point that counts there is no ``fit``, and nothing is projected.
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
