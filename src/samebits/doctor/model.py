"""The user's model under each strategy, each in workers of its own, so that a crash ends nothing else."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from samebits.data.prepare import prepare
from samebits.doctor.finding import Finding, of_error, ok, skipped, warning
from samebits.doctor.trial import FINDINGS, Trial, try_model
from samebits.errors import SamebitsError, UserError
from samebits.files import scratch_folder
from samebits.host import count_cores, count_gpus, may_share_gpus
from samebits.params import load_params
from samebits.params.schema import StrategyName
from samebits.records.card import read_card
from samebits.records.remarks import FewerDevices, UnusedDevices
from samebits.records.run import run_name
from samebits.results.remarks import say
from samebits.training.placement import place
from samebits.workers.processes import WorkerSignalledError, launch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from samebits.params import Params
    from samebits.params.schema import NumericsName
    from samebits.params.split import BatchSplit
    from samebits.records.remarks import Label, Note
    from samebits.records.run import Placement

SECONDS = 300
_TEST_SAMPLES = 8  # a set of data has some, and nothing here reads them
_BATCH_HINT = "make train.global_batch_size over train.grad_accum_steps a multiple of the devices"


def model_findings(
    params_file: Path, *, checkpoint: Path | None = None, data_dir: Path = Path("data"), seconds: int = SECONDS
) -> Iterator[Finding]:
    """Try the model of ``params_file`` under every strategy, on one batch of ``data_dir`` or of a set like it.

    ``torch.compile`` is left out: it takes longer than the rest. A trial that takes more than ``seconds`` is ended.
    """
    try:
        params = load_params(params_file)
    except UserError:
        yield skipped(f"{params_file} is wrong, as its line says", name="model")
        return
    params = params.model_copy(update={"train": params.train.model_copy(update={"compile": False})})
    with scratch_folder() as temporary:
        try:
            data_dir, finding = data_to_try(params, data_dir, temporary / "data")
        except SamebitsError as error:
            yield of_error(error, name="data")
            return
        yield finding
        told: set[str] = set()
        for strategy, numerics in _trials(params):
            out = temporary / run_name(strategy, numerics)
            out.mkdir()
            trial = Trial(
                params=params,
                strategy=strategy,
                numerics=numerics,
                data_dir=data_dir,
                out=out,
                checkpoint=checkpoint,
                seconds=seconds,
            )
            findings = _try(trial)
            yield from (finding for finding in findings if not finding.is_remark or finding.text not in told)
            told |= {finding.text for finding in findings if finding.is_remark}
            if (strategy, numerics) == ("single", "fast") and findings[-1].status == "failed":
                strategies = get_args(StrategyName)[1:]
                yield from (skipped("what fails under single fails here", name=name) for name in strategies)
                return


def _trials(params: Params) -> Iterator[tuple[StrategyName, NumericsName]]:
    """Every strategy; and ``exact``, if it is wanted, on one device: what it refuses, it refuses everywhere."""
    for strategy in get_args(StrategyName):
        yield strategy, "fast"
    if "exact" in params.train.numerics:
        yield "single", "exact"


def data_to_try(params: Params, data_dir: Path, spare: Path) -> tuple[Path, Finding]:
    """The folder of the data set, or ``spare`` with one batch of the same task where there is none that fits."""
    data, batch = params.data, params.train.global_batch_size
    why = "there is none yet"
    if (data_dir / "card.json").exists():
        card = read_card(data_dir / "card.json")
        if card.made_from == params.data_identity:
            return data_dir, ok(f"{data_dir}, {card.task}, {card.train.num_samples} samples", name="data")
        why = f"{data_dir} is another set than that of params.yaml"
    small = data.model_copy(update={"num_samples": batch, "test_samples": _TEST_SAMPLES})
    prepare(params.model_copy(update={"data": small}), spare)
    return spare, ok(f"{batch} samples of {data.task}, drawn for this: {why}", name="data")


def _place(trial: Trial) -> tuple[Placement, BatchSplit]:
    """Where a training would run; ranks are two also on a host with one device, if the batch allows it."""
    params, train = trial.params, trial.params.train
    placed = partial(place, trial.strategy, numerics=trial.numerics, gpus=count_gpus(), cores=count_cores())
    placement, split = placed(params)
    alone = placement.has_ranks and placement.world_size == 1 and split.over(ranks=2).even
    if alone and (placement.device_type == "cpu" or may_share_gpus()):
        two = params.model_copy(update={"train": train.model_copy(update={"num_devices": 2, "oversubscribe": True})})
        return placed(two)
    return placement, split


def _try(trial: Trial) -> list[Finding]:
    """What one strategy showed; a failure is the last."""
    findings: list[Finding] = []
    try:
        placement, split = _place(trial)
        findings = [_of_remark(note, trial) for note in placement.notes]
        launch(partial(try_model, trial, placement, split), placement.world_size)
    except SamebitsError as error:
        return [*findings, *_left(trial.out), _failure(error, trial)]
    findings += _left(trial.out)
    return findings + [_of_remark(label, trial) for label in placement.labels]


def _of_remark(remark: Label | Note, trial: Trial) -> Finding:
    """What a placement says; another batch would use more devices, and all else is as it has to be."""
    if isinstance(remark, FewerDevices | UnusedDevices):
        return warning(say(remark), _BATCH_HINT, name=trial.name, is_remark=True)
    return ok(say(remark), name=trial.name)


def _failure(error: SamebitsError, trial: Trial) -> Finding:
    """A failure, or a warning if the strategy is not one that params.yaml asks for."""
    if isinstance(error, WorkerSignalledError) and error.signum == signal.SIGALRM:
        hint = "look for an endless loop in the model, or try a smaller batch"
        error = UserError(f"one batch took longer than {trial.seconds} s", hint=hint)
    finding = of_error(error, name=trial.name)
    if trial.name in {"single", "exact", *trial.params.train.strategies}:
        return finding
    text = f"{finding.text}; it is not in train.strategies"
    return replace(finding, status="warning", text=text, exit_code=0)


def _left(out: Path) -> list[Finding]:
    """The findings that rank 0 of a trial left."""
    file = out / FINDINGS
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [Finding(**json.loads(line)) for line in lines]
