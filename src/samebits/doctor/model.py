"""The user's model under each strategy, each in workers of its own, so that a crash ends nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, get_args

from samebits.data.card import read_card
from samebits.data.prepare import prepare
from samebits.doctor.finding import Finding, of_error, ok, skipped, warning
from samebits.doctor.trial import FINDINGS, Trial, listed_under, try_model
from samebits.errors import Interrupted, SamebitsError, UserError, WorkerError
from samebits.host import count_cores, count_gpus
from samebits.launch import launch
from samebits.params import load_params
from samebits.params.schema import StrategyName
from samebits.placement import Placement, place

if TYPE_CHECKING:
    from collections.abc import Iterator

    from samebits.params import Params
    from samebits.params.schema import NumericsName, Train

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
    with TemporaryDirectory(prefix="samebits-") as temporary:
        try:
            data_dir, finding = _data(params, data_dir, Path(temporary) / "data")
        except SamebitsError as error:
            yield of_error(error, name="data")
            return
        yield finding
        said: set[str] = set()
        for strategy, numerics in _trials(params):
            out = Path(temporary) / f"{strategy}-{numerics}"
            out.mkdir()
            found = _try(params, strategy, numerics, data_dir, out, checkpoint, seconds)
            yield from (finding for finding in found if finding.text not in said)
            said |= {finding.text for finding in found if finding.status == "warning"}
            if (strategy, numerics) == ("single", "fast") and found[-1].status == "failed":
                yield from (skipped("what fails under single fails here", name=name) for name in ("dp", "ddp"))
                return


def _trials(params: Params) -> Iterator[tuple[StrategyName, NumericsName]]:
    """Every strategy; and ``exact``, if it is wanted, on one device: what it refuses, it refuses everywhere."""
    for strategy in get_args(StrategyName):
        yield strategy, "fast"
    if "exact" in params.train.numerics:
        yield "single", "exact"


def _data(params: Params, data_dir: Path, spare: Path) -> tuple[Path, Finding]:
    """The folder of the data set, or ``spare`` with one batch of the same task where there is none that fits."""
    data, batch = params.data, params.train.global_batch_size
    why = "there is none yet"
    if (data_dir / "card.json").exists():
        card = read_card(data_dir / "card.json")
        if card.task == data.task and card.train.num_samples >= batch:
            return data_dir, ok(f"{data_dir}, {card.task}, {card.train.num_samples} samples", name="data")
        why = f"{data_dir} is another set than that of params.yaml"
    small = data.model_copy(update={"num_samples": batch, "test_samples": _TEST_SAMPLES})
    prepare(params.model_copy(update={"data": small}), spare)
    return spare, ok(f"{batch} samples of {data.task}, drawn for this: {why}", name="data")


def _placement(strategy: StrategyName, train: Train) -> Placement:
    """Where a training would run; ``ddp`` gets two processes also on a host with one device, if the batch allows it."""
    gpus, cores = count_gpus(), count_cores()
    placement = place(strategy, train, gpus=gpus, cores=cores)
    if strategy == "ddp" and placement.world_size == 1 and train.global_batch_size // train.grad_accum_steps % 2 == 0:
        two = train.model_copy(update={"num_devices": 2, "oversubscribe": True})
        return place(strategy, two, gpus=gpus, cores=cores)
    return placement


def _try(
    params: Params,
    strategy: StrategyName,
    numerics: NumericsName,
    data_dir: Path,
    out: Path,
    checkpoint: Path | None,
    seconds: int,
) -> list[Finding]:
    """What one strategy showed; a failure is the last."""
    found: list[Finding] = []
    name = listed_under(strategy, numerics)
    try:
        placement = _placement(strategy, params.train)
        found = [warning(note, _BATCH_HINT, name=name) for note in placement.notes]
        trial = Trial(params, placement, data_dir, out, checkpoint, seconds, numerics)
        launch(try_model, trial, placement.world_size)
    except Interrupted:
        raise
    except SamebitsError as error:
        return [*found, *_left(out), _failure(error, params, name, seconds)]
    found += _left(out)
    for label in placement.labels:
        unused = label.kind == "unused_devices"
        found.append(warning(label.text, _BATCH_HINT, name=strategy) if unused else ok(label.text, name=strategy))
    return found


def _failure(error: SamebitsError, params: Params, name: str, seconds: int) -> Finding:
    """A failure, or a warning if the strategy is not one that params.yaml asks for."""
    if isinstance(error, WorkerError) and error.message.endswith("SIGALRM"):
        hint = "look for an endless loop in the model, or try a smaller batch"
        error = UserError(f"one batch took longer than {seconds} s", hint=hint)
    finding = of_error(error, name=name)
    if name in {"single", "exact", *params.train.strategies}:
        return finding
    text = f"{finding.text}; it is not in train.strategies"
    return replace(finding, status="warning", text=text, exit_code=0)


def _left(out: Path) -> list[Finding]:
    """The findings that rank 0 of a trial left."""
    file = out / FINDINGS
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [Finding(**json.loads(line)) for line in lines]
