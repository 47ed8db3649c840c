"""``dvc repro`` in a copy of this repository: killed at random moments and run again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click
from ruamel.yaml import YAML

from conftest import copy_sources
from faults.area import Area, Case
from faults.mlflow_store import Store, check_logs, empty_store
from faults.subject import (
    PARAMS,
    ROOT,
    SENDER,
    Child,
    Sandbox,
    command_of,
    commit,
    end_marked,
    expect,
    expect_none,
    kill,
    marked,
)
from same_bits import exact_bits
from samebits.records.run import read_run
from samebits.results.lock import read_lock

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Sequence

Target = Literal["dvc", "tree", "all", "stage", "two", "both"]

TARGETS: list[Target] = ["dvc", "dvc", "dvc", "tree", "tree", "all", "stage", "stage", "stage", "two", "both"]
OF_ONE_REPOSITORY = 5  # kills; after the last the pipeline runs to its end
LIMIT = 240.0
LATEST = 0.5  # share of an undisturbed pipeline's time: a training or two beyond the kill before
STRATEGIES = ["single", "dp", "ddp"]
NUMERICS = [["exact"], ["exact", "fast"]]
TRAIN = {"strategies": STRATEGIES, "num_devices": 2, "oversubscribe": True, "global_batch_size": 64, "epochs": 4,
         "repeats": 1, "checkpoint_every_steps": 8, "timeout_s": 20}  # fmt: skip
LEFT_OUT = ("params.yaml", "tests/", "benchmarks/", "docs/", "tools/", ".github/")
TORCH_CACHE = "torchinductor_"  # torch makes and keeps one folder for each user


class Repository(Sandbox):
    """A git repository with the sources and the pipeline of this one."""

    def __init__(self, folder: Path, mark: str, numerics: Sequence[str]) -> None:
        params = YAML().load((ROOT / "params.yaml").read_text(encoding="utf-8"))
        params["data"] |= PARAMS["data"]
        params["model"] |= {"name": "mlp", "kwargs": {"hidden": [32]}, "source": None}
        params["train"] |= {**TRAIN, "numerics": list(numerics)}
        super().__init__(folder, params)
        self.mark = mark
        copy_sources(self.folder, but=LEFT_OUT)
        commit(self.folder, "--all")

    @property
    def environ(self) -> dict[str, str]:
        """Also the repository's own sources, and the commands of this Python environment."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {**super().environ, "PATH": path, "PYTHONPATH": str(self.folder / "src")}

    def begin(self, *command: str) -> Child:
        """Start a command."""
        return self.start(partial(os.execvp, command[0], command))

    def run(self, *command: str) -> Child:
        """Run a command to its end. Raises Broken unless it succeeds."""
        child = self.begin(*command)
        child.wait(LIMIT)
        expect(child.code == 0, f"{' '.join(command)} ends with {child.code}", child.printed()[-1500:])
        expect_no_traceback(child)
        return child

    def locked_weights(self) -> dict[str, str]:
        """MD5 of the weights of every exact run in ``dvc.lock``."""
        bits = exact_bits(read_lock(self.folder))
        return {path: md5 for path, md5 in bits.items() if path.endswith("model.safetensors")}

    def leftovers(self) -> list[str]:
        """Leftovers except torch's cache."""
        return [path for path in super().leftovers() if f"/{TORCH_CACHE}" not in path]


def stage_of(child: Child) -> int | None:
    """Process id of the stage that ``dvc repro`` runs now, not of its workers."""
    found = [pid for pid in child.session() if b"\0pipeline/" in command_of(pid)]
    return min(found, default=None)


def expect_no_traceback(child: Child) -> None:
    """Raise Broken if DVC or a stage printed a traceback."""
    printed = child.printed()
    at = printed.find("Traceback (most recent call last)")
    expect(at < 0, "a traceback", printed[max(0, at - 300) : at + 2000])


class Pipelines(Area):
    """``dvc repro`` goes on after each kill. A pipeline that ends leaves no trace of the kills."""

    NAME = "pipelines"
    UNIT = "killed pipelines"
    IN_AN_HOUR = 30
    WEIGHT = 2.0

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder, seed)
        self._repository: Repository | None = None
        self._number = -1
        self._seconds = 0.0
        self._killed = self._finished = self._torn_rwlocks = self._torn_locks = self._busy = self._two = 0

    def case(self, number: int) -> Case:
        """One kill at a random moment. After the last kill of a repository the pipeline runs to its end."""
        choose = self.random(number)
        target, part = choose.choice(TARGETS), LATEST * choose.random()
        last = number % OF_ONE_REPOSITORY == OF_ONE_REPOSITORY - 1

        def run() -> None:
            while True:
                self._enter(number // OF_ONE_REPOSITORY)
                if target == "both":
                    self._let_both_end(choose.uniform(0, 3))
                    return
                if self._harm(target, part, choose):
                    break
            if last:
                self._finish()

        if target == "both":
            return Case("dvc repro twice at once, both to their ends", run, 0)
        shown = "dvc repro twice at once, then" if target == "two" else "kill -9 of"
        whom = {"dvc": "dvc repro alone", "tree": "dvc repro and its stage", "all": "all, the sender too",
                "stage": "the stage alone", "two": "kill -9 of both"}[target]  # fmt: skip
        return Case(f"{shown} {whom} after {part:.0%} of it{', and on to the end' if last else ''}", run)

    def final(self) -> Iterator[Case]:
        """The last pipeline runs to its end."""
        yield Case("the last pipeline goes on to its end", self._end, 0)

    def _end(self) -> None:
        if self._repository is not None:
            self._finish()
        click.echo(
            f"pipelines: {self._killed} killed, {self._finished} let end, with the weights of an undisturbed one of"
            f" {self._seconds:.0f} s; DVC's rwlock was torn {self._torn_rwlocks} times and"
            f" dvc.lock {self._torn_locks} times; {self._busy} of {self._two}"
            " second calls were refused as busy"
        )

    @cached_property
    def _store(self) -> Path:
        return empty_store(self.folder)

    def _make(self, name: str, numerics: Sequence[str]) -> Repository:
        repository = Repository(self.folder / name, f"{self.folder.parent.name}-{name}", numerics)
        shutil.copy(self._store, repository.folder / "mlflow.db")
        return repository

    @cached_property
    def _weights(self) -> dict[str, str]:
        """Weights of an undisturbed pipeline."""
        repository = self._make("undisturbed", NUMERICS[0])
        started = time.monotonic()
        try:
            repository.run("dvc", "repro")
        finally:
            self._seconds = time.monotonic() - started
            end_marked(repository.mark)
        weights = repository.locked_weights()
        expect(set(weights) == {f"runs/{strategy}-exact/model.safetensors" for strategy in STRATEGIES}, "no weights")
        expect(len(set(weights.values())) == 1, "an undisturbed pipeline has other weights by strategy", weights)
        shutil.rmtree(repository.folder.parent)
        return weights

    def _enter(self, number: int) -> None:
        """Take the repository with this number, and make it if needed."""
        self._weights  # noqa: B018 - made before any kill
        if number != self._number:
            self._leave()
            self._repository = self._make(str(number), NUMERICS[number % len(NUMERICS)])
            self._number = number

    def _leave(self) -> None:
        if self._repository is not None:
            end_marked(self._repository.mark)
            shutil.rmtree(self._repository.folder.parent, ignore_errors=True)
        self._repository, self._number = None, -1

    # -- harm --

    def _harm(self, target: Target, part: float, choose: random.Random) -> bool:
        """Start the pipeline and kill the target. False if the pipeline ended before."""
        assert self._repository
        child = self._repository.begin("dvc", "repro")
        second = None
        if target == "two":
            time.sleep(choose.uniform(0, 3))
            second = self._repository.begin("dvc", "repro")
        running = child.go_on(part * self._seconds)
        self._kill(child, target)
        if second is not None:
            self._end_second(second)
        child.wait(LIMIT if target == "stage" else 30)
        self._check_ended(child)
        self._killed += running
        if child.code == 0:
            self._finish()
        return running and child.code != 0

    def _let_both_end(self, later: float) -> None:
        """Start the pipeline twice, so many seconds apart. One does the work, unless they tore the rwlock."""
        assert self._repository
        first = self._repository.begin("dvc", "repro")
        time.sleep(later)
        second = self._repository.begin("dvc", "repro")
        for child in (first, second):
            child.wait(LIMIT)
        one, other = sorted((first, second), key=lambda child: child.code != 0)
        ended = one.code == 0 or self._mended(one.printed())
        expect(ended, "neither of two dvc repro ends well", one.printed()[-1500:] + other.printed()[-1500:])
        expect_no_traceback(one)
        self._check_second(other)
        self._finish()

    def _end_second(self, second: Child) -> None:
        refused = second.poll() not in (None, 0)
        second.kill_tree()
        second.wait(30)  # DVC takes a lock for held while its process id exists, also as a zombie
        self._check_second(second, refused=refused)

    def _check_second(self, second: Child, *, refused: bool | None = None) -> None:
        refused = second.code != 0 if refused is None else refused
        self._two += 1
        self._busy += refused
        expect_no_traceback(second)
        printed = second.printed()
        said = "Unable to acquire lock" in printed or "is busy" in printed or self._mended(printed)
        expect(not refused or said, f"a second dvc repro ends with {second.code}", printed[-1500:])

    def _kill(self, child: Child, target: Target) -> None:
        assert self._repository
        if target == "dvc":
            kill([child.pid])
        elif target == "stage":
            deadline = time.monotonic() + 20
            while (stage := stage_of(child)) is None and child.poll() is None and time.monotonic() < deadline:
                time.sleep(0.005)
            kill([stage or child.pid])
        else:
            child.kill_tree()
            if target == "all":
                end_marked(self._repository.mark)

    def _check_ended(self, child: Child) -> None:
        """Raise Broken unless it was killed, succeeded, or says that its stage was killed."""
        expect_no_traceback(child)
        if child.code in (0, -signal.SIGKILL):
            return
        printed = child.printed()
        stage_killed = "exited with -9" in printed or "exited with 137" in printed
        expect(stage_killed or self._mended(printed), f"dvc repro ends with {child.code}", printed[-1500:])

    def _mended(self, printed: str) -> bool:
        """Remove a torn rwlock or dvc.lock, and return whether there was one.

        DVC does not write them atomically. The doctor and the troubleshooting guide tell a user to remove them.
        """
        assert self._repository
        if "Unable to read RWLock-file" in printed:
            self._torn_rwlocks += 1
            (self._repository.folder / ".dvc/tmp/rwlock").unlink(missing_ok=True)
        elif "'./dvc.lock' validation failed" in printed or "'./dvc.lock' is invalid" in printed:
            self._torn_locks += 1
            (self._repository.folder / "dvc.lock").unlink()
        else:
            return False
        return True

    # -- the end --

    def _finish(self) -> None:
        assert self._repository
        try:
            self._check_finished(self._repository)
        finally:
            self._leave()
        self._finished += 1

    def _check_finished(self, repository: Repository) -> None:
        child = repository.begin("dvc", "repro")
        child.wait(LIMIT)
        if child.code != 0 and self._mended(child.printed()):
            child = repository.begin("dvc", "repro")
            child.wait(LIMIT)
        expect(child.code == 0, f"dvc repro ends with {child.code}", child.printed()[-1500:])
        expect_no_traceback(child)
        expect_none(lambda: [pid for pid in marked(repository.mark) if SENDER not in command_of(pid)], 30)
        expect(repository.locked_weights() == self._weights, "other weights", repository.locked_weights())
        stale = set(json.loads(repository.run("dvc", "status", "--json", "dvc.yaml").out())) - {"host"}
        expect(not stale, "dvc status is not clean", stale)
        repository.run("samebits", "track", "sync")
        end_marked(repository.mark)
        self._check_store(repository)
        expect(repository.leftovers() == [], "leftovers", repository.leftovers())

    def _check_store(self, repository: Repository) -> None:
        store = Store(repository.folder / "mlflow.db")
        expect(store.running() == 0, "runs are left RUNNING in MLflow", store.running())
        folders = [file.parent for file in repository.folder.glob("runs/*/run.json")]
        check_logs(store, repository.folder, {read_run(folder).record.run: folder for folder in folders})
