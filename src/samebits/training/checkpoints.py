"""Checkpoints of a training that has not ended, so that the same stage goes on where it was stopped.

They are kept outside DVC's outs, in ``.samebits/resume/<identity>``, and deleted when the training is complete. A
checkpoint is a safetensors file, ``<step>-<SHA-256>``, that was renamed into place as a whole, with a record in JSON as
its metadata. Rank 0 alone reads and writes them: the machines of a training need not share a disk.
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
KEPT = 2  # the newest, and the one before in case that is damaged
_FORMAT = 4
_TIMES, _RANDOM = ("losses", "step_seconds"), "random."  # keys beside those of the state
_DIGITS = 12  # of a step in a file's name
_CODE = (
    "batch_split.py", "models", "numerics", "params", "portable", "section.py", "strategies", "tasks", "training"
)  # fmt: skip
"""What a result depends on."""

GRACE_SECONDS = 10.0  # for the steps that are under way and the checkpoint; the launcher waits longer before SIGKILL
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
    """A digest of everything that the result of a training is a function of, and of the folder that it is written to.

    Under ``exact`` that is neither strategy nor devices nor host; under ``fast`` it is all of them. ``source`` is the
    digest of what a user's model is made of. Another folder is another training: it goes on from no stop of this one.
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
    """What a checkpoint holds beside tensors: the rest of the ``state``, and what a ``TrainResult`` has not in tensors.

    ``place`` names strategy, devices and host that it was written under.
    """

    state: dict[str, Any]
    seconds: NonNegativeFloat
    resumed: tuple[int, ...]
    place: str
    elsewhere: bool


class Checkpoints:
    """The checkpoints of one identity; ``rank`` 0 alone writes.

    Two trainings of one identity at a time do not share them: the second has none.
    """

    def __init__(self, name: str, rank: int, folder: Path = FOLDER) -> None:
        self._folder = folder / name
        self._writes = rank == 0
        self._lock = -1
        if self._writes:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                for above in (folder, folder.parent, folder.parent.parent):  # else a checkpoint on the disk has no name
                    fsync(above)
                # Neither a link that leads elsewhere nor a pipe that never opens.
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
                self._lock = os.open(self._folder / "lock", flags, private_mode(self._folder))
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._writes = False
            except OSError as error:
                self._writes = False
                sys.stderr.write(f"the training goes on without checkpoints: {error}\n")

    def steps(self) -> list[int]:
        """Steps of the checkpoints that rank 0 may use, the newest first; those that are not whole are set aside."""
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
        """Say that a checkpoint is of no use, and let nobody try it again."""
        for path in (path for path in self._kept() if _step_of(path) == step):
            _set_aside(path, first_line(str(why)))

    def save(self, step: int, tensors: dict[str, Tensor], record: CheckpointRecord) -> None:
        """Write a checkpoint of the state after ``step`` steps, and delete all but the newest two.

        Raises:
            OSError: it cannot be written; the ones before are still there.
        """
        if not self._writes:
            return
        unfinished = self._folder / "unfinished"
        copied = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
        try:
            with disk_errors():
                save_file(copied, unfinished, metadata={"record": record.model_dump_json()})
            fsync(unfinished)
            for damaged in (path for path in self._kept() if _step_of(path) >= step):  # else this had gone on from it
                damaged.unlink()
            unfinished.rename(self._folder / f"{step:0{_DIGITS}d}-{sha256(unfinished)}.safetensors")
            fsync(self._folder)
        except OSError:
            with suppress(OSError):  # what went wrong first is told
                unfinished.unlink()
            raise
        with suppress(OSError):  # the new one is written, whatever becomes of the old ones
            for old in self._kept()[:-KEPT]:
                old.unlink()

    def delete(self) -> None:
        """Delete all of them, and let another training of this identity have some."""
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
    """SIGINT or SIGTERM, on which a worker ends at once, or first writes a checkpoint.

    It waits for signals in a thread, because the main thread may be in a collective that does not return.
    While it is ``armed`` a signal is kept in ``signum``, for the training to see between two segments. Otherwise, and
    when the grace is over, the process ends by the signal. Both signals must have their default action.
    """

    def __init__(self) -> None:
        self.armed = False
        self.signum = 0
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # threads that start later inherit it
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        self.signum = signal.sigwait(_SIGNALS)
        if self.armed:
            time.sleep(GRACE_SECONDS)  # Ctrl-C comes twice: from the terminal, and from the launcher
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        os.kill(os.getpid(), self.signum)


def _resumed(
    trainable: Trainable, tensors: dict[str, Tensor], record: CheckpointRecord, *, step: int, place: str
) -> TrainResult:
    """Put a training where its checkpoint is."""
    losses, step_seconds = (tensors[name].tolist() for name in ("losses", "step_seconds"))
    if len(losses) != step or len(step_seconds) != step or not step <= trainable.total_steps:
        text = f"{len(losses)} losses and {len(step_seconds)} times, and it is named by step {step}"
        raise ValueError(f"{text} of {trainable.total_steps}")
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
        resumed=list(record.resumed),
        elsewhere=record.elsewhere or record.place != place,
    )


def _from_first_rank(
    worker: Worker, tensors: dict[str, Tensor], record: CheckpointRecord | None
) -> tuple[dict[str, Tensor], CheckpointRecord]:
    """What rank 0 has read; the others are told names, types and shapes first."""
    layout = {name: (str(value.dtype).removeprefix("torch."), value.shape) for name, value in tensors.items()}
    description = json.dumps([layout, record.model_dump() if record else None])
    layout, told = json.loads(worker.ranks.broadcast_bytes(description.encode()))
    if worker.rank:
        tensors = {name: torch.empty(shape, dtype=getattr(torch, kind)) for name, (kind, shape) in layout.items()}
    for name in layout:
        worker.ranks.broadcast(tensors[name])
    return tensors, CheckpointRecord.model_validate(told)


class PeriodicCheckpointer:
    """Checkpoints after every ``every`` steps, 0 for none, and when somebody asks to stop.

    Every rank has one and calls it at the same steps; rank 0 writes. ``place`` names strategy, devices and host, under
    which times are comparable.
    """

    def __init__(self, checkpoints: Checkpoints, every: int, stop: StopRequest, *, place: str) -> None:
        self._checkpoints, self._every, self._stop, self._place = checkpoints, every, stop, place
        self._complained = False

    def resume(self, trainable: Trainable) -> TrainResult | None:
        """Continue from the newest checkpoint that is whole and of use, which rank 0 reads and hands to the others."""
        worker = trainable.worker
        training, tensors, record = worker.ranks.first_alone(lambda: self._newest(trainable)) or (None, {}, None)
        chosen = -1 if training is None else len(training.losses)
        step = int(worker.ranks.max_over_ranks([chosen])[0])
        self._stop.armed = True
        if step >= 0 and worker.world_size > 1:  # the others may be on machines without that file
            tensors, record = _from_first_rank(worker, tensors, record)
            training = training or _resumed(trainable, tensors, record, step=step, place=self._place)
        return training

    def _newest(self, trainable: Trainable) -> tuple[TrainResult, dict[str, Tensor], CheckpointRecord] | None:
        for step in self._checkpoints.steps():
            try:
                tensors, record = self._checkpoints.load(step)
                return _resumed(trainable, tensors, record, step=step, place=self._place), tensors, record
            except Exception as error:  # noqa: BLE001 - whatever somebody wrote there, the training does not end for it
                self._checkpoints.set_aside(step, error)
                trainable.reset()
        return None

    def next_stop(self, step: int) -> int:
        """The next multiple of ``every``."""
        return (step // self._every + 1) * self._every if self._every else sys.maxsize

    def segment_done(self, trainable: Trainable, so_far: TrainResult, *, last: bool) -> None:
        """Write at a multiple of ``every`` (not if it is the ``last``); if a rank was asked to stop, write and raise.

        Raises Interrupted; a checkpoint of the last step has all of a training but its files.
        """
        signum = int(trainable.worker.ranks.max_over_ranks([self._stop.signum])[0])
        step = len(so_far.losses)
        if signum or (not last and self._every and step % self._every == 0):
            self._save(trainable, so_far)
        if signum:
            raise Interrupted(signum)

    def training_done(self) -> None:
        """Obey at once whoever asks to stop from here on: what is left to do is not kept."""
        self._stop.armed = False

    def delete(self) -> None:
        """The training's files are written: nothing will go on from here."""
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
        worker.ranks.max_over_ranks([0.0])  # all go on at once: the writing is in no step's time

    def _write(self, step: int, tensors: dict[str, Tensor], record: CheckpointRecord) -> None:
        try:
            self._checkpoints.save(step, tensors, record)
        except OSError as error:
            if not self._complained:
                sys.stderr.write(f"no checkpoint could be written, the training goes on: {error}\n")
            self._complained = True
