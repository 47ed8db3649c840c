"""The files of a training and of its evaluation as typed records. Works without torch."""

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
from samebits.here import stage_command
from samebits.host import HostFacts
from samebits.params import Params, differences
from samebits.params.schema import NumericsName
from samebits.records.batches import BatchDigests
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
"""Files that a training writes, which are also its artifacts."""

TRACE = "trace.json.gz"
"""File with a trace of some steps, written on request."""


def precedence(devices_used: int, strategy: StrategyName, *, has_ranks: bool) -> tuple[int, bool]:
    """Sort key of runs: the largest is the one a reader asks about first, with most devices, then with ranks.

    Among runs with one device it is ``single``, the only one that also timed half of the batch.
    """
    return devices_used, has_ranks if devices_used > 1 else strategy == BASELINE.name


class Node(Part):
    """One of several machines: its name, an identifier of its kernel, and its stable facts."""

    name: str
    machine: str
    host: HostFacts


class Spread(Part):
    """A median with a range: the smallest and largest speed, or the interval of a ``Ratio``."""

    median: PositiveFloat
    low: PositiveFloat
    high: PositiveFloat


class Ratio(Spread):
    """A ratio of two times: the median over pairs of chunks.

    ``low`` and ``high`` are the ends of its 95% interval, see ``records.statistics``.
    """

    @property
    def holds_one(self) -> bool:
        """Whether the interval contains 1, so that it shows no difference."""
        return self.low <= 1.0 <= self.high

    @property
    def half_width(self) -> float:
        """Half the width of the interval, relative to the median."""
        return (self.high - self.low) / 2 / self.median


_Difference = Annotated[float, Field(ge=0.0, le=2.01)]  # |a - b| over the larger of them, rounded


class TwinLoss(Part):
    """The largest relative difference between the twin's losses and the training's, up to a step counted from 1."""

    step: PositiveInt
    difference: _Difference


class Rounding(Part):
    """The effect of rounding on a training, measured by a twin whose first weights differ by ``perturbation``.

    ``losses`` holds the steps at which the largest difference so far grows. ``steps`` is the length of the twin.
    ``weights`` holds each parameter's relative difference at the end; None if the twin ended before.
    """

    perturbation: float
    steps: int
    losses: tuple[TwinLoss, ...]
    weights: dict[str, _Difference] | None


class Arithmetic(Part):
    """Statistics of ``exact``: repeated steps, and the share of numbers that were too small for a window.

    ``compiled_kernels`` says whether they answered in place of Python's functions, ``integer_products`` whether large
    products were those of 8-bit integers, ``shards_apart`` why shards ran one by one, and ``not_replayed`` why no pass
    was replayed, on a GPU as a CUDA graph; None if one was, and in older records. All change the speed alone.
    """

    steps_made_again: int
    below_window: float
    compiled_kernels: bool = False
    integer_products: bool = False
    shards_apart: str | None = None
    not_replayed: str | None = None


class TimingFigures(Part):
    """Times of a training; ms are those of a step. ``peak_memory_gib`` is by device, None if it cannot be read."""

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
    """The NAME of strategy and numerics in ``runs/NAME``."""
    return f"{strategy}-{numerics}"


class RunRecord(Record):
    """``run.json``: params, data, host and results of a training, and notes for its reader.

    ``run`` is its key in logs and in MLflow. ``first_unrepeated_step`` is the first step, from 1, at which a repeat on
    this host gave another loss. ``host`` is that of rank 0; ``nodes`` are all machines, if there are several.
    ``memory`` is None if it is unknown: see ``training.memory``. In fast numerics, ``draws`` are modules that draw
    random numbers in forward, and ``batch_norms`` are modules that normalise by one device's part of a batch.
    ``same_draws`` are losses of the first steps if each sample gets the same draws on any number of devices.
    ``own_loss`` says that the model's ``Experiment`` computes the loss. ``batches`` tell what ``exact`` was given by a
    dataset; None for data that the card has the hash of.
    """

    SCHEMA = 11  # digests of a dataset's samples

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
    own_loss: bool = False
    batches: BatchDigests | None = None
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
        """The NAME in ``runs/NAME``."""
        return run_name(self.strategy, self.numerics)

    @classmethod
    def read(cls, path: Path, *, made_by: str) -> Self:
        """As ``Record.read``. Also raises UserError if ``exact`` refused the model."""
        raw = read_json(path, made_by=made_by)
        if isinstance(raw, dict) and "refused" in raw:  # a ``Refusal``
            raise UserError(f"{path.parent}: exact refused this model: {raw['refused']}", hint=str(raw.get("hint")))
        return super().read(path, made_by=made_by)


class Refusal(Record):
    """``run.json`` of a training that ``exact`` refused: the reason, the refused part in few words, and the hint."""

    refused: str
    what: str
    hint: str
    strategy: StrategyName
    numerics: NumericsName
    params: Params

    @property
    def name(self) -> str:
        """The NAME in ``runs/NAME``."""
        return run_name(self.strategy, self.numerics)


class EvaluationFigures(Part):
    """Mean loss on the test split, and accuracy if there are classes. ``above_floor`` is ``eval_loss / floor - 1``.

    ``weights_sha256`` is the hash of the evaluated file, and ``metrics`` are the user's own, by name.
    """

    eval_loss: float
    accuracy: float | None
    floor: float | None
    teacher_loss: float | None
    above_floor: float | None
    samples: int
    weights_sha256: str
    metrics: dict[str, float] = Field(default_factory=dict)


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
        """The NAME in ``runs/NAME``."""
        return self.record.name


def write_run(folder: Path, record: RunRecord, timing: Timing, losses: Sequence[float]) -> None:
    """Write a run's files except the weights. A loss has the shortest decimals that give the same float32."""
    rows = "".join(f"{step},{np.float32(loss)!s}\n" for step, loss in enumerate(losses, start=1))
    write_text(folder / LOSSES, "step,loss\n" + rows)
    timing.write(folder / TIMING)
    record.write(folder / RECORD)


def write_refusal(
    folder: Path, error: RefusedError, params: Params, strategy: StrategyName, numerics: NumericsName
) -> None:
    """Write all files of a run for a training that ``exact`` refused, because DVC expects each of them."""
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
    """The refusal in a run's folder; None if there is a training, or if the record cannot be read."""
    with suppress(UserError):  # the reader of the training reports it
        return Refusal.read(folder / RECORD, made_by=stage_command("train"))
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


def read_run(folder: Path, *, made_by: str | None = None) -> Run:
    """Read a run's files except the weights.

    Raises:
        UserError: a file is missing, damaged, of another version or number of steps. The hint names ``made_by``.
    """
    made_by = made_by or stage_command("train")
    record = RunRecord.read(folder / RECORD, made_by=made_by)
    run = Run(folder, record, Timing.read(folder / TIMING, made_by=made_by), read_losses(folder / LOSSES))
    timed, steps = len(record.measurement.step_ms), len(run.losses)
    if timed != steps:
        got = f"{steps} steps, expected the {timed} that {RECORD} has times of"
        raise UserError(f"{folder / LOSSES}: {got}", hint=f"run `{made_by}` again")
    return run


def require_made_with(file: Path, recorded: Mapping[str, Any], given: Mapping[str, Any], *, hint: str) -> None:
    """Raise UserError for the first param that a run's ``file`` records with another value than the given one."""
    for name, (before, now) in differences(recorded, given).items():
        raise UserError(f"{file}: was made with {name} {before}, and the params say {now}", hint=hint)


def relative_difference(a: float, b: float) -> float:
    """|a - b| over the larger magnitude; 0 for equal values and zeros; infinite if one value is not finite."""
    if a == b:
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b))
