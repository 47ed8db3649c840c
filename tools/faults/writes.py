"""Every write to the disk fails in turn: with each error that a disk has, and with the loss of power."""

from __future__ import annotations

import copy
import ctypes
import errno
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faults.area import Area, Case
from faults.subject import PARAMS, RUN_FILES, Child, Sandbox, check_end, expect, expect_none
from samebits.errors import UserError
from samebits.hashes import sha256
from samebits.params import parse_params

if TYPE_CHECKING:
    import random

    from samebits.records.log import Event

_LIBRARY = "SAMEBITS_FAULTS_SHIM"
_SOURCE = Path(__file__).with_name("shim.c")
KINDS = (
    "create",
    "open",
    "write",
    "fsync",
    "rename",
    "mkdir",
    "unlink",
    "rmdir",
    "truncate",
    "link",
    "symlink",
    "chmod",
)
"""Of operations, in the order of the shim's own list."""
_POWER_LOSS = -1  # in place of an errno
_STEPS = 16


@dataclass(frozen=True)
class Fault:
    """What happens to one operation, and from then on to all of some kinds."""

    name: str
    error: int
    onward: frozenset[str] = frozenset()


NO_FAULT = Fault("nothing", 0)
POWER_LOSS = Fault("power loss", _POWER_LOSS)
CONTENTS_LOSS = Fault("power loss, but names are kept", _POWER_LOSS)
FAULTS = (
    Fault("ENOSPC", errno.ENOSPC, frozenset({"create", "write", "fsync", "mkdir", "link", "symlink"})),
    Fault("EIO", errno.EIO),
    Fault("EROFS", errno.EROFS, frozenset(KINDS)),
    Fault("EMFILE", errno.EMFILE),
    POWER_LOSS,
    CONTENTS_LOSS,
)
"""A disk stays full, and a file system that was found damaged stays read-only."""


@dataclass(frozen=True)
class Operation:
    """One line of a trace: ``outcome`` is 0 or an errno, ``other`` the new name, ``content`` what an fsync kept."""

    number: int
    kind: str
    outcome: int
    path: Path
    other: Path
    content: bytes | None = None

    def __str__(self) -> str:
        """For a message."""
        return f"{self.kind} of {'/'.join(self.path.parts[-2:])}"


# -- the shim ------------------------------------------------------------------------------------------------------


def preload() -> None:
    """Have this process run with the shim, which is built now; call it before anything heavy is imported.

    Python is started again, unless it runs with the shim already.
    """
    if library := os.environ.pop(_LIBRARY, None):
        # It stays mapped, and programs that are started from here get none.
        others = [name for name in os.environ.pop("LD_PRELOAD", "").split(":") if name not in ("", library)]
        if others:
            os.environ["LD_PRELOAD"] = ":".join(others)
        shutil.rmtree(Path(library).parent)
        return
    library = str(Path(tempfile.mkdtemp(prefix="faults-shim-")) / "shim.so")
    try:
        command = ["cc", "-shared", "-fPIC", "-O2", "-o", library, str(_SOURCE), "-ldl"]
        subprocess.run(command, check=True, stderr=subprocess.PIPE, encoding="utf-8")
    except (OSError, subprocess.CalledProcessError) as error:
        shutil.rmtree(Path(library).parent)
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else error
        sys.exit(f"error: {_SOURCE.name} cannot be built: {said}. hint: install a C compiler that is called cc")
    os.environ[_LIBRARY] = library
    os.environ["LD_PRELOAD"] = ":".join(filter(None, [library, os.environ.get("LD_PRELOAD")]))
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606


def arm(folder: Path, trace: Path, number: int = -1, fault: Fault = NO_FAULT) -> None:
    """Trace operations under ``folder`` in this process and those forked from it, and have one of them fail."""
    kinds = sum(1 << KINDS.index(kind) for kind in fault.onward)
    # Paths as the kernel names them: TMPDIR may be a link.
    problem = ctypes.CDLL(None).faults_arm(
        os.fsencode(folder.resolve()), number, fault.error, kinds, os.fsencode(trace)
    )
    if problem:
        raise OSError(problem, f"the shim cannot be armed: {os.strerror(problem)}")


def read_trace(trace: Path) -> list[Operation]:
    """The operations that were tried, in their order."""
    operations = []
    for line in trace.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        number, kind, outcome, first, second = line.split("\t")
        kept = Path(f"{trace}.{number}")
        content = kept.read_bytes() if kind == "fsync" and kept.exists() else None
        path, other = (Path(os.path.normpath(name)) for name in (first, second))
        operations.append(Operation(int(number), kind, int(outcome), path, other, content))
    return operations


# -- what a disk holds after the power was lost ----------------------------------------------------------------------


@dataclass
class Node:
    """A file or a folder: as programs see it, and as it was at its last fsync."""

    entries: dict[str, Node] | None = None  # of a folder
    content: bytes = b""  # of a file, at its last fsync
    dirty: bool = False
    kept: dict[str, Node] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> Node:
        """What lies there, all of it on the disk."""
        if path.is_dir():
            entries = {child.name: cls.of(child) for child in path.iterdir()}
            return cls(entries=entries, kept=dict(entries))
        return cls(content=path.read_bytes())


class Disk:
    """A folder on a disk, which is told the operations on it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._root = Node.of(folder)

    def replay(self, operations: list[Operation]) -> None:
        """Make the operations that succeeded."""
        for operation in operations:
            if operation.outcome == 0 and operation.path.is_relative_to(self._folder):
                self._make(operation)

    def names(self) -> set[str]:
        """All paths, as programs see them."""
        return set(_names(self._root, ""))

    def lose_power(self, choices: random.Random, *, keep_names: bool) -> None:
        """Put into the folder what the disk holds.

        Files whose last content was not brought to the disk go back to what they held before; with ``keep_names``
        renames are on the disk before contents are, which then may also be empty, cut short or zeros.
        """
        files, folders = dict[Path, bytes](), list[Path]()
        self._collect(self._root, self._folder, choices, keep_names, files, folders)
        for path in self._folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in folders:
            path.mkdir()
        for path, content in files.items():
            path.write_bytes(content)

    def _collect(
        self,
        node: Node,
        path: Path,
        choices: random.Random,
        keep_names: bool,
        files: dict[Path, bytes],
        folders: list[Path],
    ) -> None:
        entries = (node.entries or {}) if keep_names else node.kept
        for name, child in entries.items():
            here = path / name
            if child.entries is not None:
                folders.append(here)
                self._collect(child, here, choices, keep_names, files, folders)
            elif keep_names and child.dirty:
                seen = here.read_bytes()
                files[here] = choices.choice([child.content, b"", seen[: len(seen) // 2], bytes(len(seen))])
            else:
                files[here] = child.content

    def _make(self, operation: Operation) -> None:
        match operation.kind:
            case "create":
                self._entries(operation.path)[operation.path.name] = Node(dirty=True)
            case "mkdir":
                self._entries(operation.path)[operation.path.name] = Node(entries={})
            case "unlink" | "rmdir":
                del self._entries(operation.path)[operation.path.name]
            case "rename":
                moved = self._entries(operation.path).pop(operation.path.name)
                self._entries(operation.other)[operation.other.name] = moved
            case "open" | "write" | "truncate":
                if node := self._find(operation.path):
                    node.dirty = True
            case "fsync":
                if node := self._find(operation.path):
                    node.kept = dict(node.entries or {})
                    node.content, node.dirty = operation.content or b"", False
            case "link" | "symlink":
                raise AssertionError(f"{operation}: no file of the kit is a link")

    def _entries(self, path: Path) -> dict[str, Node]:
        node = self._find(path.parent)
        expect(node is not None and node.entries is not None, "the trace lacks what made a folder", path.parent)
        assert node is not None
        assert node.entries is not None
        return node.entries

    def _find(self, path: Path) -> Node | None:
        """None for a file without a name, which was unlinked while it was open."""
        node: Node | None = self._root
        for name in path.relative_to(self._folder).parts:
            node = (node.entries or {}).get(name) if node else None
        return node


def _names(node: Node, path: str) -> list[str]:
    found = []
    for name, child in (node.entries or {}).items():
        found += [path + name, *_names(child, f"{path}{name}/")]
    return found


# -- the area ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """A stage whose operations fail, the folder that it writes, and what it needs there from stages before it."""

    name: str
    out: str
    arguments: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    @property
    def trains(self) -> bool:
        """Whether it has checkpoints and a log."""
        return self.name == "train"


HOST = Stage("host", ".")
PREPARE = Stage("prepare", "data")
SINGLE = Stage("train", "runs/single-exact", ("--strategy", "single", "--numerics", "exact"), ("data",))
DDP = Stage("train", "runs/ddp-exact", ("--strategy", "ddp", "--numerics", "exact"), ("data",))
EVALUATE = Stage("evaluate", "reports/evaluation", needs=("data", "runs"))
COMPARE = Stage("compare", "reports", ("--no-tracking",), ("host.json", "data", "runs", "reports/evaluation"))
STAGES = (HOST, PREPARE, SINGLE, DDP, EVALUATE, COMPARE)


def small_params() -> dict[str, Any]:
    """A training of 16 steps, the third of whose checkpoints deletes the first."""
    params = copy.deepcopy(PARAMS)
    params["train"] |= {"epochs": 1, "strategies": ["single", "ddp"], "numerics": ["exact"]}
    return parse_params(params).model_dump(mode="json")  # DVC follows every key, and its stages want them all


class Writes(Area):
    """Each operation of each stage with each fault; ``ddp``, whose operations are the same, with one of the faults."""

    NAME = "writes"
    UNIT = "write faults"
    IN_AN_HOUR = 100

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder, seed)
        if not hasattr(ctypes.CDLL(None), "faults_arm"):
            raise RuntimeError("call faults.writes.preload first: a process gets a shim only when it starts")
        import samebits.tracking.sender  # noqa: F401 - every training that is forked from here would import it

        self._params = small_params()
        self._reference: dict[Stage, dict[str, bytes]] = {}
        self._made = folder / "made"  # by all stages, when nothing happens to them
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
        """The operations of a stage that nothing happens to, whose results are the reference."""
        sandbox = self._sandbox(stage, f"{stage.name}-{stage.out.partition('/')[2]}")
        disk, trace = Disk(sandbox.folder), sandbox.folder.parent / "trace"
        child = sandbox.start(stage.name, *stage.arguments, armed=partial(_arm, sandbox.folder, trace))
        child.wait(60)
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
        child = sandbox.start(stage.name, *stage.arguments, armed=armed)
        child.wait(60)
        operations = read_trace(trace)
        hit = next((one for one in operations if one.number == operation.number and one.outcome), None)
        expect(hit is not None, "the operation did not come, of this many", len(operations))
        if fault.error == _POWER_LOSS:
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
        shutil.rmtree(sandbox.folder / ".samebits" / "runs", ignore_errors=True)  # so that one log is left to look at
        self._check_again(sandbox, stage)
        shutil.rmtree(sandbox.folder.parent)

    def _check_failed(self, sandbox: Sandbox, stage: Stage, child: Child, operation: Operation, fault: Fault) -> None:
        """What must hold after an error of the disk, of one operation alone or of all that came after it."""
        passing = not fault.onward
        of_state = stage.trains and passing and ".samebits" in operation.path.parts
        check_end(child, {0} if of_state else {0, 3})  # neither a log nor a checkpoint ends a training
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
        """The same stage, without a fault, gives what it always gives, and leaves nothing else."""
        newest = _newest_checkpoint(sandbox)
        child = sandbox.start(stage.name, *stage.arguments, armed=without_sender)
        child.wait(60)
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
        """A training whose checkpoints are gone has left its results."""
        deleted = any(one.kind == "rmdir" and one.path.parent.name == "resume" for one in operations)
        if deleted and not _newest_checkpoint(sandbox):
            expect(_files(sandbox, stage).keys() >= RUN_FILES, "neither checkpoints nor results", stage.out)
            self._check_bits(sandbox, stage)

    def _check_bits(self, sandbox: Sandbox, stage: Stage) -> None:
        results = _results(sandbox, stage)
        for name, content in self._reference[stage].items():
            expect(results.get(name) == content, "wrong bits", name)

    def _check_log(self, sandbox: Sandbox, *, whole: bool) -> None:
        """No log tells a loss twice or wrongly; ``whole`` if there must be one that tells all."""
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
    """Nobody delivers the log, which is written all the same."""
    from samebits.tracking import sender

    sender.start_sender = lambda log: None  # noqa: ARG005


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
    """The files in the folder that a stage writes, by name; params.yaml is the sandbox's own."""
    folder = sandbox.folder / stage.out
    files = [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
    return {path.name: path for path in files if path.name != "params.yaml"}


def _results(sandbox: Sandbox, stage: Stage) -> dict[str, bytes]:
    """Files whose bytes are a function of what the stage reads."""
    names = ("model.safetensors", "losses.csv") if stage.trains else None
    return {name: path.read_bytes() for name, path in _files(sandbox, stage).items() if names is None or name in names}


def _written_checkpoints(operations: list[Operation]) -> set[int]:
    """Steps of the checkpoints whose file and name were brought to the disk, and that were not deleted since."""
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
    """Step of the newest checkpoint that is whole, by the hash in its name; 0 for none."""
    found = (sandbox.folder / ".samebits" / "resume").glob("*/*-*.safetensors")
    return max((_step(path) for path in found if path.stem.endswith(f"-{sha256(path)}")), default=0)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.partition("-")[0])


def _events(log: Path) -> list[Event]:
    """What a log tells, as far as it can be read."""
    from samebits.records.log import parse_event

    data, events = log.read_bytes(), []
    try:
        for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
            events.append(parse_event(line, log))
    except UserError:
        pass
    return events


def _numbered(event: Any) -> list[str]:
    """Losses as they stand in losses.csv."""
    import numpy as np

    return [f"{step},{np.float32(loss)!s}" for step, loss in enumerate(event.losses, start=event.first_step)]
