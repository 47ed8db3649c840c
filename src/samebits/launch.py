"""Start a job's workers through torchrun's launcher, and turn their failures into errors.

Workers are forked from this process after everything heavy is imported, which takes no time where a fresh
interpreter takes seconds. That is safe while this process has one thread, and has neither computed with torch nor
touched CUDA.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import elastic_launch

from samebits.errors import Interrupted, SamebitsError, WorkerError, from_exit_code
from samebits.host import count_cores, count_gpus
from samebits.numerics import fast
from samebits.placement import Placement, place
from samebits.rendezvous import enter_worker, launch_config
from samebits.resume import FOLDER
from samebits.runlog import LOGS, RunLog, new_key
from samebits.worker import Job, work

if TYPE_CHECKING:
    from collections.abc import Callable

    from samebits.params import Params
    from samebits.params.schema import NumericsName, StrategyName


def run_training(
    params: Params,
    strategy: StrategyName,
    numerics: NumericsName,
    *,
    data_dir: Path,
    out_dir: Path,
    start_sender: Callable[[Path], object] | None = None,
    resume: Path | None = FOLDER,
    steps: int | None = None,
) -> Placement:
    """Train ``params.model`` under one strategy and write the run's files to ``out_dir``.

    ``start_sender`` is called with the run's local log once it exists; without it nothing is logged. Checkpoints are
    kept under ``resume``, None for none. ``steps`` ends the training early.

    Raises:
        UserError: the parameters, the data or the model are wrong.
        HostError: there are not as many devices, or not enough memory.
        WorkerError: a worker failed.
        Interrupted: a signal ended the training.
    """
    if numerics == "fast":
        import torch._dynamo  # noqa: F401 - else each worker would, at its first optimizer step, for seconds
    shards = params.shards(numerics)
    placement = place(strategy, params.train, gpus=count_gpus(), cores=count_cores(), shards=shards)
    if placement.device_type == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what NVML does not show must not be found by PyTorch either
    key = new_key(f"{strategy}-{numerics}")
    log = None
    if start_sender is not None:
        log = RunLog(LOGS / f"{key}.jsonl")
        log.event(
            "start",
            tracking_uri=os.environ.get("MLFLOW_TRACKING_URI"),
            run=key,
            strategy=strategy,
            numerics=numerics,
            placement=placement.as_dict(),
            params=params.model_dump(mode="json"),
        )
        start_sender(log.path)
    out_dir.mkdir(parents=True, exist_ok=True)
    status = "FAILED"
    try:
        launch(
            work,
            Job(params, placement, numerics, data_dir, out_dir, key, log, resume, steps),
            placement.world_size,
        )
        status = "FINISHED"
    except Interrupted:
        status = "KILLED"
        raise
    finally:
        if log is not None:
            log.event("end", status=status)
            log.close()
    return placement


def launch(function: Callable[..., None], job: object, workers: int) -> None:
    """Run ``function(job, scratch)`` in so many forked workers and wait; the first failure ends them all."""
    fast.prepare_environment()
    _silence_launcher()
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="samebits-") as folder:
        try:
            elastic_launch(launch_config(workers), _enter)(function, job, Path(folder))
        except ChildFailedError as error:
            raise _failure(error, Path(folder)) from None
        except SignalException as error:
            raise Interrupted(int(error.sigval)) from None


def _silence_launcher() -> None:
    """Drop messages that repeat what our error says; each of these loggers has a level of its own."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _enter(function: Callable[..., None], job: object, scratch: Path) -> None:
    """Run in a worker.

    The launcher's signal handlers, which a fork inherits, are undone. Unless it chooses otherwise (``stopping``), a
    worker ends at once, also while it waits in a collective; and also when its launcher is killed, since torch then
    sends it SIGINT.
    """
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)
    enter_worker(scratch)
    function(job, scratch)


_SIGNAL_HINTS = {
    "SIGKILL": "the kernel may have been out of memory: see dmesg",
    "SIGABRT": "NCCL ends a rank like this that waited longer than train.timeout_s for another; see NCCL_DEBUG=INFO",
    "SIGBUS": "shared memory may be full: give the container more with --shm-size or --ipc=host",
}


def _failure(error: ChildFailedError, folder: Path) -> SamebitsError:
    """The root cause: a worker that a signal ended, else the first error that a worker left behind."""
    rank, first = min(error.failures.items(), key=lambda item: item[1].timestamp)
    if first.exitcode < 0:
        name = signal.Signals(-first.exitcode).name
        hint = _SIGNAL_HINTS.get(name, "run with --debug")
        return WorkerError(f"the worker of rank {rank} was ended by {name}", hint=hint)
    if first.exitcode in (130, 143):
        hint = "run the same command again; it goes on from a checkpoint"
        return WorkerError(f"the worker of rank {rank} was asked to stop", hint=hint)
    reports: list[dict[str, Any]] = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*.json")]
    if not reports:
        return WorkerError(f"the worker of rank {rank} ended with exit code {first.exitcode}", hint="run with --debug")
    report = min(reports, key=lambda item: float(item["time"]))
    found = from_exit_code(report["exit_code"], report["message"], report["hint"])
    found.traceback = report["traceback"]
    return found
