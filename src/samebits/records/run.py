"""What a training leaves in its folder, and what its evaluation says: typed, and read without torch."""

from __future__ import annotations

import csv
import math
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Self

import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt
from safetensors.numpy import save

from samebits.errors import UserError, reason
from samebits.files import Part, Record, atomic, read_json, regular, write_json, write_text
from samebits.host import HostFacts
from samebits.params import Params, differences
from samebits.params.schema import NumericsName
from samebits.records.breakdown import Breakdown
from samebits.records.card import Card
from samebits.records.measurement import Measurement
from samebits.records.memory import Memory
from samebits.records.usage import Usage
from samebits.remarks import NotAppliedKind, Note, Reason
from samebits.strategies import BASELINE, StrategyName
from samebits.strategies.placement import Placement

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from samebits.errors import RefusedError

WEIGHTS, LOSSES, TIMING, RECORD = "model.safetensors", "losses.csv", "timing.json", "run.json"
FILES = (WEIGHTS, LOSSES, TIMING, RECORD)
"""What a training writes, and what is kept of it as artifacts."""

TRACE = "trace.json.gz"
"""What it writes beside, if it is asked for a trace of some steps."""


def precedence(devices_used: int, strategy: StrategyName, *, has_ranks: bool) -> tuple[int, bool]:
    """Of several runs, the largest is the one that a reader asks about: most devices, then ranks.

    With one device it is ``single``, which alone has tried half of the batch.
    """
    return devices_used, has_ranks if devices_used > 1 else strategy == BASELINE.name


class Node(Part):
    """One of several machines: its name, a name for the kernel that it runs on, and its stable facts."""

    name: str
    machine: str
    host: HostFacts


class Spread(Part):
    """A median between two values: of speeds the smallest and the largest, of a ``Ratio`` the ends of an interval."""

    median: PositiveFloat
    low: PositiveFloat
    high: PositiveFloat


class Ratio(Spread):
    """How many times faster or slower: the median over pairs of chunks.

    ``low`` and ``high`` are the ends of its 95% interval, see ``records.statistics``.
    """

    @property
    def holds_one(self) -> bool:
        """Whether the interval holds 1, so that no difference is shown."""
        return self.low <= 1.0 <= self.high

    @property
    def half_width(self) -> float:
        """Half the width of the interval, relative to the median."""
        return (self.high - self.low) / 2 / self.median


_Difference = Annotated[float, Field(ge=0.0, le=2.01)]  # |a - b| over the larger of them, rounded


class TwinLoss(Part):
    """How far the twin's losses were from the training's, up to and at a step (from 1): a relative difference."""

    step: PositiveInt
    difference: _Difference


class Rounding(Part):
    """What rounding alone does to a training, shown by a twin whose first weights were changed by ``perturbation``.

    ``losses`` holds the points at which the largest difference so far rises; ``steps`` is how far the twin went.
    ``weights`` holds each parameter's relative difference at the end, None if the twin did not get there.
    """

    perturbation: float
    steps: int
    losses: tuple[TwinLoss, ...]
    weights: dict[str, _Difference] | None


class Arithmetic(Part):
    """Of ``exact``: steps that were made again, and the share of numbers that were too small for a window."""

    steps_made_again: int
    below_window: float


class TimingFigures(Part):
    """Times of a training, those in ms of a step; ``peak_memory_gib`` by device, None where it cannot be read."""

    training_seconds: PositiveFloat
    samples_per_sec: PositiveFloat
    samples_per_sec_spread: Spread
    step_time_ms: PositiveFloat
    step_time_p5_ms: PositiveFloat
    step_time_p95_ms: PositiveFloat
    speedup: Ratio | None
    bound: Ratio | None
    price: Ratio | None
    peak_memory_gib: dict[str, float | None]


class Timing(TimingFigures, Record):
    """``timing.json``."""


def run_name(strategy: StrategyName, numerics: NumericsName) -> str:
    """Strategy and numerics, as in ``runs/NAME``."""
    return f"{strategy}-{numerics}"


class RunRecord(Record):
    """``run.json``: what was trained, from what, where, and what a reader must know of it.

    ``run`` is the key that logs and MLflow know it by. ``first_unrepeated_step`` is the first step, from 1, at which a
    repeat on this host gave another loss. ``host`` is that of rank 0; ``nodes`` are all machines, if there
    are several. ``memory`` is None where it cannot be told: see ``training.memory``. ``draws`` are modules that draw
    random numbers in forward, in fast numerics, and ``batch_norms`` those that normalise by a device's part of a
    batch. ``same_draws`` are losses of first steps with the same draws for the same samples, however many devices.
    """

    SCHEMA = 9  # draws and BatchNorm in forward

    run: str
    strategy: StrategyName
    numerics: NumericsName
    placement: Placement
    notes: tuple[Note, ...]
    not_applied: dict[str, NotAppliedKind]
    speedup_unavailable: Reason | None
    first_unrepeated_step: int | None
    rounding: Rounding | None
    breakdown: Breakdown | None = None
    arithmetic: Arithmetic | None
    draws: tuple[str, ...] = ()
    batch_norms: tuple[str, ...] = ()
    same_draws: tuple[float, ...] | None = None
    initial_sha256: str
    weights_sha256: str
    model_parameters: int
    host: HostFacts
    nodes: tuple[Node, ...] = ()
    data: Card
    params: Params
    measurement: Measurement
    usage: Usage | None = None
    memory: Memory | None = None

    @property
    def name(self) -> str:
        """As in ``runs/NAME``."""
        return run_name(self.strategy, self.numerics)

    @classmethod
    def read(cls, path: Path, *, made_by: str) -> Self:
        """As ``Record.read``. Raises UserError also where ``exact`` has refused the model."""
        raw = read_json(path, made_by=made_by)
        if isinstance(raw, dict) and "refused" in raw:  # a ``Refusal``
            raise UserError(f"{path.parent}: exact refused this model: {raw['refused']}", hint=str(raw.get("hint")))
        return super().read(path, made_by=made_by)


class Refusal(Record):
    """``run.json`` of a training that ``exact`` refused: what of the model, in words and in few words, and the hint."""

    refused: str
    what: str
    hint: str
    strategy: StrategyName
    numerics: NumericsName
    params: Params

    @property
    def name(self) -> str:
        """As in ``runs/NAME``."""
        return run_name(self.strategy, self.numerics)


class EvaluationFigures(Part):
    """Mean loss on the test split, and accuracy where there are classes; ``above_floor`` is ``eval_loss / floor - 1``.

    ``weights_sha256`` is the file that was evaluated.
    """

    eval_loss: float
    accuracy: float | None
    floor: float | None
    teacher_loss: float | None
    above_floor: float | None
    samples: int
    weights_sha256: str


class Evaluation(EvaluationFigures, Record):
    """``reports/evaluation/NAME.json``."""


@dataclass(frozen=True)
class Run:
    """A finished training; ``losses`` by step from 1."""

    folder: Path
    record: RunRecord
    timing: Timing
    losses: list[float]

    @property
    def name(self) -> str:
        """Strategy and numerics, as in ``runs/NAME``."""
        return self.record.name


def write_run(folder: Path, record: RunRecord, timing: Timing, losses: Sequence[float]) -> None:
    """Write a run's files, the weights aside; losses as the shortest decimals that give the same float32."""
    rows = "".join(f"{step},{np.float32(loss)!s}\n" for step, loss in enumerate(losses, start=1))
    write_text(folder / LOSSES, "step,loss\n" + rows)
    timing.write(folder / TIMING)
    record.write(folder / RECORD)


def write_refusal(
    folder: Path, error: RefusedError, params: Params, strategy: StrategyName, numerics: NumericsName
) -> None:
    """Write a run's files for a training that ``exact`` refused, without a training in them: DVC wants all of them."""
    why = error.message.removeprefix(f"{numerics}: ")
    refusal = Refusal(
        refused=why, what=error.what, hint=error.hint, strategy=strategy, numerics=numerics, params=params
    )
    with atomic(folder / WEIGHTS) as unfinished:
        unfinished.write_bytes(save({}))
    write_text(folder / LOSSES, "step,loss\n")
    write_json(folder / TIMING, {"schema": Timing.SCHEMA, "refused": refusal.what})
    refusal.write(folder / RECORD)


def read_refusal(folder: Path) -> Refusal | None:
    """Why a folder holds no training, if it was refused; None where it was not, or where nobody can tell."""
    with suppress(UserError):  # whoever reads a training says what is wrong
        return Refusal.read(folder / RECORD, made_by="python pipeline/train.py")
    return None


def read_losses(path: Path) -> list[float]:
    """The losses of a ``losses.csv``, by step.

    Raises:
        UserError: the file is missing or is not such a file, or a loss is not finite, with which no training ends.
    """
    hint = "train again with `dvc repro`"
    try:
        with regular(path).open(encoding="utf-8", newline="") as stream:
            losses = [float(row["loss"]) for row in csv.DictReader(stream)]
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read: {reason(error)}", hint=hint) from None
    for step, loss in enumerate(losses, start=1):
        if not math.isfinite(loss):
            raise UserError(f"{path}: the loss of step {step} is {loss}, expected a finite number", hint=hint)
    return losses


def read_run(folder: Path, *, made_by: str = "python pipeline/train.py") -> Run:
    """Read a run's files, the weights aside.

    Raises:
        UserError: a file is missing or damaged, or of another version or number of steps; the hint names ``made_by``.
    """
    record = RunRecord.read(folder / RECORD, made_by=made_by)
    run = Run(folder, record, Timing.read(folder / TIMING, made_by=made_by), read_losses(folder / LOSSES))
    timed, steps = len(record.measurement.step_ms), len(run.losses)
    if timed != steps:
        got = f"{steps} steps, expected the {timed} that {RECORD} has times of"
        raise UserError(f"{folder / LOSSES}: {got}", hint=f"run `{made_by}` again")
    return run


def require_made_with(file: Path, recorded: Mapping[str, Any], given: Mapping[str, Any], *, hint: str) -> None:
    """Raise UserError, naming the first, where a run's ``file`` records other values of params than are given."""
    for name, (before, now) in differences(recorded, given).items():
        raise UserError(f"{file}: was made with {name} {before}, and the params say {now}", hint=hint)


def relative_difference(a: float, b: float) -> float:
    """|a - b| over the larger magnitude; 0 for equal values, also zeros; infinite if one is not finite."""
    if a == b:
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b))
