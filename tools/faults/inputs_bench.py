"""The bench for bad input: a finished pipeline, a folder beside it that must not change, and checks of a refusal."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import re
import resource
import shutil
import sqlite3
import unicodedata
from contextlib import closing
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from faults.inputs_params import SMALL_RUN
from faults.subject import ROOT, Broken, Child, Sandbox, check_end, commit, expect, kill, marked

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LONGEST = 1500  # characters of an error line
_MEMORY = (
    6 << 30
)  # bytes on top of the campaign's own, so that a program that grows without end fails before the host does
_OF_A_STAGE = "failed. hint: see its message above"  # end of a second error line, by the command that ran the stage
_PASSING = {"\n", "\r", "\t"}  # progress bars return to the start of their line
RUN, DP, OTHER = "runs/single-fast", "runs/dp-fast", "runs/other"
_MODEL = """
import torch


def factory(**kwargs):
    return torch.nn.Linear(16, 10)
"""
REFUSED = {0, 2, 3}
"""Exit codes for wrong input, or for input that is right by chance."""
VERDICT = {0, 1, 2, 3}
"""Exit codes of a command that can also give a bad verdict."""


class Attempt(NamedTuple):
    """A description of a bad input, and a function that gives it to a program.

    The program has to end with one of ``codes``. A refusal has to contain one of ``names``, if there are any.
    """

    what: str
    start: Callable[[], Child]
    codes: set[int]
    names: tuple[str, ...] = ()


class _Touch:
    """An object that makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = str(file)

    def __reduce__(self) -> tuple[Any, ...]:
        return (io.open, (self._file, "w"))


class Bench(Sandbox):
    """A sandbox with the files of ``template``. ``outside`` lies beside it. Code in a bad input makes ``canary``."""

    LIMIT = 20.0

    def __init__(self, folder: Path, params: dict[str, Any], template: Path | None = None) -> None:
        super().__init__(folder, params)
        if template is not None:
            shutil.copytree(template, self.folder, dirs_exist_ok=True, symlinks=True)
        self.mark, self._children = f"inputs-{os.getpid()}-{folder.name}", list[Child]()
        self.outside, self.canary = folder / "outside", folder / "canary"
        self.outside.mkdir()
        for name in ("passwd", "card.json", "array.npy"):
            (self.outside / name).write_text("root:x:0:0\n", encoding="utf-8")
        self._before = _state(self.outside)
        self._around = _names(folder), _names(folder.parent)

    def pickle(self) -> bytes:
        """A pickle that makes ``canary`` when it is loaded."""
        return pickle.dumps([_Touch(self.canary)])

    def pickle_of(self) -> object:
        """An object for formats that pickle it: loading them makes ``canary``."""
        return _Touch(self.canary)

    def start(
        self,
        program: str | Callable[[], object],
        *arguments: str,
        armed: Callable[[], object] | None = None,
        environ: Mapping[str, str] = MappingProxyType({}),
    ) -> Child:
        """Start a program with a bound on its memory."""
        child = super().start(program, *arguments, armed=armed or _limit, environ=environ)
        self._children.append(child)
        return child

    def check(self, child: Child, codes: set[int] = REFUSED, names: tuple[str, ...] = ()) -> None:
        """Raise Broken unless the program refused the input as it should and changed nothing else."""
        check_refusal(child, codes, names)
        self.check_around()
        expect(not (left := marked(self.mark)), "processes are left", left)

    def close(self) -> None:
        """Kill what is left running and delete all files."""
        kill({*marked(self.mark), *(pid for child in self._children for pid in child.session())})
        shutil.rmtree(self.outside.parent, ignore_errors=True)

    def check_around(self) -> None:
        """Raise Broken if anything outside the working folder changed, or if code in a file was executed."""
        touched = [Path(above) for above, _, files in os.walk(self.folder) if "canary" in files]
        expect(not self.canary.exists() and not touched, "code in a file was executed", touched)
        expect(_state(self.outside) == self._before, "written outside of the working folder", self.outside)
        folder = self.outside.parent
        around = _names(folder), _names(folder.parent)
        expect(
            around == self._around,
            "written beside the working folder",
            [a ^ b for a, b in zip(around, self._around, strict=True)],
        )
        expect(not (left := self.leftovers()), "leftovers", left)


def check_refusal(child: Child, codes: set[int], names: tuple[str, ...] = ()) -> None:
    """Raise Broken unless a program ended with one of ``codes``, and a refusal with one sound error line.

    Its output has to contain one of ``names``, if there are any.
    """
    text, errors = child.err(), child.errors()
    if child.code is not None and child.code < 0:
        raise Broken(f"killed by signal {-child.code}: {text[-500:]}")
    check_end(child, codes)
    for stream in (text, child.out()):
        control = {c for c in stream if unicodedata.category(c) == "Cc"} - _PASSING
        expect(not control, "control characters are printed", f"{sorted(control)!r} in {stream[-500:]!r}")
    if len(errors) == 2 and errors[1].endswith(_OF_A_STAGE):
        text = text.removesuffix(f"{errors.pop()}\n")
    if child.code not in (2, 3):
        expect(not errors, f"exit code {child.code}, and an error", errors)
        return
    if child.code == 2 and re.match(r"Usage: .*\n(?s:.*)\n\nError: .", text):
        return  # click's refusal of a command line, which may list the accepted values
    expect(len(errors) == 1, "expected one line of an error", text[-1000:])
    expect(text.endswith(f"{errors[0]}\n"), "expected the error as the last line", text[-1000:])
    expect(len(errors[0]) <= LONGEST, f"{len(errors[0])} characters in one line", errors[0][:200])
    expect(len(errors[0]) > len("error: "), "an error that says nothing", text[-1000:])
    expect(not names or any(name in text for name in names), f"none of {names} is named", text[-1000:])
    expect("\r" not in errors[0] and "\t" not in errors[0], "control characters in the error", repr(errors[0][-500:]))


def _limit() -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + _MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} | {"canary"}


def _state(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Mode, modification time and hash of every path in a folder."""
    found = {}
    for path in sorted([folder, *folder.rglob("*")]):
        status = path.lstat()
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path.relative_to(folder))] = (status.st_mode, status.st_mtime_ns, digest)
    return found


def make_template(folder: Path) -> Path:
    """Run the stages of a small pipeline, and deliver one of its runs to an MLflow store."""
    bench = Bench(folder, SMALL_RUN)
    work = bench.folder
    (work / "model.py").write_text(_MODEL, encoding="utf-8")
    for name, *arguments in (
        ("prepare",),
        ("host",),
        ("train", "--strategy", "single", "--no-tracking"),
        ("train", "--strategy", "dp", "--no-tracking"),
        ("evaluate",),
        ("compare", "--no-tracking"),
    ):
        child = bench(name, *arguments, seconds=120)
        expect(child.code == 0, f"the pipeline that is to be damaged fails: {name}", child.printed())
    shutil.copytree(work / RUN, work / OTHER)
    for name in ("dvc.lock", "dvc.yaml", ".dvc/config"):
        (work / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, work / name)
    shutil.copytree(ROOT / "pipeline", work / "pipeline", ignore=shutil.ignore_patterns("__pycache__"))
    commit(work, "params.yaml", "model.py", "pipeline", "dvc.lock", "dvc.yaml", ".dvc/config")
    child = bench(partial(_write_log, work))
    child = child if child.code else bench("samebits", "track", "sync", seconds=120)
    expect(child.code == 0, "the log that is to be damaged cannot be delivered", child.printed())
    return work


def _write_log(work: Path) -> None:
    """Write the log of the run and its provenance."""
    from samebits.records.log import LOGS, RunLog
    from samebits.records.provenance import note_provenance
    from samebits.records.run import read_run
    from samebits.tracking.recorder import events

    run = read_run(work / RUN)
    log = RunLog(LOGS / f"{run.record.run}.jsonl")
    note_provenance(log.path)
    for event in events(run):
        log.append(event)
    log.close()


def own_store(bench: Bench, template: Path) -> str:
    """Move the artifact paths of a copied store into the copy. Returns the id of its run."""
    with closing(sqlite3.connect(bench.folder / "mlflow.db")) as database:
        for table, column in (("runs", "artifact_uri"), ("experiments", "artifact_location")):
            move = f"UPDATE {table} SET {column} = replace({column}, ?, ?)"  # noqa: S608 - fixed names
            database.execute(move, (str(template), str(bench.folder)))
        database.commit()
        ((run_id,),) = database.execute("SELECT run_uuid FROM runs")
    return str(run_id)


def forget_delivery(bench: Bench) -> None:
    """Undo the delivery of the log: no state file, and no run in the store."""
    for state in (bench.folder / ".samebits/runs").glob("*.state.json"):
        state.unlink()
    with closing(sqlite3.connect(bench.folder / "mlflow.db")) as database:
        database.execute("UPDATE runs SET lifecycle_stage = 'deleted'")
        database.commit()
