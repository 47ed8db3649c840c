"""What MLflow costs a training: off, SQLite and a local server in turns.

    python benchmarks/tracking.py

Each training runs as a user's command in a repository of its own, with a sender of its own; the next begins when
all is delivered. Wall seconds of the training and of the command say what a user waits; CPU seconds of the command, in
which the sender and the server do not count, say what the training itself does, also on a host that is busy with
other things.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from ruamel.yaml import YAML

from common import (
    BATCH,
    LEARNING_RATE,
    MLP,
    VECTORS,
    few,
    in_turns,
    judged,
    middle_of,
    run,
    save,
    show_middle,
    stage,
    wait_for,
    with_out_dir,
)
from samebits.records.log import RunLog
from samebits.records.run import read_run
from samebits.tracking.delivery import Delivery
from samebits.training.loop import SEGMENT_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator

PYTHON = sys.executable
SAMPLES = few(65536, 2048)
LENGTHS = few({"short": 3.0, "long": 20.0}, {"short": 0.1})  # approximate seconds of training
WAYS = few(("off", "sqlite", "server"), ("off", "server"))
KINDS = ("training", "command", "command_cpu")
DELIVERY_SECONDS = 300


@contextmanager
def server(folder: Path, store: Path) -> Iterator[str]:
    """Run an MLflow server on this host in its own process group. Yields its address once it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    arguments = ["--backend-store-uri", f"sqlite:///{store}", "--artifacts-destination", f"{folder}/artifacts"]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [PYTHON, "-m", "mlflow", "server", *arguments, "--host", "127.0.0.1", "--port", str(port)],
            cwd=folder,
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},  # as the kit's own servers have it
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        wait_for(partial(answers, address), DELIVERY_SECONDS, lambda: f"{address} does not answer")
        yield address
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=60)
        with suppress(ProcessLookupError):  # its workers may live on
            os.killpg(process.pid, signal.SIGKILL)


def answers(address: str) -> bool:
    url = f"{address}/api/2.0/mlflow/experiments/search?max_results=1"
    with suppress(OSError), urllib.request.urlopen(url, timeout=5):
        return True
    return False


def wait_for_delivery(folder: Path) -> None:
    """Wait until MLflow has everything that the training logged."""
    (log,) = (folder / ".samebits/runs").glob("*.jsonl")
    said = log.with_suffix(".sender.log")
    wait_for(lambda: Delivery(log).done, DELIVERY_SECONDS, lambda: f"{log} was not delivered:\n{said.read_text()}")
    if refused := Delivery(log).state.refused:
        raise SystemExit(f"MLflow refused {log}: {refused}")


def children_seconds() -> float:
    """CPU seconds of all child processes that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Bench:
    """A folder with data, an empty store, and the repositories of the trainings."""

    def __init__(self, folder: Path, address: str, store: Path) -> None:
        self.folder, self._address, self._store = folder, address, store
        self._count = 0

    def command(self, epochs: int, way: str) -> tuple[Path, list[str], dict[str, str]]:
        """A new repository, the arguments of the training in it, and its environment."""
        self._count += 1
        folder = self.folder / f"{self._count}-{way}"
        folder.mkdir()
        write_params(folder, epochs)
        shutil.copy(self._store, folder / "mlflow.db")
        arguments = ["--strategy", "single", "--data-dir", str(self.folder / "data")]
        arguments += ["--no-tracking"] if way == "off" else []
        environ = {**os.environ, "MLFLOW_TRACKING_URI": self._address if way == "server" else ""}
        return folder, arguments, environ

    def train(self, epochs: int, way: str) -> tuple[float, ...]:
        """Train in a new repository. Returns the seconds of each of ``KINDS``."""
        folder, arguments, environ = self.command(epochs, way)
        cpu = children_seconds()
        wall = stage("train", *arguments, folder=folder, environ=environ)
        cpu = children_seconds() - cpu
        if way != "off":
            wait_for_delivery(folder)
        return read_run(folder / "runs/single-fast").timing.training_seconds, wall, cpu


def write_params(folder: Path, epochs: int) -> None:
    params = {
        "data": {**VECTORS, "num_samples": SAMPLES},
        "model": MLP,
        "train": {"global_batch_size": BATCH, "optimizer": {"lr": LEARNING_RATE}, "epochs": epochs, "repeats": 1},
    }
    YAML().dump(params, folder / "params.yaml")


def measure(bench: Bench, epochs: int, rounds: int) -> dict[str, Any]:
    """Paired ratios to the seconds without tracking."""
    trained = in_turns({way: partial(bench.train, epochs, way) for way in WAYS}, rounds)
    record: dict[str, Any] = {"epochs": epochs}
    for number, kind in enumerate(KINDS):
        seconds = {way: [spent[number] for spent in trainings] for way, trainings in trained.items()}
        what = f"{kind} of {statistics.median(seconds['off']):.1f} s"
        record[kind] = {
            "seconds": {way: middle_of(values) for way, values in seconds.items()},
            "over_off": {way: judged(f"{what}, {way} over off", seconds[way], seconds["off"]) for way in WAYS[1:]},
        }
    return record


def cost_of_log(folder: Path, step_seconds: float, rounds: int) -> dict[str, Any]:
    """Cost of tracking in the training itself: a line in a local log for each segment."""
    steps = max(1, round(SEGMENT_SECONDS / step_seconds))
    log, seconds = RunLog(folder / "cost.jsonl"), []
    losses, rates = [2.302585 + i / 7e3 for i in range(steps)], [0.1 - i / 3e6 for i in range(steps)]
    for number in range(20 * rounds):
        started = time.perf_counter()
        log.losses(1 + number * steps, losses, rates)
        seconds.append((time.perf_counter() - started) / SEGMENT_SECONDS)
    log.close()
    middle = middle_of([1e3 * value for value in seconds])
    show_middle("RunLog.losses", middle, "ms per second of training")
    return {"steps_of_a_segment": steps, "ms_per_second": middle}


@contextmanager
def stores() -> Iterator[tuple[Bench, float]]:
    """A bench with a running server, and the approximate seconds of an epoch."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:  # an idle sender may still use it
        folder = Path(name)
        write_params(folder, 1)
        stage("prepare", folder=folder)
        store = folder / "empty.db"
        code = f"from samebits.tracking.store import connect; connect('sqlite:///{store}')"
        run(PYTHON, "-c", code, folder=folder)
        shutil.copy(store, folder / "server.db")
        with server(folder, folder / "server.db") as address:
            bench = Bench(folder, address, store)
            ways = few((*WAYS, "off"), ("off",))
            yield bench, min(bench.train(5, way)[0] / 5 for way in ways)  # the least: a busy moment must not count


@click.command(help=__doc__)
@click.option("--rounds", default=few(10, 1), show_default=True, help="Trainings of each kind.")
@with_out_dir
def main(rounds: int, out_dir: Path) -> None:
    with stores() as (bench, of_epoch):
        lengths = {length: measure(bench, round(seconds / of_epoch) + 1, rounds) for length, seconds in LENGTHS.items()}
        cost = cost_of_log(bench.folder, of_epoch / (SAMPLES / BATCH), rounds)
    record = {"question": "what MLflow costs a training", "lengths": lengths, "own_cost": cost}
    print(save(out_dir, "tracking", record))


if __name__ == "__main__":
    main()
