"""Every operation on the disk fails in turn, with each error of a disk and with a loss of power."""

from __future__ import annotations

import copy
import ctypes
import errno
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faults.area import Area, Case
from faults.disk import CONTENTS_LOSS, FAULTS, LOST, NO_FAULT, Disk, Fault, Operation, arm, read_trace
from faults.mlflow_store import events_of
from faults.subject import PARAMS, RUN_FILES, Child, Sandbox, check_end, expect, expect_none
from samebits.errors import UserError
from samebits.hashes import sha256
from samebits.params import parse_params

if TYPE_CHECKING:
    from samebits.records.log import Event

_STEPS = 16


@dataclass(frozen=True)
class Stage:
    """A stage under test, the folder that it writes, and the outputs of earlier stages that it needs."""

    name: str
    out: str
    arguments: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    @property
    def trains(self) -> bool:
        """Whether the stage writes checkpoints and a log."""
        return self.name == "train"


HOST = Stage("host", ".")
PREPARE = Stage("prepare", "data")
SINGLE = Stage("train", "runs/single-exact", ("--strategy", "single", "--numerics", "exact"), ("data",))
DDP = Stage("train", "runs/ddp-exact", ("--strategy", "ddp", "--numerics", "exact"), ("data",))
EVALUATE = Stage("evaluate", "reports/evaluation", needs=("data", "runs"))
COMPARE = Stage("compare", "reports", ("--no-tracking",), ("host.json", "data", "runs", "reports/evaluation"))
STAGES = (HOST, PREPARE, SINGLE, DDP, EVALUATE, COMPARE)


def small_params() -> dict[str, Any]:
    """Parameters of a training of 16 steps. Its third checkpoint deletes the first."""
    params = copy.deepcopy(PARAMS)
    params["train"] |= {"epochs": 1, "strategies": ["single", "ddp"], "numerics": ["exact"]}
    return parse_params(params).model_dump(mode="json")  # stages need every key, because DVC tracks them


_CREATED = re.compile(rb'"created": "[^"]*"')


class Writes(Area):
    """Each operation of each stage with each fault. ``ddp`` has the operations of ``single``: one fault for each."""

    NAME = "writes"
    UNIT = "write faults"
    IN_AN_HOUR = 100

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder, seed)
        if not hasattr(ctypes.CDLL(None), "faults_arm"):
            raise RuntimeError("call faults.disk.preload first: a process gets a shim only when it starts")
        import samebits.tracking.sender  # noqa: F401 - every training that is forked from here would import it

        self._params = small_params()
        self._reference: dict[Stage, dict[str, bytes]] = {}
        self._made = folder / "made"  # outputs of all stages without a fault
        self._made.mkdir()
        self._cases: list[tuple[Stage, Operation, Fault]] = []
        for stage in STAGES:
            operations = self._observe(stage)
            choices = self.random(0)
            for operation in operations:
                faults = [choices.choice(FAULTS)] if stage is DDP else FAULTS
                self._cases += [(stage, operation, fault) for fault in faults]
        self.total = len(self._cases)

    def case(self, number: int) -> Case:
        """One operation and one fault."""
        stage, operation, fault = self._cases[number]
        what = f"{stage.name} {' '.join(stage.arguments)}: {fault.name} at operation {operation.number}, {operation}"
        return Case(what, partial(self._try, number, stage, operation, fault))

    def _observe(self, stage: Stage) -> list[Operation]:
        """The operations of a stage without a fault. Its results become the reference."""
        sandbox = self._sandbox(stage, f"{stage.name}-{stage.out.partition('/')[2]}")
        disk, trace = Disk(sandbox.folder), sandbox.folder.parent / "trace"
        child = sandbox(stage.name, *stage.arguments, armed=partial(_arm, sandbox.folder, trace))
        check_end(child, {0})
        operations = read_trace(trace)
        disk.replay(operations)
        there = {str(path.relative_to(sandbox.folder)) for path in sandbox.folder.rglob("*")}
        expect(disk.names() == there, "the shim misses operations", disk.names() ^ there)
        self._reference[stage] = _results(sandbox, stage)
        for path in sandbox.folder.iterdir():
            if path.name not in ("params.yaml", ".samebits"):
                _copy(path, self._made / path.name)
        if stage.trains:
            first = self._reference.setdefault(SINGLE, self._reference[stage])
            expect(self._reference[stage] == first, "the strategies' bits differ")
            self._check_log(sandbox, whole=True)
            disk.lose_power(self.random(0), keep_names=True)
            self._check_nothing_lost(sandbox, stage, operations)
        return operations

    def _sandbox(self, stage: Stage, name: str) -> Sandbox:
        sandbox = Sandbox(self.folder / name, self._params)
        for needed in stage.needs:
            _copy(self._made / needed, sandbox.folder / needed)
        return sandbox

    def _try(self, number: int, stage: Stage, operation: Operation, fault: Fault) -> None:
        sandbox = self._sandbox(stage, str(number))
        disk, trace = Disk(sandbox.folder), sandbox.folder.parent / "trace"
        armed = partial(_arm, sandbox.folder, trace, operation.number, fault)
        child = sandbox(stage.name, *stage.arguments, armed=armed)
        operations = read_trace(trace)
        hit = next((one for one in operations if one.number == operation.number and one.outcome), None)
        expect(hit is not None, "the operation did not come, of this many", len(operations))
        if fault.error == LOST:
            try:
                expect_none(child.session, 10)
            finally:
                child.kill_tree()
            disk.replay(operations)
            disk.lose_power(self.random(number), keep_names=fault is CONTENTS_LOSS)
            written = _written_checkpoints(operations)
            expect(
                max(written, default=0) <= _newest_checkpoint(sandbox), "a checkpoint that was written is lost", written
            )
            self._check_nothing_lost(sandbox, stage, operations)
            self._check_log(sandbox, whole=False)
        else:
            self._check_failed(sandbox, stage, child, operation, fault)
        sandbox.age()
        shutil.rmtree(sandbox.folder / ".samebits" / "runs", ignore_errors=True)  # so that one log is left to check
        self._check_again(sandbox, stage)
        shutil.rmtree(sandbox.folder.parent)

    def _check_failed(self, sandbox: Sandbox, stage: Stage, child: Child, operation: Operation, fault: Fault) -> None:
        """Promises after a disk error, whether one operation failed or all later ones too."""
        passing = not fault.onward
        of_state = stage.trains and passing and ".samebits" in operation.path.parts
        check_end(child, {0} if of_state else {0, 3})  # a training goes on without its log or a checkpoint
        stderr, errors = child.err(), child.errors()
        expect(len(errors) == (child.code == 3), "not one error line for a failure, or one without it", stderr)
        full = fault.error == errno.ENOSPC and passing
        expect(not errors or not full or "no space" in errors[0], "the disk was full, and that is not said", errors)
        left = list(sandbox.temporary.iterdir())
        expect(not left, "left in the temporary folder", left)
        if child.code == 0:
            self._check_bits(sandbox, stage)
        if stage.trains and "untracked" not in stderr:
            self._check_log(sandbox, whole=passing and child.code == 0)

    def _check_again(self, sandbox: Sandbox, stage: Stage) -> None:
        """The same stage without a fault gives the reference results and leaves no other file."""
        newest = _newest_checkpoint(sandbox)
        child = sandbox(stage.name, *stage.arguments, armed=without_sender)
        check_end(child, {0})
        self._check_bits(sandbox, stage)
        resumed = [line for line in child.printed().splitlines() if "continued after step" in line]
        expect(bool(resumed) == bool(newest), "not what a checkpoint is for", (newest, resumed))
        expect(not newest or f"after step {newest};" in resumed[0], "another than the newest checkpoint", resumed)
        expect(not sandbox.leftovers(), "left over", sandbox.leftovers())
        there = _files(sandbox, stage)
        wanted = RUN_FILES if stage.trains else self._reference[stage].keys()
        expect(there.keys() == wanted, "other files than a stage writes", list(there))
        if stage.trains:
            left = list((sandbox.folder / ".samebits" / "resume").iterdir())
            expect(not left, "checkpoints of a training that is done", left)
            self._check_log(sandbox, whole=True)

    def _check_nothing_lost(self, sandbox: Sandbox, stage: Stage, operations: list[Operation]) -> None:
        """A training that deleted its checkpoints has its results on the disk."""
        deleted = any(one.kind == "rmdir" and one.path.parent.name == "resume" for one in operations)
        if deleted and not _newest_checkpoint(sandbox):
            expect(_files(sandbox, stage).keys() >= RUN_FILES, "neither checkpoints nor results", stage.out)
            self._check_bits(sandbox, stage)

    def _check_bits(self, sandbox: Sandbox, stage: Stage) -> None:
        results = _results(sandbox, stage)
        for name, content in self._reference[stage].items():
            expect(results.get(name) == content, "wrong bits", name)

    def _check_log(self, sandbox: Sandbox, *, whole: bool) -> None:
        """A log has no loss twice and no wrong loss. If ``whole``, one log has all of them."""
        logs = sorted((sandbox.folder / ".samebits" / "runs").glob("*.jsonl"))
        expect(len(logs) == 1 or not whole, "not one log", logs)
        lines = self._reference[SINGLE]["losses.csv"].decode().splitlines()[1:]
        for log in logs:
            events = _events(log)
            told = [loss for event in events if event.event == "losses" for loss in _numbered(event)]
            expect(told == lines[: len(told)], "losses that are not those of losses.csv", told)
            kinds = [event.event for event in events if event.event != "losses"]
            if whole:
                expect(len(told) == _STEPS, "lost losses: the log tells so many", len(told))
                expect(kinds == ["start", "setup", "result", "end"], "lost or doubled events", kinds)
                expect(events[-1].event == "end" and events[-1].status == "FINISHED", "not finished", events[-1])
            else:
                expect(len(set(kinds)) == len(kinds), "doubled events", kinds)


def without_sender() -> None:
    """Write logs without a sender that delivers them."""
    from samebits.tracking import sender

    sender.start_sender = lambda log: 0  # noqa: ARG005


def _arm(folder: Path, trace: Path, number: int = -1, fault: Fault = NO_FAULT) -> None:
    without_sender()
    arm(folder, trace, number, fault)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    else:
        shutil.copy(source, target)


def _files(sandbox: Sandbox, stage: Stage) -> dict[str, Path]:
    """Files of a stage's output folder by name, without params.yaml, which the sandbox wrote."""
    folder = sandbox.folder / stage.out
    files = [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
    return {path.name: path for path in files if path.name != "params.yaml"}


def _results(sandbox: Sandbox, stage: Stage) -> dict[str, bytes]:
    """Contents of the files that the stage's inputs determine, without the time at which they were made."""
    names = ("model.safetensors", "losses.csv") if stage.trains else None
    return {
        name: _CREATED.sub(b"", path.read_bytes())
        for name, path in _files(sandbox, stage).items()
        if names is None or name in names
    }


def _written_checkpoints(operations: list[Operation]) -> set[int]:
    """Steps of the checkpoints whose contents and name are on the disk and that were not deleted."""
    named, written = set[Path](), set[Path]()
    for operation in (one for one in operations if one.outcome == 0):
        if operation.kind == "rename" and operation.path.name == "unfinished":
            named.add(operation.other)
        elif operation.kind == "fsync":
            written |= {path for path in named if path.parent == operation.path}
        elif operation.kind == "unlink":
            written.discard(operation.path)
            named.discard(operation.path)
    return {_step(path) for path in written}


def _newest_checkpoint(sandbox: Sandbox) -> int:
    """Step of the newest whole checkpoint, by the hash in its name. 0 for none."""
    found = (sandbox.folder / ".samebits" / "resume").glob("*/*-*.safetensors")
    return max((_step(path) for path in found if path.stem.endswith(f"-{sha256(path)}")), default=0)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.partition("-")[0])


def _events(log: Path) -> list[Event]:
    """Events of a log up to its first unreadable line."""
    events = []
    with suppress(UserError):
        for event in events_of(log):
            events.append(event)
    return events


def _numbered(event: Any) -> list[str]:
    """Losses as lines of losses.csv."""
    import numpy as np

    return [f"{step},{np.float32(loss)!s}" for step, loss in enumerate(event.losses, start=event.first_step)]
