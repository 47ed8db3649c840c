"""Runs one training or one evaluation in worker processes of its own."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from samebits.errors import Interrupted, SamebitsError, WorkerError, first_line
from samebits.files import make_folder, remove
from samebits.here import stage_command
from samebits.host import hide_gpus
from samebits.host.cluster_environment import Nodes
from samebits.records.log import LOGS, SCHEMA, EndEvent, RunLog, SampledEvent, StartEvent, new_key, store_in_use
from samebits.records.provenance import note_provenance
from samebits.records.run import FILES, TRACE, Evaluation, run_name
from samebits.remarks import FewerDevices
from samebits.training.checkpoints import FOLDER
from samebits.training.evaluation import evaluate_run
from samebits.workers.processes import import_compiler, launch
from samebits.workers.rank import failures_reported
from samebits.workers.worker import TrainRequest, train_as_rank
from samebits.workers.world import gathered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from samebits.params import Params
    from samebits.params.schema import NumericsName
    from samebits.records.log import Status
    from samebits.strategies import StrategyName
    from samebits.strategies.placement import Placement
    from samebits.workers.board import Sample
    from samebits.workers.rank import Reporter

ALONE = Nodes()


def run_training(
    params: Params,
    strategy: StrategyName,
    numerics: NumericsName,
    *,
    data_dir: Path,
    out_dir: Path,
    start_sender: Callable[[Path], object] | None = None,
    checkpoints: Path | None = FOLDER,
    steps: int | None = None,
    trace: bool = False,
    nodes: Nodes = ALONE,
    prepare: Callable[[], object] = lambda: None,
) -> Placement:
    """Train ``params.model`` under one strategy and write the run's files to ``out_dir``.

    ``start_sender`` is called with the path of the run's log; without it nothing is logged. ``checkpoints`` is the
    folder of checkpoints, None for no checkpoints. ``steps`` ends the training early; such a training uses no
    checkpoints, because those in the folder belong to the whole training. With ``trace`` some steps are also written
    as a trace. Each of several ``nodes`` calls this function, and only the first one writes. A node that lacks
    ``data_dir`` makes it with ``prepare``.

    Raises:
        UserError: the parameters, the data or the model are wrong, or not the same on all machines.
        HostError: devices or memory are missing, or the machines do not find each other.
        WorkerError: a worker or a machine failed.
        Interrupted: a signal ended the training.
    """
    import_compiler()
    with gathered(
        params,
        strategy,
        numerics,
        nodes,
        arguments={"steps": steps, "trace": trace},
        data_dir=data_dir,
        prepare=prepare,
    ) as team:
        placement = team.placement
        if placement.device_type == "cpu":
            hide_gpus()
        key, log = new_key(run_name(strategy, numerics)), None
        if team.leads:
            _make_empty(out_dir)
            for note in placement.notes:
                if isinstance(note, FewerDevices):
                    sys.stderr.write(f"note: {note.sentence()}\n")
        if team.leads and start_sender:
            start = StartEvent(
                log_schema=SCHEMA,
                tracking_uri=store_in_use(),
                run=key,
                strategy=strategy,
                numerics=numerics,
                placement=placement,
                params=params,
                tags=_experiment_of_dvc(),
            )
            log = _log(start, start_sender)
        if log is not None:
            team.peers.on_sample(partial(_log_sample, log))
        request = TrainRequest(
            params=params,
            numerics=numerics,
            placement=placement,
            split=team.split,
            data_dir=data_dir,
            out_dir=out_dir,
            key=key,
            nodes=team.nodes,
            log=log,
            checkpoints=checkpoints if steps is None else None,
            steps=steps,
            trace=trace,
        )
        with _ended(log):
            launch(partial(train_as_rank, request), team.ranks, timeout_s=params.train.timeout_s, peers=team.peers)
        return placement


def _experiment_of_dvc() -> dict[str, str]:
    """A tag with the name that `dvc exp run` gives an experiment, if this is one."""
    name = os.environ.get("DVC_EXP_NAME")
    return {"dvc_experiment": name} if name else {}


def _make_empty(out_dir: Path) -> None:
    """Make a folder for a run's files and remove those of an older run, which could be taken for this one's."""
    make_folder(out_dir)
    for name in (*FILES, TRACE):
        remove(out_dir / name)


@contextmanager
def _ended(log: RunLog | None) -> Iterator[None]:
    """Write to the log, if there is one, how the block ends."""
    status: Status = "FAILED"
    why = None
    try:
        yield
        status = "FINISHED"
    except Interrupted:
        status = "KILLED"
        raise
    except SamebitsError as error:
        why = str(error)
        raise
    finally:
        if log is not None:
            log.append(EndEvent(status=status, error=why))
            log.close()


def _log(start: StartEvent, start_sender: Callable[[Path], object]) -> RunLog | None:
    """Begin the log of a training and start its delivery; None if there can be no log, which ends no training."""
    log = None
    try:
        log = RunLog(LOGS / f"{start.run}.jsonl")
        note_provenance(log.path)  # before the first event, so that no run is delivered without its provenance
        log.append(start)
        log.flush()
    except (OSError, ValueError, SamebitsError) as error:
        sys.stderr.write(f"the training goes on untracked: {error}\n")
        if log:
            log.close()
        return None
    try:
        start_sender(log.path)
    except OSError as error:
        sys.stderr.write(f"nobody delivers the training now, `samebits track sync` will: {error}\n")
    return log


def _log_sample(log: RunLog, node: str, sample: Sample) -> None:
    log.append(SampledEvent(node=node, sample=sample.number, values=sample.values))


def evaluate_in_worker(params: Params, *, data_dir: Path, run_dir: Path, file: Path) -> Evaluation:
    """As ``evaluate_run``, in a worker of its own: switches that numerics set must not reach the next evaluation.

    The result is also written to ``file``.
    """

    def unforeseen(error: BaseException) -> WorkerError:
        return WorkerError(f"{type(error).__name__}: {first_line(str(error))}", hint="--debug shows the traceback")

    def work(reporter: Reporter) -> None:
        with failures_reported(reporter, unforeseen):
            evaluate_run(params, data_dir=data_dir, run_dir=run_dir, at=reporter.at).write(file)

    launch(work, 1, timeout_s=params.train.timeout_s)
    return Evaluation.read(file, made_by=stage_command("evaluate"))
