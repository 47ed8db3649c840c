"""Processes of a training that are killed, stopped or interrupted at random moments."""

from __future__ import annotations

import re
import shutil
import signal
import time
from typing import TYPE_CHECKING, Literal

from faults.area import Area, Case, Missed
from faults.mlflow_store import Store, check_logs, losses_of, status_of
from faults.subject import NUMERICS, PARAMS, RUN_FILES, Child, Sandbox, check_end, expect, kill, marked, training
from samebits.records.log import LOGS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Target = Literal["tree", "launcher", "rank", "sender", "stopped rank", "once", "twice"]

PLACES = [("single", 1), ("ddp", 1), ("ddp", 2), ("ddp", 4)]
TARGETS: list[Target] = [
    "tree", "tree", "tree", "tree", "launcher", "launcher", "launcher", "rank", "rank", "rank",
    "sender", "stopped rank", "once", "twice",
]  # fmt: skip
TIMEOUT_SECONDS = 4  # of a collective: short, so that a stopped rank costs little time
STEPS = PARAMS["data"]["num_samples"] // PARAMS["train"]["global_batch_size"] * PARAMS["train"]["epochs"]
EARLIEST_SECONDS = 0.1  # Python has no signal handlers before


class Kills(Area):
    """Each case disturbs a training and resumes it. The bits must be those of an undisturbed training."""

    NAME = "kills"
    UNIT = "kills"
    IN_AN_HOUR = 200
    WEIGHT = 4.0

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder, seed)
        params = {**PARAMS, "train": {**PARAMS["train"], "timeout_s": TIMEOUT_SECONDS}}
        self._sandbox = Sandbox(folder / folder.parent.name, params)
        self._checkpoints = self._sandbox.folder / ".samebits/resume"
        self._store = Store(self._sandbox.folder / "mlflow.db")
        self._tracked = {"MLFLOW_TRACKING_URI": f"sqlite:///{self._store.database}"}
        check_end(self._sandbox("prepare"), {0})
        self._references: dict[tuple[str, ...], dict[str, bytes]] = {}
        self._seconds: dict[tuple[str, ...], float] = {}
        self._finished = 0
        for strategy, devices in PLACES:
            for numerics in NUMERICS:
                arguments = training(strategy, devices, numerics)
                started = time.monotonic()
                check_end(self._sandbox("train", *arguments, "--no-tracking"), {0})
                self._seconds[arguments] = time.monotonic() - started
                self._references[arguments] = self._bits(arguments)

    def case(self, number: int) -> Case:
        """One target at a random moment."""
        choose = self.random(number)
        place = choose.choice(PLACES)
        arguments = training(*place, choose.choice(NUMERICS))
        target, part, rank = choose.choice(TARGETS), choose.random(), choose.randrange(4)
        tracked = target == "sender" or choose.random() < 0.25
        signum = choose.choice([signal.SIGTERM, signal.SIGINT])
        moment = EARLIEST_SECONDS + part * self._seconds[arguments]
        what = f"{target} of train {' '.join(arguments)} after {moment:.2f} s"
        if target in ("once", "twice"):
            what = f"{signum.name} {what}"

        def run() -> None:
            shutil.rmtree(self._checkpoints, ignore_errors=True)  # from a broken case
            child = self._start(arguments, tracked=tracked)
            running = child.go_on(moment)
            named, hit = self._disturb(child, target, rank, place[1], signum)
            child.wait(TIMEOUT_SECONDS + 10 if named and target == "stopped rank" else 60)
            check_end(child, {0, *_codes(target, signum)})
            done = child.code == 0
            told = done or _is_told(named, child.err())
            expect(told, "rank and step are not named, as they should be", (named, child.err()))
            self._sandbox.age()
            again = self._start(arguments, tracked=tracked)
            again.wait(60)
            check_end(again, {0})
            self._finished += tracked * (1 + done)
            expect(self._bits(arguments) == self._references[arguments], "other bits than an undisturbed training's")
            expect(self._sandbox.leftovers() == [], "leftovers", self._sandbox.leftovers())
            expect(not list(self._checkpoints.iterdir()), "checkpoints after the end")
            if not (running and hit) or (done and target != "sender"):
                raise Missed

        return Case(what, run)

    def final(self) -> Iterator[Case]:
        """MLflow has each step of each tracked training once, and no run is left RUNNING."""
        yield Case("delivery of the trainings that were disturbed", self._check_delivery, faults=0)

    def _start(self, arguments: tuple[str, ...], *, tracked: bool) -> Child:
        if tracked:
            return self._sandbox.start("train", *arguments, environ=self._tracked)
        return self._sandbox.start("train", *arguments, "--no-tracking")

    def _disturb(self, child: Child, target: Target, rank: int, ranks: int, signum: signal.Signals) -> tuple[str, bool]:
        """Disturb the target. Returns the message that has to name a disturbed rank, and whether there was a target.

        The message is a pattern: other workers of ``ranks`` may have ended before.
        """
        workers = child.workers()
        match target:
            case "tree":
                child.kill_tree()
            case "launcher":
                kill([child.pid])
            case "rank" | "stopped rank":
                if workers:
                    rank %= len(workers)
                    kill([workers[rank]], signal.SIGKILL if target == "rank" else signal.SIGSTOP)
                    how = "ended by SIGKILL" if target == "rank" else "stopped, as by SIGSTOP or SIGTTOU"
                    return f"the worker of rank {one_of(rank, len(workers), ranks)} was {how}", True
                return "", False
            case "sender":
                senders = marked(self._sandbox.mark)
                kill(senders)
                return "", bool(senders)
            case "once":
                kill([child.pid], signum)
            case "twice":
                kill([child.pid], signum)
                time.sleep(0.05)
                kill([child.pid], signum)
        return "", True

    def _bits(self, arguments: tuple[str, ...]) -> dict[str, bytes]:
        """Weights and losses of the last run."""
        folder = self._sandbox.folder / "runs" / f"{arguments[1]}-{arguments[3]}"
        expect({file.name for file in folder.iterdir()} == RUN_FILES, "files of the run", sorted(folder.iterdir()))
        return {name: (folder / name).read_bytes() for name in ("model.safetensors", "losses.csv")}

    def _check_delivery(self) -> None:
        if not self._store.database.exists():
            return
        sync = self._sandbox("samebits", "track", "sync", seconds=300, environ=self._tracked)
        check_end(sync, {0})
        expect(self._store.running() == 0, "runs are left RUNNING in MLflow", self._store.running())
        check_logs(self._store, self._sandbox.folder, {})  # no files: later runs may have replaced them
        finished = 0
        for log in (self._sandbox.folder / LOGS).glob("*.jsonl"):
            if status_of(log) == "FINISHED":
                finished += 1
                expect(len(losses_of(log)) == STEPS, "losses are lost of a finished run", log.name)
        # Logs may have more, of trainings that were killed between their last event and their exit.
        expect(self._finished <= finished, "finished runs", f"{finished} in logs, {self._finished} ended well")


def one_of(position: int, living: int, ranks: int) -> str:
    """Pattern of the ranks that can be at this position among the living ones of ``ranks``."""
    return f"(?:{'|'.join(map(str, range(position, position + 1 + max(0, ranks - living))))})"


def _is_told(named: str, said: str) -> bool:
    """Whether a message names the expected rank, if any, with a valid step or a phase."""
    if not named:
        return True
    line = re.search(rf"{named}(?: at step (\d+)\b| while it \w+| in the timed slices| after its work)", said)
    return line is not None and 1 <= int(line[1] or 1) <= STEPS


def _codes(target: Target, signum: signal.Signals) -> set[int]:
    """Exit codes with which a disturbed training may end."""
    match target:
        case "tree" | "launcher":
            return {-signal.SIGKILL}
        case "rank" | "stopped rank":
            return {4}
        case "once" | "twice":
            # The negative code is Python's before it has a handler.
            return {128 + signum, *([-signal.SIGTERM] if signum == signal.SIGTERM else [])}
    return set()
