"""Are two trainings the same? ``bitwise``, ``within tolerance`` (how far, where) or ``diverged`` (first step)."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import numpy as np
import safetensors

from samebits.errors import UserError
from samebits.metrics import relative_difference
from samebits.records import flatten

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from samebits.records import Run
    from samebits.rounding import Rounding

Grade = Literal["bitwise", "within tolerance", "diverged"]
GRADES: tuple[Grade, ...] = ("bitwise", "within tolerance", "diverged")
"""From the best to the worst."""

Require = Literal["bitwise", "tolerance"]

ALLOWANCE = 4
"""A difference may be so many times what the twin of a run showed: twice what correct runs were seen to need."""

FLOOR = {"fp32": 1e-6, "tf32": 1e-5, "bf16": 4e-5, "fp16": 1e-5}
"""Relative difference that is never held against a loss, by precision: roundings of the two losses themselves."""

UNMEASURED = {"fp32": (1e-4, 2e-2), "tf32": (1e-3, 5e-2), "bf16": (1e-3, 5e-2), "fp16": (1e-3, 5e-2)}
"""Tolerance of losses where no twin was trained: for the first steps, and for all."""

FIRST_STEPS = 8
WEIGHTS = 1.0
"""Tolerance of a tensor where no twin was trained to the end: beyond, two tensors have nothing in common."""


def meets(grade: Grade, require: Require | None) -> bool:
    """Whether a grade is as good as is asked for, which may be nothing."""
    worst: dict[Require | None, Grade] = {"bitwise": "bitwise", "tolerance": "within tolerance", None: "diverged"}
    return GRADES.index(grade) <= GRADES.index(worst[require])


class LossVerdict(TypedDict):
    """Steps count from 1; differences are relative, None where a loss is not finite.

    ``first_beyond`` is the first step whose difference exceeds its tolerance, ``values`` the two losses there.
    ``tolerance`` is that of this step, else that of ``largest_at``; ``measured``: it comes from a twin.
    """

    grade: Grade
    measured: bool
    steps: int
    first_difference: int | None
    largest_relative: float | None
    largest_at: int | None
    tolerance: float | None
    first_beyond: int | None
    values: list[float] | None
    problem: str | None


class WeightsVerdict(TypedDict):
    """``largest_relative`` is the largest, over tensors, of ||a - b|| / max(||a||, ||b||), found in ``largest_in``.

    ``tolerance`` is that of ``beyond``, the tensor that is furthest beyond its own, or else of ``largest_in``.
    """

    grade: Grade
    tolerance: float
    tensors: int
    different: int
    largest_relative: float | None
    largest_in: str | None
    beyond: str | None
    problem: str | None


class Tolerance:
    """How far two trainings may differ by rounding alone, at each step and at the end.

    Args:
        precisions: those of the two runs; the coarser one counts.
        twins: what their twins showed; of two, the larger counts at each step.
        none: both are exact, where no difference is allowed.
    """

    def __init__(self, precisions: Sequence[str], twins: Sequence[Rounding | None] = (), *, none: bool = False) -> None:
        self._none = none
        self._floor = max(FLOOR[precision] for precision in precisions)
        self._table = max(UNMEASURED[precision] for precision in precisions)
        self._twins = [twin for twin in twins if twin is not None]
        self.measured = bool(self._twins)

    def losses(self, steps: int) -> list[float]:
        """The largest relative difference at each step; beyond a twin's last step, the table's also counts."""
        if self._none:
            return [0.0] * steps
        if not self._twins:
            return [self._table[step > FIRST_STEPS] for step in range(1, steps + 1)]
        tolerances = [self._floor] * steps
        for twin in self._twins:
            for step, difference in twin["losses"]:
                start = int(step) - 1
                tolerances[start:] = [max(value, ALLOWANCE * difference) for value in tolerances[start:]]
        known = max(twin["steps"] for twin in self._twins)
        tolerances[known:] = [max(value, self._table[1]) for value in tolerances[known:]]
        return tolerances

    def weights(self, names: Iterable[str]) -> dict[str, float]:
        """The largest relative difference of each tensor; of one that the twin does not name, its median's."""
        if self._none:
            return dict.fromkeys(names, 0.0)
        shown = [twin["weights"] for twin in self._twins if twin["weights"]]
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
    """Compare losses step by step; of trainings of different lengths, the steps that both have."""
    differences = [relative_difference(a, b) for a, b in zip(reference, losses, strict=False)]
    limits = tolerance.losses(len(differences))
    largest = max(differences, default=0.0)
    first = next((step for step, value in enumerate(differences, start=1) if value), None)
    at = differences.index(largest) + 1 if first else None
    pairs = enumerate(zip(differences, limits, strict=True), start=1)
    beyond = next((step for step, (value, limit) in pairs if value > limit), None)
    problem = f"{len(reference)} steps against {len(losses)}" if len(reference) != len(losses) else None
    grade: Grade = "bitwise" if first is None else "within tolerance"
    return {
        "grade": "diverged" if problem or beyond else grade,
        "measured": tolerance.measured,
        "steps": len(differences),
        "first_difference": first,
        "largest_relative": _finite(largest),
        "largest_at": at,
        "tolerance": _finite(limits[(beyond or at or 1) - 1]) if limits else None,
        "first_beyond": beyond,
        "values": [reference[beyond - 1], losses[beyond - 1]] if beyond else None,
        "problem": problem,
    }


Stored = dict[str, dict[str, Any]]  # name -> dtype, shape, data, as safetensors gives them


def _read(path: Path) -> Stored:
    try:
        return dict(safetensors.deserialize(path.read_bytes()))  # type: ignore[no-untyped-call]
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{path}: not a safetensors file: {error}", hint="train again with `dvc repro`") from None


_NUMPY = {"F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1", "U8": "u1"}


def _values(entry: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.float64]] | None:
    """A tensor in float64, None where NumPy has no such type."""
    if entry["dtype"] == "BF16":  # the upper half of a float32
        widened = np.frombuffer(entry["data"], "<u2").astype("<u4") << 16
        return widened.view("<f4").astype(np.float64)
    if entry["dtype"] not in _NUMPY:
        return None
    return np.frombuffer(entry["data"], "<" + _NUMPY[entry["dtype"]]).astype(np.float64)


def _relative(a: dict[str, Any], b: dict[str, Any]) -> float:
    x, y = _values(a), _values(b)
    if x is None or y is None:
        return math.inf
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return math.inf
    scale = max(float(np.linalg.norm(x)), float(np.linalg.norm(y)))
    return float(np.linalg.norm(x - y)) / scale if scale else 0.0


def compare_weights(reference: Path, other: Path, tolerance: Tolerance) -> WeightsVerdict:
    """Compare two safetensors files tensor by tensor.

    Raises:
        UserError: one of them is missing or damaged.
    """
    first, second = _read(reference), _read(other)
    verdict: WeightsVerdict = {
        "grade": "diverged",
        "tolerance": WEIGHTS,
        "tensors": len(first),
        "different": 0,
        "largest_relative": None,
        "largest_in": None,
        "beyond": None,
        "problem": None,
    }
    if alone := sorted(first.keys() ^ second.keys()):
        return {**verdict, "problem": f"only one of them has {alone[0]}"}
    for name, a in first.items():
        b = second[name]
        if (a["dtype"], a["shape"]) != (b["dtype"], b["shape"]):
            kinds = " and ".join(f"{entry['dtype']} {entry['shape']}" for entry in (a, b))
            return {**verdict, "problem": f"{name} is {kinds}"}
    differences = {name: _relative(a, second[name]) for name, a in first.items() if a["data"] != second[name]["data"]}
    limits = tolerance.weights(first)
    largest_in = max(differences, key=differences.__getitem__) if differences else None
    used = {name: value / limits[name] if limits[name] else math.inf for name, value in differences.items()}
    beyond = max(used, key=used.__getitem__) if used else None
    if beyond is not None and differences[beyond] <= limits[beyond]:
        beyond = None
    shown = beyond or largest_in
    return {
        **verdict,
        "grade": "bitwise" if not differences else "diverged" if beyond else "within tolerance",
        "tolerance": limits[shown] if shown else WEIGHTS,
        "different": len(differences),
        "largest_relative": _finite(differences[largest_in]) if largest_in else 0.0,
        "largest_in": largest_in,
        "beyond": beyond,
    }


class Comparison(TypedDict):
    """Two runs beside each other; ``grade`` is the worse of the two verdicts."""

    grade: Grade
    losses: LossVerdict
    weights: WeightsVerdict
    differences: dict[str, tuple[Any, Any]]


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted names whose values are not the same in two nested mappings; a missing one is None."""
    first, second = flatten(a), flatten(b)
    names = sorted(first.keys() | second.keys())
    return {name: (first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)}


_CONFIGURATION = ("strategy", "numerics", "placement", "params", "data_sha256", "host")


def compare_runs(a: Run, b: Run) -> Comparison:
    """Compare losses and weights of two runs, with what differs between their settings and hosts beside it."""
    precisions = [run.record["params"]["train"]["precision"] for run in (a, b)]
    exact = all(run.record["numerics"] == "exact" for run in (a, b))
    tolerance = Tolerance(precisions, [run.record.get("rounding") for run in (a, b)], none=exact)
    losses = compare_losses(a.losses, b.losses, tolerance)
    weights = compare_weights(a.folder / "model.safetensors", b.folder / "model.safetensors", tolerance)
    settings = [{name: run.record.get(name) for name in _CONFIGURATION} for run in (a, b)]
    return {
        "grade": worst(losses["grade"], weights["grade"]),
        "losses": losses,
        "weights": weights,
        "differences": differences(*settings),
    }


def sentences(comparison: Comparison) -> list[str]:
    """What the verdicts say, for people: one sentence on losses, one on weights."""
    return [f"losses: {_say_losses(comparison['losses'])}", f"weights: {_say_weights(comparison['weights'])}"]


def say(comparison: Comparison) -> str:
    """The whole comparison for a terminal: the verdict, its two parts, and what differs beside them."""
    lines = [comparison["grade"], *(f"  {sentence}" for sentence in sentences(comparison))]
    if comparison["differences"]:
        lines.append("what differs between the two")
        lines += [f"  {name}: {a} | {b}" for name, (a, b) in comparison["differences"].items()]
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.2g}"


def _say_losses(found: LossVerdict) -> str:
    if found["grade"] == "bitwise":
        return f"bitwise, all {found['steps']} steps"
    if found["problem"]:
        shared = "the same bits" if not found["first_difference"] else "not the same"
        return f"diverged: {found['problem']}; the first {found['steps']} are {shared}"
    if found["tolerance"] == 0.0 and found["values"]:
        a, b = found["values"]
        return (
            f"diverged: first at step {found['first_difference']} of {found['steps']}, {a!r} and {b!r}; exact numerics "
            f"allow no difference; the largest is {_number(found['largest_relative'])} at step {found['largest_at']}"
        )
    measured = f"{ALLOWANCE} times what rounding alone did to this training"
    source = measured if found["measured"] else "the table's, as no twin was trained"
    if found["first_beyond"] is not None and found["values"]:
        a, b = found["values"]
        return (
            f"diverged: first at step {found['first_beyond']} of {found['steps']}, {a:.9g} and {b:.9g}, beyond a "
            f"tolerance of {_number(found['tolerance'])} ({source}); largest relative difference "
            f"{_number(found['largest_relative'])} at step {found['largest_at']}"
        )
    return (
        f"within tolerance: first difference at step {found['first_difference']} of {found['steps']}, the largest is "
        f"{_number(found['largest_relative'])} at step {found['largest_at']}, tolerance there "
        f"{_number(found['tolerance'])} ({source})"
    )


def _say_weights(found: WeightsVerdict) -> str:
    if found["grade"] == "bitwise":
        return f"bitwise, all {found['tensors']} tensors"
    if found["problem"]:
        return f"diverged: {found['problem']}"
    place = f"beyond its tolerance of {_number(found['tolerance'])} first of all {found['beyond']}"
    if not found["beyond"]:
        place = f"tolerance there {_number(found['tolerance'])}"
    return (
        f"{found['grade']}: {found['different']} of {found['tensors']} tensors differ, the largest relative difference "
        f"is {_number(found['largest_relative'])} in {found['largest_in']}, {place}"
    )
