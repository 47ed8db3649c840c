"""The runs of one pipeline beside each other: ``reports/comparison.json``, made from files alone, without torch."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field, ValidationError

from samebits.errors import UserError
from samebits.files import Part, Record, first_fault, read_json
from samebits.here import stage_command
from samebits.host import HostFacts
from samebits.params import Params
from samebits.params.schema import NumericsName
from samebits.records.memory import Memory
from samebits.records.provenance import GitState
from samebits.records.run import (
    RECORD,
    Evaluation,
    EvaluationFigures,
    Ratio,
    TimingFigures,
    read_refusal,
    read_run,
    require_made_with,
    run_name,
)
from samebits.remarks import Missing
from samebits.results.current import AGAIN, AGAIN_OR_BACK, require_comparable, settings_of
from samebits.results.curves import Curve, curve
from samebits.results.explanation.explain import Explanation, explain
from samebits.results.labels import labels_of
from samebits.results.remarks import SpokenRemark, all_notes, in_words, say_not_applied
from samebits.results.usage import RowUsage, row_usage
from samebits.results.verdict import Verdict, compare_runs
from samebits.strategies import BASELINE, StrategyName

if TYPE_CHECKING:
    from collections.abc import Iterator

    from samebits.records.run import Run, RunRecord

EVALUATIONS = Path("reports/evaluation")
REPORT = (
    "comparison.json", "comparison.md", "index.html", "plots", "curves", "step_times", "speedups.csv", "breakdown.csv"
)  # fmt: skip
"""Files and folders of the report. Their folder may hold others."""


class SliceSteps(Part):
    """Milliseconds of a step in the paired slices, as medians over the repeats.

    ``strategy`` is a step of the strategy. One device alone takes ``single`` for the whole batch and ``share`` for its
    share of it. ``together`` is a step of all devices at once without communication; None if the strategy has no ranks.
    ``node`` is a step of the strategy without communication between machines; None if no machine has several ranks.
    """

    strategy: float
    single: float
    share: float
    together: float | None = None
    node: float | None = None


class RowVerdict(Verdict):
    """The verdict on a run: whether it is the same training as the run ``against``."""

    against: str


class Row(TimingFigures, EvaluationFigures, RowUsage):
    """One run of a comparison; ``scaling_efficiency`` is the speed-up divided by the devices, with its 95% interval."""

    run: str
    strategy: StrategyName
    numerics: NumericsName
    num_devices: int
    devices_used: int
    devices_by_node: tuple[int, ...] = ()
    device_type: Literal["cpu", "cuda"]
    has_ranks: bool
    speedup_unavailable: SpokenRemark | None
    price_unavailable: SpokenRemark | None = None
    slice_step_ms: SliceSteps | None
    explanation: Explanation | None = None
    scaling_efficiency: float | None
    scaling_efficiency_interval: tuple[float, float] | None = None
    final_loss: float
    verdict: RowVerdict | None
    data_sha256: str
    labels: tuple[SpokenRemark, ...]
    notes: tuple[SpokenRemark, ...]
    not_applied: dict[str, str]
    curve: Curve
    step_ms_percentiles: tuple[float, ...] = Field(min_length=101, max_length=101)  # from 0 to 100
    memory: Memory | None = None

    @property
    def name(self) -> str:
        """As in ``runs/NAME``."""
        return run_name(self.strategy, self.numerics)

    @property
    def uncertain(self) -> bool:
        """Whether something else on the host may have changed the times."""
        return any(label.kind in ("noisy", "disturbed") for label in self.labels)

    @property
    def fallback(self) -> bool:
        """Whether PyTorch ran the plain module."""
        return any(label.kind == "fallback" for label in self.labels)


class RefusedRow(Part):
    """A run that ``exact`` refused to train: what in the model, the reason as a text, and a hint."""

    run: str
    numerics: NumericsName
    what: str
    text: str
    hint: str


class Comparison(Record):
    """``reports/comparison.json``: runs beside each other. The first run of each numerics is the others' reference."""

    SCHEMA = 9  # which causes were looked for, when it was made, and the pipeline to try a change with
    created: str  # ISO 8601, in UTC
    pipeline: str | None  # the dvc.yaml that ran the stages; None if DVC did not

    task: str
    model: str
    global_batch_size: int
    steps: int
    params: Params
    host: HostFacts
    host_fingerprint: str
    git: GitState
    rows: tuple[Row, ...] = Field(min_length=1)
    refused: tuple[RefusedRow, ...] = ()


def compare(params: Params, git: GitState, *, folder: Path = Path()) -> Comparison:
    """Collect every (strategy, numerics) of ``params.train`` into one record, from what the stages left in ``folder``.

    Raises:
        UserError: a run's files are missing or were made with other params; the hint names the command for them.
    """
    train = params.train
    at = () if folder == Path() else ("--folder", str(folder))
    evaluate, host_file, host_made_by = stage_command("evaluate", *at), folder / "host.json", stage_command("host", *at)
    host = HostFacts.parse(read_json(host_file, made_by=host_made_by), host_file, made_by=host_made_by)
    found: list[tuple[Run, Evaluation, Run]] = []
    refused: list[RefusedRow] = []
    first: Run | None = None
    for numerics in train.numerics:
        reference: Run | None = None
        for strategy in train.strategies:
            command = stage_command("train", "--strategy", strategy, "--numerics", numerics, *at)
            run_folder = folder / "runs" / run_name(strategy, numerics)
            if refusal := read_refusal(run_folder):
                recorded, given = settings_of(refusal.params), settings_of(params)
                require_made_with(run_folder / RECORD, recorded, given, hint=AGAIN_OR_BACK)
                same = refusal.model_dump(include={"numerics", "what", "hint"})
                refused.append(RefusedRow(run=refusal.name, text=refusal.refused, **same))
                continue
            run = read_run(run_folder, made_by=command)
            first = first or run
            require_comparable(run, params, first)
            file = folder / EVALUATIONS / f"{run.name}.json"
            evaluation = Evaluation.read(file, made_by=evaluate)
            if evaluation.weights_sha256 != run.record.weights_sha256:
                raise UserError(f"{file}: speaks of other weights", hint=f"run `{evaluate}`")
            reference = reference or run
            found.append((run, evaluation, reference))
    fast, rows = next((run for run, *_ in found if run.record.numerics == "fast"), None), []
    for run, evaluation, reference in found:
        with figures_computed(run):
            rows.append(_row(run, evaluation, reference, fast))
    pipeline = folder / "dvc.yaml"
    return Comparison(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        pipeline=pipeline.as_posix() if pipeline.exists() else None,
        task=params.data.task,
        model=params.model.name,
        global_batch_size=train.global_batch_size,
        steps=params.total_steps,
        params=params,
        host=host,
        host_fingerprint=host.fingerprint,
        git=git,
        rows=tuple(rows),
        refused=tuple(refused),
    )


@contextmanager
def figures_computed(*runs: Run) -> Iterator[None]:
    """Raise UserError with the runs' folders, if the block computes a figure that is too large or not finite."""
    try:
        yield
    except (ValidationError, OverflowError) as error:
        wrong = first_fault(error) if isinstance(error, ValidationError) else str(error)
        folders = ", ".join(str(run.folder) for run in runs)
        raise UserError(f"{folders}: figures from which none can be computed: {wrong}", hint=AGAIN) from None


def _row(run: Run, evaluation: Evaluation, reference: Run, fast: Run | None) -> Row:
    record, placement = run.record, run.record.placement
    timing = run.timing
    if record.strategy == BASELINE.name:
        timing = timing.model_copy(update={"speedup": Ratio(median=1.0, low=1.0, high=1.0)})
    slices, speedup, devices = slice_step_ms(record), timing.speedup, placement.devices_used
    verdict = None if run is reference else RowVerdict(against=reference.name, **dict(compare_runs(reference, run)))
    return Row(
        **timing.model_dump(include={*TimingFigures.model_fields}),
        **evaluation.model_dump(include={*EvaluationFigures.model_fields}),
        **placement.model_dump(include={"num_devices", "devices_used", "devices_by_node", "device_type"}),
        **record.model_dump(include={"run", "strategy", "numerics"}),
        **row_usage(record).model_dump(),
        has_ranks=placement.has_ranks,
        slice_step_ms=slices,
        explanation=explain(record, slices, speedup),
        scaling_efficiency=speedup.median / devices if speedup else None,
        scaling_efficiency_interval=(speedup.low / devices, speedup.high / devices) if speedup else None,
        final_loss=run.losses[-1],
        verdict=verdict,
        data_sha256=record.data.sha256,
        speedup_unavailable=in_words(record.speedup_unavailable) if record.speedup_unavailable else None,
        price_unavailable=_why_no_price(run),
        labels=tuple(map(in_words, (*placement.labels, *labels_of(run, reference, fast)))),
        notes=tuple(map(in_words, all_notes(run))),
        not_applied=say_not_applied(record),
        curve=curve(run),
        step_ms_percentiles=tuple(np.percentile(record.measurement.step_ms, range(101)).tolist()),
        memory=record.memory,
    )


def _why_no_price(run: Run) -> SpokenRemark | None:
    """Why the price of ``exact`` is missing, in the run that would have it."""
    record = run.record
    if run.timing.price or record.numerics != "exact" or record.strategy != BASELINE.name:
        return None
    if record.params.train.repeats == 1:
        return in_words(Missing(kind="one_repeat"))
    return in_words(Missing(kind="one_pair" if record.measurement.chunk_seconds.get("fast") else "not_measured"))


def explanation_of(run: Run, named: str) -> Explanation:
    """The explanation of a run, which an error calls ``named``. Raises UserError: its steps have no parts."""
    with figures_computed(run):
        found = explain(run.record, slice_step_ms(run.record), run.timing.speedup)
    if found:
        return found
    if run.record.placement.fallback:
        folder = Path("runs")  # of the id of a run in MLflow
        if Path(named).is_dir():
            folder = (Path(named) if Path(named).name else Path(named).resolve()).parent
        hint = f"it did what single does: samebits explain {folder}/single-{run.record.numerics}"
        raise UserError(f"{named}: PyTorch ran the plain module, which was not measured again", hint=hint)
    hint = "train in fast numerics, with train.repeats above 1, and with memory to spare for copies of the model"
    raise UserError(f"{named}: its steps were not divided into parts", hint=hint)


def slice_step_ms(record: RunRecord) -> SliceSteps | None:
    """Milliseconds of a step in the paired slices; None if nothing was paired."""
    measurement = record.measurement
    if not {"single", "share"} <= measurement.chunk_seconds.keys():
        return None
    medians = {
        name: 1e3 * median(sum(chunks) for chunks in repeats) / measurement.slice_steps
        for name, repeats in measurement.chunk_seconds.items()
    }
    return SliceSteps.model_validate(medians)
