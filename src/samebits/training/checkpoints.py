"""Checkpoints of an unfinished training, from which the same stage continues after a stop.

They lie outside DVC's outs, in ``.samebits/resume/<identity>``, and are deleted when the training is complete. A
checkpoint is a safetensors file ``<step>-<SHA-256>`` with a JSON record as its metadata, renamed into place when it is
whole. Only rank 0 reads and writes checkpoints: the machines of a training need not share a disk.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import NonNegativeFloat, ValidationError
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from samebits.errors import Interrupted, first_line, one_line
from samebits.files import Part, disk_errors, first_fault, fsync, private_mode
from samebits.hashes import sha256, sha256_tree
from samebits.params import values_affecting
from samebits.training.loop import TrainResult

if TYPE_CHECKING:
    from samebits.params import Params
    from samebits.params.schema import NumericsName
    from samebits.records.card import Card
    from samebits.strategies.placement import Placement
    from samebits.training.loop import Trainable
    from samebits.training.worker import Worker

FOLDER = Path(".samebits/resume")
KEPT = 2  # the newest, and the one before it in case the newest is damaged
_FORMAT = 5
_TIMES, _RANDOM = ("losses", "step_seconds", "digests"), "random."  # keys of tensors beside those of the state
_DIGITS = 12  # of a step in a file's name
_CODE = (
    "batch_split.py", "models", "numerics", "params", "portable", "section.py", "strategies", "tasks", "training"
)  # fmt: skip
"""The code that a result depends on."""

GRACE_SECONDS = 10.0  # for the running steps and the checkpoint; the launcher waits longer before SIGKILL
_SIGNALS = {signal.SIGINT, signal.SIGTERM}


def identity(
    params: Params,
    numerics: NumericsName,
    placement: Placement,
    *,
    card: Card,
    host: str,
    source: str | None,
    folder: Path,
) -> str:
    """A digest of everything that determines the result of a training, and of the folder for the result.

    Under ``fast`` this includes strategy, devices and host, under ``exact`` none of them. ``source`` is the digest of
    the sources of a user's model. A training into another folder does not continue from a stop of this one.
    """
    package = Path(__file__).parent.parent
    facts: dict[str, Any] = {
        "format": _FORMAT,
        "code": {name: sha256_tree(package / name) for name in _CODE},
        "versions": {"torch": str(torch.__version__)},
        "source": source,
        "folder": os.path.relpath(folder),
        "data": card.sha256,
        "params": values_affecting(params, numerics),
        "numerics": numerics,
    }
    if numerics == "fast":
        facts |= {"host": host, "placement": placement.model_dump(mode="json")}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


class CheckpointRecord(Part):
    """The part of a checkpoint that is not tensors: of the ``state``, and of the ``TrainResult`` so far.

    ``place`` names the strategy, devices and host under which the checkpoint was written.
    """

    state: dict[str, Any]
    seconds: NonNegativeFloat
    resumed: tuple[int, ...]
    place: str
    elsewhere: bool


class Checkpoints:
    """The checkpoints of one identity; only ``rank`` 0 reads and writes.

    If two trainings of one identity run at a time, the second has no checkpoints.
    """

    def __init__(self, name: str, rank: int, folder: Path = FOLDER) -> None:
        self._folder = folder / name
        self._writes = rank == 0
        self._lock = -1
        if self._writes:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                for above in (folder, folder.parent, folder.parent.parent):  # so that a checkpoint keeps its path
                    fsync(above)
                # A link could lead elsewhere, and a pipe could never open.
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
                self._lock = os.open(self._folder / "lock", flags, private_mode(self._folder))
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._writes = False
            except OSError as error:
                self._writes = False
                sys.stderr.write(f"the training goes on without checkpoints: {error}\n")

    def steps(self) -> list[int]:
        """Steps of the usable checkpoints, the newest first; damaged ones are set aside."""
        if not self._writes:
            return []
        for path in (path for path in self._kept() if not _is_whole(path)):
            _set_aside(path, "its bytes are not those that its name has the SHA-256 of")
        return [_step_of(path) for path in reversed(self._kept())]

    def load(self, step: int) -> tuple[dict[str, Tensor], CheckpointRecord]:
        """Tensors and record of a checkpoint."""
        path = next(path for path in self._kept() if _step_of(path) == step)
        with safe_open(path, framework="pt") as file:
            text = file.metadata()["record"]
        try:
            return load_file(path), CheckpointRecord.model_validate_json(text)
        except ValidationError as error:
            raise ValueError(f"its record: {first_fault(error)}") from None

    def set_aside(self, step: int, why: Exception) -> None:
        """Say that a checkpoint is of no use and rename it, so that nobody tries it again."""
        for path in (path for path in self._kept() if _step_of(path) == step):
            _set_aside(path, first_line(str(why)))

    def save(self, step: int, tensors: dict[str, Tensor], record: CheckpointRecord) -> None:
        """Write a checkpoint of the state after ``step`` steps, and delete all but the newest two.

        Raises:
            OSError: it cannot be written; the earlier ones remain.
        """
        if not self._writes:
            return
        unfinished = self._folder / "unfinished"
        copied = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
        try:
            with disk_errors():
                save_file(copied, unfinished, metadata={"record": record.model_dump_json()})
            fsync(unfinished)
            # The training would have continued from a whole checkpoint of a later step.
            for damaged in (path for path in self._kept() if _step_of(path) >= step):
                damaged.unlink()
            unfinished.rename(self._folder / f"{step:0{_DIGITS}d}-{sha256(unfinished)}.safetensors")
            fsync(self._folder)
        except OSError:
            with suppress(OSError):  # the first error is reported
                unfinished.unlink()
            raise
        with suppress(OSError):  # the new one is written, even if an old one cannot be deleted
            for old in self._kept()[:-KEPT]:
                old.unlink()

    def delete(self) -> None:
        """Delete all checkpoints and release the lock for another training of this identity."""
        if self._writes:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _kept(self) -> list[Path]:
        return sorted(self._folder.glob(f"{'[0-9]' * _DIGITS}-*.safetensors"))


def _set_aside(checkpoint: Path, why: str) -> None:
    sys.stderr.write(f"{checkpoint}: not a checkpoint of this training, it is set aside: {one_line(why)}\n")
    with suppress(OSError):
        checkpoint.rename(checkpoint.with_suffix(".refused"))


def _is_whole(checkpoint: Path) -> bool:
    try:
        return checkpoint.is_file() and checkpoint.stem.endswith(f"-{sha256(checkpoint)}")
    except OSError:
        return False


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.stem.partition("-")[0])


class StopRequest:
    """Waits for SIGINT or SIGTERM, on which a worker ends at once or writes a checkpoint first.

    A thread waits for the signals, because the main thread may be in a collective that does not return. While
    ``armed``, it stores a signal in ``signum``, which the training reads between two segments. Otherwise, and after the
    grace, the process ends by the signal. Both signals must have their default action.
    """

    def __init__(self) -> None:
        self.armed = False
        self.signum = 0
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # threads that start later inherit it
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        self.signum = signal.sigwait(_SIGNALS)
        if self.armed:
            time.sleep(GRACE_SECONDS)  # Ctrl-C arrives twice, from the terminal and from the launcher
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        os.kill(os.getpid(), self.signum)


def _resumed(
    trainable: Trainable, tensors: dict[str, Tensor], record: CheckpointRecord, *, step: int, place: str
) -> TrainResult:
    """Restore the state of a checkpoint; return the result so far. Raises ValueError: it is of another training."""
    losses, step_seconds, digests = (tensors[name].tolist() for name in _TIMES)
    counts = [len(losses), len(step_seconds), len(digests) or step]
    if counts != [step] * 3 or not step <= trainable.total_steps:
        text = "{} losses, {} times and digests of {} steps, and it is named by step {} of {}"
        raise ValueError(text.format(*counts, step, trainable.total_steps))
    if not all(math.isfinite(value) and value >= 0 for value in step_seconds):
        raise ValueError("a time of it is no number of seconds")
    state = {key: value for key, value in tensors.items() if key not in _TIMES and not key.startswith(_RANDOM)}
    trainable.load_state_dict(state, record.state)
    worker = trainable.worker
    streams = [f"{_RANDOM}{worker.rank}.{i}" for i in range(len(worker.random_state()))]
    if all(name in tensors for name in streams):
        worker.set_random_state([tensors[name] for name in streams])
    return TrainResult(
        losses=losses,
        step_seconds=step_seconds,
        seconds=record.seconds,
        digests=[[int(value) for value in row] for row in digests],
        resumed=list(record.resumed),
        elsewhere=record.elsewhere or record.place != place,
    )


def _from_first_rank(
    worker: Worker, tensors: dict[str, Tensor], record: CheckpointRecord | None
) -> tuple[dict[str, Tensor], CheckpointRecord]:
    """Broadcast the checkpoint that rank 0 has read; the others receive names, types and shapes first."""
    layout = {name: (str(value.dtype).removeprefix("torch."), value.shape) for name, value in tensors.items()}
    description = json.dumps([layout, record.model_dump() if record else None])
    layout, told = json.loads(worker.ranks.broadcast_bytes(description.encode()))
    if worker.rank:
        tensors = {name: torch.empty(shape, dtype=getattr(torch, kind)) for name, (kind, shape) in layout.items()}
    for name in layout:
        worker.ranks.broadcast(tensors[name])
    return tensors, CheckpointRecord.model_validate(told)


class PeriodicCheckpointer:
    """Writes checkpoints every ``every`` steps, 0 for never, and on a request to stop.

    Every rank has one and calls it at the same steps; rank 0 writes. ``place`` names the strategy, devices and host,
    under which times are comparable.
    """

    def __init__(self, checkpoints: Checkpoints, every: int, stop: StopRequest, *, place: str) -> None:
        self._checkpoints, self._every, self._stop, self._place = checkpoints, every, stop, place
        self._complained = False

    def resume(self, trainable: Trainable) -> TrainResult | None:
        """Continue from the newest usable checkpoint, which rank 0 reads and broadcasts; None if there is none."""
        worker = trainable.worker
        training, tensors, record = worker.ranks.first_alone(lambda: self._newest(trainable)) or (None, {}, None)
        chosen = -1 if training is None else len(training.losses)
        step = int(worker.ranks.max_over_ranks([chosen])[0])
        self._stop.armed = True
        if step >= 0 and worker.world_size > 1:  # the other ranks may be on machines without the file
            tensors, record = _from_first_rank(worker, tensors, record)
            training = training or _resumed(trainable, tensors, record, step=step, place=self._place)
        return training

    def _newest(self, trainable: Trainable) -> tuple[TrainResult, dict[str, Tensor], CheckpointRecord] | None:
        for step in self._checkpoints.steps():
            try:
                tensors, record = self._checkpoints.load(step)
                return _resumed(trainable, tensors, record, step=step, place=self._place), tensors, record
            except Exception as error:  # noqa: BLE001 - no content of a file may end the training
                self._checkpoints.set_aside(step, error)
                trainable.reset()
        return None

    def next_stop(self, step: int) -> int:
        """The next step, after ``step``, that is a multiple of ``every``."""
        return (step // self._every + 1) * self._every if self._every else sys.maxsize

    def segment_done(self, trainable: Trainable, so_far: TrainResult, *, last: bool) -> None:
        """Write a checkpoint at a multiple of ``every``, unless the segment is the ``last``, and on a request to stop.

        Raises Interrupted: a rank was asked to stop. A checkpoint of the last step lacks only the training's files.
        """
        signum = int(trainable.worker.ranks.max_over_ranks([self._stop.signum])[0])
        step = len(so_far.losses)
        if signum or (not last and self._every and step % self._every == 0):
            self._save(trainable, so_far)
        if signum:
            raise Interrupted(signum)

    def training_done(self) -> None:
        """Stop at once on a request from now on, because checkpoints do not cover the remaining work."""
        self._stop.armed = False

    def delete(self) -> None:
        """Delete the checkpoints, once the training's files are written."""
        self._checkpoints.delete()

    def _save(self, trainable: Trainable, so_far: TrainResult) -> None:
        worker = trainable.worker
        tensors, state = trainable.state_dict()
        for i, stream in enumerate(worker.random_state()):
            everyone: Tensor = worker.ranks.all_gather(stream.to(worker.device))
            tensors |= {f"{_RANDOM}{rank}.{i}": one for rank, one in enumerate(everyone)}
        for name in _TIMES:
            tensors[name] = torch.tensor(getattr(so_far, name), dtype=torch.float64)
        record = CheckpointRecord(
            state=state,
            seconds=so_far.seconds,
            resumed=tuple(so_far.resumed),
            place=self._place,
            elsewhere=so_far.elsewhere,
        )
        worker.ranks.first_alone(lambda: self._write(len(so_far.losses), tensors, record))
        worker.ranks.max_over_ranks([0.0])  # all continue together, so that no step's time includes the writing

    def _write(self, step: int, tensors: dict[str, Tensor], record: CheckpointRecord) -> None:
        try:
            self._checkpoints.save(step, tensors, record)
        except OSError as error:
            if not self._complained:
                sys.stderr.write(f"no checkpoint could be written, the training goes on: {error}\n")
            self._complained = True
