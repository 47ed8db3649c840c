"""Faults of tracking: a server that is killed, absent, slow, full or wrong, killed senders, and torn files."""

from __future__ import annotations

import shutil
import signal
import statistics
import time
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from faults.area import Area, Case
from faults.mlflow_server import Proxy, Server
from faults.mlflow_store import Store, check_run, status_of
from faults.subject import NUMERICS, Broken, check_end, expect, kill, training
from faults.tracking_subject import (
    DELIVERY_LIMIT,
    TRAINING_LIMIT,
    Shared,
    Subject,
    Tear,
    Trainings,
    can_mount,
    deliver_torn,
    expect_one_line,
    small_disk,
)
from samebits.records.log import LOGS
from samebits.records.provenance import provenance_of
from slowed import slowed

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path


PLACES = (("single", 1), ("dp", 1), ("ddp", 1), ("ddp", 2), ("ddp", 4))
TRAININGS = [training(*place, numerics) for place in PLACES for numerics in NUMERICS]
TIMES_AS_LONG_AT_MOST = 2.0
"""Bound of the median ratio to untracked trainings, by harm. The sender shares the host's cores with the training."""
HARMS: dict[str, tuple[str, ...]] = {
    "cut": ("cut", "silence"),
    "slow": ("slow",),
    "500": ("500 before", "500 after"),
    "double": ("double",),
    "403": ("403 before", "403 after"),
    "timeout": ("slow",),
    "mixed": ("500 before", "500 after", "403 before", "403 after", "cut", "silence", "double", "slow"),
}
KINDS = ("restarts", "torn", "restarts", "proxy", "restarts", "sender", "restarts", "stopped", "restarts", "full",
         "restarts", "proxy", "restarts", "absent")  # fmt: skip
TEARS = 24  # logs of one case
RESTARTS_IN_ONE = 20
STATE_BYTES = 240  # about the size of a state file
SLOW_SECONDS = 2.0
RESTARTED = "killed and started again"
Work = tuple[str, int, "Callable[[Path], None]"]
"""A description, its number of server restarts, and a function that does it in a folder."""


class Tracking(Area):
    """After ``samebits track sync`` MLflow has what was trained, whatever happened before."""

    NAME = "tracking"
    UNIT = "server restarts"
    IN_AN_HOUR = 20
    WEIGHT = 2.5

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder, seed)
        self._shared = Shared(folder)
        self._mounts = can_mount(folder / "mount")
        self._others: dict[str, int] = {}
        self._filled = self._lived_through = 0

    def case(self, number: int) -> Case:
        """One disturbed delivery; the kinds take turns."""
        number += self._seed  # so that short campaigns with other seeds meet other kinds
        kind = KINDS[number % len(KINDS)]
        if kind == "full" and not self._mounts:
            kind = "sender"
        makers: dict[str, Callable[[random.Random, int], Work]] = {
            "restarts": self._restarts,
            "torn": self._torn,
            "proxy": self._proxy,
            "sender": self._sender,
            "stopped": self._stopped,
            "full": self._full,
            "absent": self._absent,
        }
        what, restarts, work = makers[kind](self.random(number), number)

        def run() -> None:
            folder = self.folder / str(number)
            if not restarts:
                self._others[kind] = self._others.get(kind, 0) + 1
            try:
                work(folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)

        return Case(what, run, restarts)

    def final(self) -> Iterator[Case]:
        """One training with many restarts of the server, and the totals."""
        yield Case(f"the server is killed and started again {RESTARTS_IN_ONE} times in one training", self._long,
                   RESTARTS_IN_ONE)  # fmt: skip
        yield Case("totals of all cases", self._total, 0)

    def figures(self) -> dict[str, Any]:
        """Totals, and by harm the median ratio of a training's time to that of an untracked one."""
        medians = {"times_as_long": self._medians()}
        return {**asdict(self._shared.totals), **medians, "restarts_in_one": self._lived_through}

    def _medians(self) -> dict[str, float]:
        times = self._shared.totals.times_as_long
        return {harm: statistics.median(values) for harm, values in sorted(times.items())}

    def _long(self) -> None:
        choose, server = self.random(-1), self._shared.server
        own = Shared(self.folder / "long-reference", slow=True, totals=self._shared.totals)
        subject = Subject(self.folder / "long", own, server.uri, RESTARTED)
        try:
            with slowed(subject.box.folder, "slower"):  # for longer than any host takes for the restarts
                child = subject.start(training("single", 1, "exact"))
                for _ in range(RESTARTS_IN_ONE):
                    time.sleep(choose.uniform(0.2, 1.5))
                    server.kill()
                    time.sleep(choose.uniform(0, 1))
                    server.start()
                    server.wait()
                    expect(child.poll() is None, "the training ended before the last restart")
            child.wait(TRAINING_LIMIT)
            check_end(child, {0})
            subject.sync()
            subject.check(self._shared.store)
            self._lived_through = RESTARTS_IN_ONE
        finally:
            server.ensure()
            subject.end()

    def _total(self) -> None:
        totals, shared = self._shared.totals, self._shared
        running = shared.running()
        shared.end()
        medians = self._medians()
        others = ", ".join(f"{count} {kind}" for kind, count in sorted(self._others.items())) or "none"
        click.echo(
            f"tracking: {totals.runs} runs with {totals.losses} losses checked; lost {totals.lost},"
            f" doubled {totals.doubled}, left RUNNING {totals.running}; cases without a restart: {others}, of which"
            f" {self._filled} had a delivery that a full disk refused;"
            f" as long as untracked: {', '.join(f'{harm} {times:.2f} times' for harm, times in medians.items())}"
        )
        expect(running == 0, "runs are left RUNNING in the server's store", running)
        held_up = {harm: times for harm, times in medians.items() if times > TIMES_AS_LONG_AT_MOST}
        expect(not held_up, "tracking holds trainings up", held_up)
        expect(totals.lost == totals.doubled == totals.running == 0, "metrics or runs were lost, doubled or left")

    @contextmanager
    def _subject(self, folder: Path, harm: str | None = None, uri: str | None = None) -> Iterator[Subject]:
        subject = Subject(folder, self._shared, uri or self._shared.server.uri, harm)
        try:
            yield subject
        finally:
            subject.end()

    def _restarts(self, choose: random.Random, _: int) -> Work:
        moments = [(choose.uniform(0, 5), choose.uniform(0, 2)) for _ in range(choose.randint(1, 3))]
        arguments = [choose.choice(TRAININGS) for _ in range(4)]
        patient = choose.random() < 0.5
        shown = ", ".join(f"{alive:.1f} s up, {away:.1f} s down" for alive, away in moments)

        def work(folder: Path) -> None:
            server = self._shared.server
            with self._subject(folder, RESTARTED) as subject:
                trainings = Trainings(subject, arguments)
                try:
                    for alive, away in moments:
                        trainings.go_on(alive)
                        server.kill()
                        trainings.go_on(away)
                        server.start()
                        trainings.until(server.answers)
                    trainings.finish()
                finally:
                    server.ensure()
                if patient:
                    subject.wait_for_delivery()
                subject.sync()
                subject.check(self._shared.store)

        return f"the server is killed and started again: {shown}", len(moments), work

    def _proxy(self, choose: random.Random, number: int) -> Work:
        harm = list(HARMS)[number // (len(KINDS) // 2) % len(HARMS)]
        share = 1.0 if harm == "slow" else choose.choice([0.2, 0.5])
        arguments, during = [choose.choice(TRAININGS) for _ in range(2)], choose.uniform(4, 12)
        seed = str(choose.random())

        def work(folder: Path) -> None:
            proxy = Proxy(self._shared.server.port, HARMS[harm], share, SLOW_SECONDS, seed)
            environ = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "1"} if harm == "timeout" else {}
            with closing(proxy), self._subject(folder, harm, proxy.uri) as subject:
                proxy.start()
                for each in arguments:
                    subject.finish(subject.start(each, environ))
                subject.wait_for_delivery(during)
                proxy.heal()
                subject.sync()
                subject.check(self._shared.store)

        return f"a proxy spoils {share:.0%} of the answers: {harm}", 0, work

    def _absent(self, choose: random.Random, _: int) -> Work:
        arguments, elsewhere = choose.choice(TRAININGS), choose.random() < 0.5

        def work(folder: Path) -> None:
            server = self._shared.server
            proxy = Proxy(server.port, ("",), 0.0, 0.0, "")  # refuses connections until it is started
            with closing(proxy), self._subject(folder, "absent", proxy.uri) as subject:
                subject.finish(subject.start(arguments))
                expect_one_line(subject.sync(codes=(3,)))
                if not elsewhere:
                    proxy.start()
                subject.sync(uri=server.uri if elsewhere else None)
                subject.check(self._shared.store)

        return f"the server is absent until the end, then back {'elsewhere' if elsewhere else ''}", 0, work

    def _sender(self, choose: random.Random, _: int) -> Work:
        arguments, moments = [choose.choice(TRAININGS) for _ in range(3)], [choose.uniform(0, 7) for _ in range(3)]
        local = choose.random() < 0.5

        def work(folder: Path) -> None:
            database = folder / "repository/mlflow.db"
            with self._subject(folder, "sender killed", f"sqlite:///{database}" if local else None) as subject:
                if local:
                    shutil.copy(self._shared.empty_store, database)
                trainings = Trainings(subject, arguments)
                for moment in moments:
                    trainings.go_on(moment)
                    kill(subject.senders())
                trainings.finish()
                kill(subject.senders())
                subject.sync()
                subject.check(Store(database) if local else self._shared.store)

        return f"the sender is killed after {', '.join(f'{moment:.1f}' for moment in moments)} s", 0, work

    def _stopped(self, choose: random.Random, _: int) -> Work:
        signum = choose.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        arguments, patient, part = choose.choice(TRAININGS), choose.random() < 0.5, choose.random()
        code, status = (-9, "FAILED") if signum == signal.SIGKILL else (128 + signum, "KILLED")

        def work(folder: Path) -> None:
            with self._subject(folder) as subject:
                child = subject.start(arguments)
                child.go_on(0.1 + part * self._shared.untracked(arguments).seconds)
                kill([child.pid], signum)
                child.wait(TRAINING_LIMIT)
                check_end(child, {0, code})
                for log in subject.logs():
                    expect(status_of(log) in ("FINISHED", status), f"{log.name} ends with {status_of(log)}")
                subject.finish(subject.start(arguments))  # resumes from the checkpoint
                if patient:
                    subject.wait_for_delivery()
                subject.sync()
                subject.check(self._shared.store)

        return f"{signum.name} to a tracked training after {part:.0%} of it, and then it goes on", 0, work

    def _full(self, choose: random.Random, _: int) -> Work:
        what, spare = choose.choice(["artifacts", "store", "server"]), choose.randint(4, 24)
        arguments = choose.choice(TRAININGS)

        def work(folder: Path) -> None:
            disk, shared = folder / "disk", self._shared
            room = spare + (0 if what == "artifacts" else shared.empty_store.stat().st_size // 1024)
            with (
                small_disk(disk, room) as resize,
                self._store_on(disk, what) as (uri, store),
                self._subject(folder / "subject", f"full {what}", uri) as subject,
            ):
                if what == "artifacts":
                    (subject.box.folder / "mlartifacts").symlink_to(disk)
                subject.finish(subject.start(arguments))
                subject.wait_for_delivery(4)
                early = subject.sync(codes=(0, 3))
                expect_one_line(early)
                self._filled += early.code == 3
                resize(64 * 1024)
                subject.sync()
                subject.check(store)

        return f"a disk is full, with {spare} KiB to spare: that of the {what}", 0, work

    @contextmanager
    def _store_on(self, disk: Path, what: str) -> Iterator[tuple[str, Store]]:
        """Address of a store on a small disk, perhaps behind a server. For ``artifacts`` the store is elsewhere."""
        database = (disk.parent if what == "artifacts" else disk) / "mlflow.db"
        shutil.copy(self._shared.empty_store, database)
        if what != "server":
            yield f"sqlite:///{database}", Store(database)
            return
        server = Server(disk.parent, database, self._shared.mark)
        server.start()
        try:
            server.wait()
            yield server.uri, Store(database, server.artifacts)
        finally:
            server.kill()

    def _torn(self, choose: random.Random, number: int) -> Work:
        first = number // len(KINDS) * TEARS
        parts = [(choose.random(), choose.choice(["any", "any", "edge"])) for _ in range(TEARS)]

        def work(folder: Path) -> None:
            pattern = self._shared.pattern
            with self._subject(folder, uri=f"sqlite:///{folder}/repository/mlflow.db") as subject:
                shutil.copy(self._shared.empty_store, folder / "repository/mlflow.db")
                (subject.box.folder / LOGS).mkdir(parents=True)
                tears = []
                for index, (part, where) in enumerate(parts):
                    key = f"{pattern.log.stem}-{index}"
                    text = pattern.copy(key, subject.box.folder / f"runs/{key}", subject.uri)
                    shutil.copy(provenance_of(pattern.log), provenance_of(subject.box.folder / LOGS / f"{key}.jsonl"))
                    state = (first + index) % STATE_BYTES if index % 3 else None
                    tears.append(Tear(key, text, _place(text, part, where), state, completed=index % 4 != 1))
                check_end(subject.box(partial(deliver_torn, tears), seconds=DELIVERY_LIMIT), {0})
                subject.sync()
                self._check_torn(Store(folder / "repository/mlflow.db"), subject, tears)

        return f"{TEARS} logs and states are torn between two deliveries", 0, work

    def _check_torn(self, store: Store, subject: Subject, tears: Sequence[Tear]) -> None:
        broken = []
        for tear in tears:
            log = subject.box.folder / LOGS / f"{tear.key}.jsonl"
            out = subject.box.folder / f"runs/{tear.key}" if tear.completed else None
            try:
                check_run(store, log, out, self._shared.totals)
            except Broken as error:
                broken.append(f"{tear}: {error}")
        expect(not broken, f"{len(broken)} of {len(tears)}", "\n    ".join(broken))


def _place(text: bytes, part: float, where: str) -> int:
    """Number of bytes of a log: any, or one at the end of a line."""
    if where == "any":
        return int(part * (len(text) + 1))
    ends = [index + offset for index, byte in enumerate(text) if byte == ord("\n") for offset in (0, 1)]
    return ends[int(part * len(ends))]
