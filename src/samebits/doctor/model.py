"""Trials of the user's model under each strategy. Each has its own workers, so that a crash ends no other trial."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from samebits.data.prepare import prepare
from samebits.doctor.finding import Finding, of_error, ok, skipped, warning
from samebits.doctor.model_trial import FINDINGS, ModelTrialRank, Trial
from samebits.errors import Interrupted, RefusedError, SamebitsError, UserError, WorkerError
from samebits.files import scratch_folder
from samebits.host import count_gpus, cuda_has_started, may_share_gpus
from samebits.models import UserModel
from samebits.numerics.exact.functions import replace_apply
from samebits.params import load_params
from samebits.records.card import read_card
from samebits.records.run import run_name
from samebits.remarks import Fallback, FewerDevices, UnusedDevices
from samebits.strategies import BASELINE, STRATEGIES, StrategyName
from samebits.training.models.build import import_factory
from samebits.training.placement import place, this_machine
from samebits.workers.parent import end_with_parent
from samebits.workers.processes import WorkerSignalledError, import_compiler, launch
from samebits.workers.rank import run_trial

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

    from samebits.batch_split import BatchSplit
    from samebits.params import Params
    from samebits.params.schema import NumericsName
    from samebits.remarks import Label, Note
    from samebits.strategies.placement import Placement

_T = TypeVar("_T")

SECONDS = 300
_TEST_SAMPLES = 8  # required in a data set, and unused here
_MORE_UNITS = {
    "samples": "make train.global_batch_size over train.grad_accum_steps a multiple of the devices",
    "shards": "raise exact.shards, which gives other bits",
}


def model_findings(
    params_file: Path, *, data_dir: Path, checkpoint: Path | None = None, seconds: int = SECONDS
) -> Iterator[Finding]:
    """Try the model of ``params_file`` under every strategy, on a few samples of ``data_dir``, or of new data.

    Trials do without ``torch.compile``, which takes longer than all else. A trial of more than ``seconds`` is ended.
    """
    try:
        params = load_params(params_file)
    except UserError:
        yield skipped(f"{params_file} is wrong, as its line says", name="model")
        return
    params = with_train(params, compile=False)
    with scratch_folder() as temporary:
        try:
            data_dir, finding = data_to_try(params, data_dir, temporary / "data")
        except SamebitsError as error:
            yield of_error(error, name="data")
            return
        yield finding
        # In exact one device is enough: what it refuses there, it refuses everywhere.
        wanted: list[tuple[StrategyName, NumericsName]] = [(strategy, "fast") for strategy in STRATEGIES]
        if "exact" in params.train.numerics:
            wanted.insert(0, (BASELINE.name, "exact"))
        trials = [
            Trial(
                params=params,
                strategy=strategy,
                numerics=numerics,
                data_dir=data_dir,
                out=temporary / run_name(strategy, numerics),
                checkpoint=checkpoint,
                seconds=seconds,
            )
            for strategy, numerics in wanted
        ]
        told: set[str] = set()
        for finding in _try_after_import(trials):
            if not (finding.is_remark and finding.text in told):
                yield finding
            told.add(finding.text)


def _try_after_import(trials: Sequence[Trial]) -> Iterator[Finding]:
    """Findings of the trials, in a fork of this process that imports the factory once for all of them.

    An import may take seconds. If it starts threads or CUDA in the fork, no trial can be forked from there, and each
    trial imports the factory itself.
    """
    alone = False
    with _forked(partial(_import_and_try, trials)) as findings:
        try:
            for finding in findings:
                if finding is None:
                    alone = True
                    break
                yield finding
        except WorkerError as error:
            if not isinstance(error, WorkerSignalledError):
                text = "the import of the model's factory ended the process"
                error = WorkerError(text, hint="import it in Python to see")
            yield of_error(_too_long(error, trials[0].seconds), name="model")
    if alone:
        yield from _all(trials)


@contextmanager
def _forked(work: Callable[[], Iterator[_T]]) -> Iterator[Iterator[_T]]:
    """Items of ``work``, which runs in a fork of this process. Raises WorkerError: the fork ended early."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    fork = context.Process(target=_send, args=(work, sender))
    fork.start()
    sender.close()

    def received() -> Iterator[_T]:
        with suppress(EOFError):
            while True:
                yield receiver.recv()
        fork.join()
        if code := fork.exitcode:
            text = f"the process that tries the model ended with exit code {code}"
            raise WorkerSignalledError(0, -code) if code < 0 else WorkerError(text, hint="see what it said above")

    try:
        yield received()
    finally:
        fork.terminate()
        fork.join()


def _send(work: Callable[[], Iterator[object]], sender: Connection) -> None:
    os.dup2(2, 1)  # output of a model must not mix with the findings
    end_with_parent(signal.SIGTERM)
    try:
        for found in work():
            sender.send(found)
    except (Interrupted, KeyboardInterrupt):  # the doctor gets the signal too
        sys.exit(128 + signal.SIGINT)


def _import_and_try(trials: Sequence[Trial]) -> Iterator[Finding | None]:
    """Import the factory, and give the findings of the trials; None if this process cannot fork them."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # otherwise SciPy's OpenBLAS starts threads when it is imported
    import_compiler()
    replace_apply()  # before a file of the user's keeps it under another name
    signal.alarm(trials[0].seconds)
    if isinstance(model := trials[0].params.model, UserModel):
        with suppress(Exception):  # the first trial reports the error
            import_factory(model.name, Path(model.source) if model.source else None)
    signal.alarm(0)
    threads = len([*Path("/proc/self/task").iterdir()])
    if threads > 1 or cuda_has_started():
        yield None
    else:
        yield from _all(trials)


def _all(trials: Sequence[Trial]) -> Iterator[Finding]:
    """Findings of all trials. If the model fails in ``fast`` on one device, the others are skipped."""
    exact = [trial for trial in trials if trial.numerics == "exact"]
    fast = partial(_each, [trial for trial in trials if trial not in exact])
    # In parallel: exact mostly uses one core, which leaves another for the rest. A GPU may take one process only.
    with nullcontext(fast()) if count_gpus() else _forked(fast) as outcomes:
        later: list[Finding] = []
        for _, findings, refused in _each(exact):
            if findings[-1].status == "failed" and not refused:
                later = findings
            else:
                yield from findings
        try:
            for name, findings, refused in outcomes:
                yield from findings
                if name == BASELINE.name:
                    if findings[-1].status == "failed" and not refused:
                        names = [
                            one.name for one in trials if one.name != BASELINE.name and (later or one not in exact)
                        ]
                        yield from (skipped("what fails under single fails here", name=name) for name in names)
                        return
                    yield from later
        except WorkerError as error:
            yield of_error(error, name="model")


def _each(trials: Sequence[Trial]) -> Iterator[tuple[str, list[Finding], bool]]:
    """For each trial its name, its findings, and whether ``exact`` refused the model."""
    for trial in trials:
        trial.out.mkdir()
        yield trial.name, *_try(trial)


def data_to_try(params: Params, data_dir: Path, spare: Path) -> tuple[Path, Finding]:
    """The folder of the data set; without one that fits, ``spare`` with one new batch of the same task."""
    data, batch = params.data, params.train.global_batch_size
    why = "there is none yet"
    if (data_dir / "card.json").exists():
        card = read_card(data_dir / "card.json")
        if card.made_from == params.data_identity:
            return data_dir, ok(f"{data_dir}, {card.task}, {card.train.num_samples} samples", name="data")
        why = f"{data_dir} is another set than that of the params"
    made = "drawn" if data.is_drawn else "taken"
    small = data.model_copy(update={"num_samples": batch, "test_samples": _TEST_SAMPLES})
    prepare(params.model_copy(update={"data": small}), spare)
    return spare, ok(f"{batch} samples of {data.task}, {made} for this: {why}", name="data")


def _place_with_two_ranks(trial: Trial) -> tuple[Placement, BatchSplit]:
    """Placement of a training, with two ranks also on a host with one device, if the batch allows it."""
    placement, split = _placed(trial)
    alone = placement.has_ranks and placement.world_size == 1 and split.over(ranks=2).even
    if alone and (placement.device_type == "cpu" or may_share_gpus()):
        return _placed(replace(trial, params=with_train(trial.params, num_devices=2, oversubscribe=True)))
    return placement, split


def _placed(trial: Trial) -> tuple[Placement, BatchSplit]:
    return place(trial.strategy, trial.params, trial.numerics, this_machine())


def _small(params: Params, placement: Placement, split: BatchSplit) -> Params:
    """Parameters with a small batch on the same devices: two samples for each device, or for each of two shards.

    A single sample would not do, because BatchNorm refuses it.
    """
    if split.shards:
        shards, exact = min(2, split.shards), params.exact
        params = params.model_copy(update={"exact": exact.model_copy(update={"shards": shards})})
        return with_train(params, global_batch_size=shards * min(2, split.rows_per_unit), grad_accum_steps=1)
    samples, devices = min(split.samples, 2 * split.multiple), placement.num_devices
    return with_train(params, global_batch_size=samples, num_devices=devices, oversubscribe=True)


def with_train(params: Params, **settings: object) -> Params:
    """The parameters with other values of ``train``."""
    return params.model_copy(update={"train": params.train.model_copy(update=settings)})


def _try(trial: Trial) -> tuple[list[Finding], bool]:
    """Findings of one trial, a failure last, and whether ``exact`` refused the model."""
    findings: list[Finding] = []
    try:
        placement, split = _place_with_two_ranks(trial)
        findings = [_remark_finding(note, trial) for note in placement.notes]
        remarks = [_remark_finding(label, trial) for label in placement.labels]
        if any(isinstance(label, Fallback) for label in placement.labels):  # it would run as ``single``
            return findings + remarks, False
        rows = split.rows_per_unit
        trial = replace(trial, params=_small(trial.params, placement, split), samples_of_unit=rows)
        placement, split = _placed(trial)
        rank = partial(ModelTrialRank, trial, placement, split)
        launch(partial(run_trial, rank, placement, seconds=trial.seconds), placement.world_size)
    except RefusedError as error:
        left = _written_findings(trial.out)
        known = any(finding.status == "failed" and error.why in finding.text for finding in left)
        return [*findings, *left, *([] if known else [_failure(error, trial)])], True
    except SamebitsError as error:
        return [*findings, *_written_findings(trial.out), _failure(error, trial)], False
    return findings + _written_findings(trial.out) + remarks, False


def _remark_finding(remark: Label | Note, trial: Trial) -> Finding:
    """A remark of a placement: a warning if another batch would use more devices."""
    if isinstance(remark, FewerDevices | UnusedDevices):
        return warning(remark.sentence(), _MORE_UNITS[remark.unit], name=trial.name, is_remark=True)
    return ok(remark.sentence(), name=trial.name)


def _failure(error: SamebitsError, trial: Trial) -> Finding:
    """A failure; a warning if params.yaml does not name the strategy, or trains it in ``exact`` alone."""
    finding = of_error(_too_long(error, trial.seconds), name=trial.name)
    train = trial.params.train
    if trial.name in {BASELINE.name, "exact"}:
        return finding
    if trial.strategy not in train.strategies:
        why = "it is not in train.strategies"
    elif trial.numerics not in train.numerics:
        why = f"{trial.numerics} is not in train.numerics"
    else:
        return finding
    return replace(finding, status="warning", text=f"{finding.text}; {why}", exit_code=0)


def _too_long(error: SamebitsError, seconds: int) -> SamebitsError:
    """The error that a trial took too long if its alarm ended it; else the error itself."""
    if isinstance(error, WorkerSignalledError) and error.signum == signal.SIGALRM:
        return UserError(f"the model took longer than {seconds} s", hint="look for an endless loop in it")
    return error


def _written_findings(out: Path) -> list[Finding]:
    """The findings that rank 0 of a trial has written."""
    file = out / FINDINGS
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [Finding(**json.loads(line)) for line in lines]
