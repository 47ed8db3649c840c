"""Verdicts on two trainings: ``bitwise``, ``within tolerance``, ``not comparable`` (why) or ``diverged`` (where)."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import safetensors

from samebits.errors import UserError, few
from samebits.files import Part, regular
from samebits.params import differences
from samebits.records.run import WEIGHTS as WEIGHTS_FILE
from samebits.records.run import relative_difference

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from samebits.records.run import Rounding, Run, RunRecord

Grade = Literal["bitwise", "within tolerance", "not comparable", "diverged"]
GRADES: tuple[Grade, ...] = get_args(Grade)
"""From the best to the worst. Runs that cannot be compared are not shown to be the same."""

Require = Literal["bitwise", "tolerance"]

ALLOWANCE = 4
"""Allowed difference over the one that the twin of a run showed: twice the largest that correct runs needed."""

FLOOR = {"fp32": 1e-6, "tf32": 1e-5, "bf16": 4e-5, "fp16": 1e-5}
"""Relative difference of losses that is always allowed, by precision: the two losses are themselves rounded."""

UNMEASURED = {"fp32": (1e-4, 2e-2), "tf32": (1e-3, 5e-2), "bf16": (1e-3, 5e-2), "fp16": (1e-3, 5e-2)}
"""Tolerance of losses without a twin, by precision: for the first steps, and for later ones."""

FIRST_STEPS = 8
WEIGHTS = 1.0
"""Tolerance of a tensor without a twin that was trained to the end. Beyond it, two tensors have nothing in common."""


def meets(grade: Grade, require: Require | None) -> bool:
    """Whether a grade is at least as good as the required one; every grade is if ``require`` is None."""
    worst: dict[Require | None, Grade] = {"bitwise": "bitwise", "tolerance": "within tolerance", None: "diverged"}
    return GRADES.index(grade) <= GRADES.index(worst[require])


class LossVerdict(Part):
    """Verdict on two series of losses. Steps count from 1; differences are relative, None if a loss is not finite.

    ``first_beyond`` is the first step whose difference exceeds its tolerance, and ``values`` are the two losses there.
    ``tolerance`` is the tolerance of that step, or else of ``largest_at``; ``measured`` says that it comes from a twin.
    """

    grade: Grade
    measured: bool
    steps: int
    first_difference: int | None
    largest_relative: float | None
    largest_at: int | None
    tolerance: float | None
    first_beyond: int | None
    values: tuple[float | None, float | None] | None
    problem: str | None


class WeightsVerdict(Part):
    """Verdict on two files of weights.

    ``largest_relative`` is the largest ||a - b|| / max(||a||, ||b||) over the tensors; ``largest_in`` has it.
    ``beyond`` is the tensor that exceeds its tolerance by the largest factor. ``tolerance`` is that of ``beyond``, or
    else of ``largest_in``.
    """

    grade: Grade
    tolerance: float
    tensors: int
    different: int = 0
    largest_relative: float | None = None
    largest_in: str | None = None
    beyond: str | None = None
    problem: str | None = None


SAME_DATA = "the data are the same at every step"


class Verdict(Part):
    """Whether two runs are the same training; ``grade`` is the worse of the two verdicts.

    ``apart`` says why correct runs may differ: something in the model depends on how a batch is split. Then
    ``same_draws`` compares the first steps with the same draws for the same samples, if both runs have them. ``data``
    says whether two trainings with a dataset in exact were given the same; None if that is not known.
    """

    grade: Grade
    losses: LossVerdict
    weights: WeightsVerdict
    apart: str | None = None
    same_draws: LossVerdict | None = None
    data: str | None = None

    @property
    def other_data(self) -> str | None:
        """Where the data differ, which need not show in the weights; None if they do not, or it is not known."""
        return None if self.data == SAME_DATA else self.data


class Tolerance:
    """How far two trainings may differ by rounding alone, at each step and at the end.

    Args:
        precisions: the precisions of the two runs; the coarser one counts.
        twins: the differences that their twins showed; the larger one counts at each step.
        none: no difference is allowed, because both runs are exact.
    """

    def __init__(self, precisions: Sequence[str], twins: Sequence[Rounding | None] = (), *, none: bool = False) -> None:
        self._none = none
        self._floor = max(FLOOR[precision] for precision in precisions)
        self._table = max(UNMEASURED[precision] for precision in precisions)
        self._twins = [twin for twin in twins if twin is not None]
        self._known = max((twin.steps for twin in self._twins), default=0)

    def losses(self, steps: int) -> list[float]:
        """The allowed relative difference at each step. After a twin's last step, the table's tolerance also counts."""
        if self._none:
            return [0.0] * steps
        if not self._twins:
            return [self._table[step > FIRST_STEPS] for step in range(1, steps + 1)]
        tolerances = [self._floor] * steps
        for twin in self._twins:
            points, largest, number = sorted(twin.losses, key=lambda point: point.step), 0.0, 0
            for step in range(steps):
                while number < len(points) and points[number].step <= step + 1:
                    largest, number = max(largest, points[number].difference), number + 1
                tolerances[step] = max(tolerances[step], ALLOWANCE * largest)
        tolerances[self._known :] = [max(value, self._table[1]) for value in tolerances[self._known :]]
        return tolerances

    def is_measured(self, step: int) -> bool:
        """Whether a twin was trained for the step, which counts from 1."""
        return step <= self._known

    def weights(self, names: Iterable[str]) -> dict[str, float]:
        """The allowed relative difference of each tensor. A twin's median counts for tensors that it does not name."""
        if self._none:
            return dict.fromkeys(names, 0.0)
        shown = [twin.weights for twin in self._twins if twin.weights]
        if not shown:
            return dict.fromkeys(names, WEIGHTS)
        typical = max(median(weights.values()) for weights in shown)
        return {
            name: max(self._floor, ALLOWANCE * max(typical, *(weights.get(name, 0.0) for weights in shown)))
            for name in names
        }


def worst(*grades: Grade) -> Grade:
    """The worst of some grades."""
    return max(grades, key=GRADES.index)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def compare_losses(reference: Sequence[float], losses: Sequence[float], tolerance: Tolerance) -> LossVerdict:
    """Compare losses step by step, as far as both trainings have steps."""
    differences = [relative_difference(a, b) for a, b in zip(reference, losses, strict=False)]
    limits = tolerance.losses(len(differences))
    largest = max(differences, default=0.0)
    first = next((step for step, value in enumerate(differences, start=1) if value), None)
    at = differences.index(largest) + 1 if first else None
    pairs = enumerate(zip(differences, limits, strict=True), start=1)
    beyond = next((step for step, (value, limit) in pairs if value > limit), None)
    problem = f"{len(reference)} steps against {len(losses)}" if len(reference) != len(losses) else None
    grade: Grade = "bitwise" if first is None else "within tolerance"
    judged = beyond or at or 1
    return LossVerdict(
        grade="diverged" if problem or beyond else grade,
        measured=tolerance.is_measured(judged),
        steps=len(differences),
        first_difference=first,
        largest_relative=_finite(largest),
        largest_at=at,
        tolerance=_finite(limits[judged - 1]) if limits else None,
        first_beyond=beyond,
        values=(_finite(reference[beyond - 1]), _finite(losses[beyond - 1])) if beyond else None,
        problem=problem,
    )


class _Stored(NamedTuple):
    """A tensor of a safetensors file: type and shape as the file names them, and the bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def values(self) -> NDArray[np.float64] | None:
        """The values in float64; None if NumPy has no such type."""
        if self.dtype == "BF16":  # the upper half of a float32
            widened = np.frombuffer(self.data, "<u2").astype("<u4") << 16
            return widened.view("<f4").astype(np.float64)
        if self.dtype not in _NUMPY:
            return None
        return np.frombuffer(self.data, "<" + _NUMPY[self.dtype]).astype(np.float64)


_NUMPY = {"F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1", "U8": "u1"}


def _read(path: Path) -> dict[str, _Stored]:
    # safetensors.numpy has no bfloat16.
    try:
        entries = dict(safetensors.deserialize(regular(path).read_bytes()))  # type: ignore[no-untyped-call]
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{path}: not a safetensors file: {error}", hint="train again with `dvc repro`") from None
    return {name: _Stored(e["dtype"], tuple(e["shape"]), bytes(e["data"])) for name, e in entries.items()}


def _relative(a: _Stored, b: _Stored) -> float:
    x, y = a.values(), b.values()
    if x is None or y is None or not (np.isfinite(x).all() and np.isfinite(y).all()):
        return math.inf
    scale = max(float(np.linalg.norm(x)), float(np.linalg.norm(y)))
    return float(np.linalg.norm(x - y)) / scale if scale else 0.0


def compare_weights(reference: Path, weights: Path, tolerance: Tolerance) -> WeightsVerdict:
    """Compare two safetensors files tensor by tensor. Raises UserError: one of them is missing or damaged."""
    first, second = _read(reference), _read(weights)
    unlike = WeightsVerdict(grade="diverged", tolerance=WEIGHTS, tensors=len(first))
    if alone := sorted(first.keys() ^ second.keys()):
        return unlike.model_copy(update={"problem": f"only one of them has {alone[0]}"})
    for name, a in first.items():
        b = second[name]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            kinds = " and ".join(f"{entry.dtype} {list(entry.shape)}" for entry in (a, b))
            return unlike.model_copy(update={"problem": f"{name} is {kinds}"})
    differences = {name: _relative(a, second[name]) for name, a in first.items() if a.data != second[name].data}
    limits = tolerance.weights(first)
    largest_in = max(differences, key=differences.__getitem__) if differences else None
    used = {name: value / limits[name] if limits[name] else math.inf for name, value in differences.items()}
    # Without any tolerance, bytes decide: 0.0 and -0.0 have no difference, but other bits.
    outside = [name for name in used if differences[name] > limits[name] or not limits[name]]
    beyond = max(outside, key=used.__getitem__, default=None)
    shown = beyond or largest_in
    return WeightsVerdict(
        grade="bitwise" if not differences else "diverged" if beyond else "within tolerance",
        tolerance=limits[shown] if shown else WEIGHTS,
        tensors=len(first),
        different=len(differences),
        largest_relative=_finite(differences[largest_in]) if largest_in else 0.0,
        largest_in=largest_in,
        beyond=beyond,
    )


_SETTINGS: Any = {
    **dict.fromkeys(("strategy", "numerics", "placement", "params", "host"), True),
    "data": {"sha256"},
}


def compare_runs(a: Run, b: Run) -> Verdict:
    """Compare losses and weights of two runs. Raises UserError: the weights of a run are missing or damaged."""
    records = [run.record for run in (a, b)]
    tolerance = Tolerance(
        [record.params.train.precision for record in records],
        [record.rounding for record in records],
        none=all(record.numerics == "exact" for record in records),
    )
    losses = compare_losses(a.losses, b.losses, tolerance)
    weights = compare_weights(a.folder / WEIGHTS_FILE, b.folder / WEIGHTS_FILE, tolerance)
    data = _data_of(*records)
    verdict = Verdict(grade=worst(losses.grade, weights.grade), losses=losses, weights=weights, data=data)
    reasons = [] if losses.problem or weights.problem else _apart(*records)
    if verdict.grade != "diverged" or not reasons:
        return verdict
    return _not_comparable(verdict, reasons, [record.same_draws for record in records], tolerance)


def _not_comparable(
    verdict: Verdict, reasons: list[str], same_draws: Sequence[tuple[float, ...] | None], tolerance: Tolerance
) -> Verdict:
    """The verdict on runs that may differ for these reasons.

    Diverged if draws are the only reason, and the runs differ with the same draws too.
    """
    (first, second), apart, same = same_draws, "; and ".join(reasons), None
    if first and second and all(reason.startswith(_DRAWS) for reason in reasons):
        steps = min(len(first), len(second))
        same = compare_losses(first[:steps], second[:steps], tolerance)
    if same and same.grade == "diverged":
        return verdict.model_copy(update={"apart": apart, "same_draws": same})
    grade: dict[str, Grade] = {"grade": "not comparable"}
    parts = {
        name: part.model_copy(update=grade)
        for name, part in (("losses", verdict.losses), ("weights", verdict.weights))
        if part.grade == "diverged"
    }
    return verdict.model_copy(update={**grade, **parts, "apart": apart, "same_draws": same})


_DRAWS = "random draws in forward"
SPLIT = {
    "batch_loss": "a loss over the samples of a batch",
    "mixed_samples": "a forward that mixes the samples of a batch",
}
"""What makes a loss depend on the split of a batch, by the kind of its note."""


def _apart(a: RunRecord, b: RunRecord) -> list[str]:
    """What in the model depends on how a batch is split; nothing if both runs split it alike."""
    split = [(record.placement.rows_per_device, record.placement.devices_used) for record in (a, b)]
    if split[0] == split[1] or "exact" in (a.numerics, b.numerics):
        return []
    drawing, norms = ({*getattr(a, name), *getattr(b, name)} for name in ("draws", "batch_norms"))
    parts = []
    if drawing:
        parts.append(f"{_DRAWS} ({few(sorted(drawing), 1)}), other ones on each device")
    if norms:
        parts.append(f"BatchNorm ({few(sorted(norms), 1)}), which normalises by each device's own part of a batch")
    kinds = {note.kind for record in (a, b) for note in record.notes}
    parts += [f"{what}, of which each device has a part of its own" for kind, what in SPLIT.items() if kind in kinds]
    return parts


def _data_of(a: RunRecord, b: RunRecord) -> str | None:
    """Whether two trainings were given the same samples; None where there are no digests of them to compare."""
    if not (a.batches and b.batches) or (a.batches.samples, a.batches.groups) != (b.batches.samples, b.batches.groups):
        return None
    found = a.batches.first_difference(b.batches)
    if found is None:
        return SAME_DATA
    step, first, last = found
    which = f"sample {first}" if first == last else f"one of the samples {first} to {last}"
    return f"the data differ, from {which} of step {step}"


def settings_that_differ(a: Run, b: Run) -> dict[str, tuple[Any, Any]]:
    """Settings, data and facts of the hosts that differ between two runs, by dotted name."""
    return differences(*(run.record.model_dump(mode="json", include=_SETTINGS) for run in (a, b)))
