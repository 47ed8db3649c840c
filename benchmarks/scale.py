"""The cost model fitted to 1 and 2 simulated devices, beside what 4 of them take.

    python benchmarks/scale.py

A device's computation is a sleep, so that 4 of them fit on fewer cores. Gradients are reduced bucket by bucket beside
the backward pass, in two ways: by a wait for all ranks and the time that a link of a given bandwidth and latency would
need; and by gloo's own all-reduce between network namespaces whose links are slowed down, which needs root.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import torch
import torch.distributed as dist

from common import ROOT, few, result_of, save, some, with_out_dir
from samebits.results.scaling.fit import Point, fit
from samebits.results.scaling.model import BACKWARD_SHARE, Step
from samebits.training.collectives import INIT_METHOD

sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT / "tests/system/nodes"))
from machines import machines, why_none  # beside the tests that need them too

if TYPE_CHECKING:
    from collections.abc import Sequence

    from samebits.results.scaling.fit import Fit
    from samebits.workers.rank import Reporter

BATCH, FEW = 512, 16  # samples of one device's step, and of one among many devices
SEEN, UNSEEN = (1, 2), 4  # devices
TURNS = few(20, 2)
TARGET = 0.10
PORT = "29544"


class Case(NamedTuple):
    """A simulated device and its link, in seconds, bytes and bytes per second.

    ``rate`` is that of a real link in the format of ``tc``. Without it, waits simulate ``bandwidth`` and ``latency``.
    """

    fixed: float
    per_row: float
    size: int
    buckets: int = 1
    contention_per_row: float = 0.0
    bandwidth: float = 1e9
    latency: float = 0.0
    rate: str = ""


CASES = {
    "computation": Case(0.004, 1e-4, 400_000, bandwidth=1e9, latency=1e-4),
    "launches": Case(0.030, 1e-5, 400_000, bandwidth=1e9, latency=2e-4),
    "contention": Case(0.004, 8e-5, 400_000, contention_per_row=1e-5, bandwidth=1e9, latency=1e-4),
    "latency": Case(0.004, 4e-5, 400_000, bandwidth=1e9, latency=5e-3),
    "bandwidth": Case(0.004, 4e-5, 4_000_000, bandwidth=1e8, latency=1e-4),
    "bandwidth, 4 buckets": Case(0.004, 1e-4, 4_000_000, buckets=4, bandwidth=1e8, latency=1e-4),
    "hidden, 8 buckets": Case(0.004, 2e-4, 4_000_000, buckets=8, bandwidth=2e8, latency=2e-4),
    "200mbit link": Case(0.004, 1e-4, 1_600_000, rate="200mbit"),
    "100mbit link, 4 buckets": Case(0.004, 4e-4, 1_600_000, buckets=4, rate="100mbit"),
}


class Waited:
    """Waits for the time of a ring, bucket after bucket, once all ranks have sent it."""

    def __init__(self, case: Case, devices: int) -> None:
        self._case, self._devices = case, devices
        self._todo: queue.Queue[int] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        case, n, ready = self._case, self._devices, torch.zeros(1)
        while True:
            size = self._todo.get()
            dist.all_reduce(ready)
            time.sleep(2 * (n - 1) * case.latency + 2 * (n - 1) / n * size / case.bandwidth)
            self._todo.task_done()

    def send(self, size: int) -> None:
        """Begin to reduce a bucket of so many bytes."""
        self._todo.put(size)

    def wait(self) -> None:
        """Wait until all buckets are reduced."""
        self._todo.join()


class Reduced:
    """Reduces each bucket by gloo's all-reduce."""

    def __init__(self) -> None:
        self._works: list[Any] = []

    def send(self, size: int) -> None:
        """Begin to reduce a bucket of so many bytes."""
        self._works.append(dist.all_reduce(torch.zeros(size // 4), async_op=True))

    def wait(self) -> None:
        """Wait until all buckets are reduced."""
        for work in self._works:
            work.wait()
        self._works.clear()


def take_step(case: Case, step: Step, link: Waited | Reduced) -> None:
    """Sleep for the time of a device's computation, and send each bucket when its part of backward is done."""
    if step.rows:
        rows = case.per_row * step.rows
        beside = case.contention_per_row * step.rows * (step.sharing - 1)
        time.sleep(case.fixed + beside + (1 - BACKWARD_SHARE) * rows)
    for _ in range(step.messages):
        if step.rows:
            time.sleep(BACKWARD_SHARE * rows / step.messages)
        if step.bytes:
            link.send(step.bytes // step.messages)
    link.wait()


def seconds_of(case: Case, steps: Sequence[Step], link: Waited | Reduced) -> list[float]:
    """The least seconds of each step over the turns, of the slowest rank.

    The least, because a simulated device needs no processor: any time beyond it comes from this host.
    """
    found: list[list[float]] = [[] for _ in steps]
    for turn in range(TURNS + 1):
        for times, step in zip(found, steps, strict=True):
            dist.barrier()
            begun = time.perf_counter()
            take_step(case, step, link)
            slowest = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if turn:
                times.append(float(slowest))
    return [min(times) for times in found]


def work(case: Case, steps: Sequence[Step]) -> list[float]:
    """Measure as the rank that the environment names. Returns the seconds of each step."""
    torch.set_num_threads(1)
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=os.environ.get(INIT_METHOD, "env://"), rank=rank, world_size=count)
    link = Reduced() if case.rate else Waited(case, count)
    found = seconds_of(case, steps, link)
    dist.barrier()
    dist.destroy_process_group()
    return found


def steps_of(case: Case, devices: int) -> list[Step]:
    """The steps to measure with so many devices."""
    if devices == 1:
        return [Step(devices=1, rows=rows) for rows in (BATCH, BATCH // 2, FEW)]
    gradients = {"devices": devices, "bytes": case.size, "sharing": devices}
    whole = [Step(rows=rows, messages=case.buckets, **gradients) for rows in (BATCH // devices, BATCH)]
    if devices == UNSEEN:
        return whole
    few = Step(rows=FEW, messages=case.buckets, **gradients)
    together = [step.model_copy(update={"bytes": 0, "messages": 1}) for step in (*whole, few)]
    alone = [Step(rows=0, **{**gradients, "bytes": size}) for size in (case.size, case.size // 8, 4096)]
    return [*whole, few, *together, *alone]


def seconds_here(case: Case, steps: Sequence[Step], devices: int) -> list[float]:
    """Seconds of each step with workers of this host."""

    def run(_: Reporter) -> list[float]:
        return work(case, steps)

    found: list[float] = result_of(run, devices)
    return found


def seconds_over(case: Case, steps: Sequence[Step], devices: int) -> list[float]:
    """Seconds of each step with workers in network namespaces, whose links have the case's rate."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps([case, [step.model_dump() for step in steps]]))
        with machines(devices, folder / "machines") as nodes:
            started = []
            for rank, node in enumerate(nodes):
                node.limit(case.rate)
                environ = {"RANK": str(rank), "WORLD_SIZE": str(devices), "GLOO_SOCKET_IFNAME": "eth0",
                           "MASTER_ADDR": nodes[0].address, "MASTER_PORT": PORT}  # fmt: skip
                command = [sys.executable, str(Path(__file__).resolve()), "--as-rank", str(folder / "job.json")]
                started.append(node.start(*command, cwd=folder, environ=environ))
            for process in started:
                code, _, stderr = process.wait()
                if code:
                    raise click.ClickException(stderr)
        found: list[float] = json.loads((folder / "seconds.json").read_text())
        return found


def as_rank(job: Path) -> None:
    case, steps = json.loads(job.read_text())
    found = work(Case(*case), [Step(**step) for step in steps])
    if os.environ["RANK"] == "0":
        (job.parent / "seconds.json").write_text(json.dumps(found))


def measured(case: Case, devices: int) -> list[Point]:
    steps = steps_of(case, devices)
    over_links = case.rate and devices > 1
    found = (seconds_over if over_links else seconds_here)(case, steps, devices)
    return [Point(**step.model_dump(), seconds=one) for step, one in zip(steps, found, strict=True)]


def compared(found: Fit, points: Sequence[Point]) -> dict[str, dict[str, float]]:
    """Prediction and measurement of each kind of scaling."""
    rows = {}
    for name, point in zip(("strong", "weak"), points, strict=True):
        estimate = found.estimate(point)
        rows[name] = {
            "predicted_ms": 1e3 * estimate.median,
            "low_ms": 1e3 * estimate.low,
            "high_ms": 1e3 * estimate.high,
            "measured_ms": 1e3 * point.seconds,
            "error": estimate.median / point.seconds - 1,
        }
    return rows


@click.command(help=__doc__)
@click.option("--only", multiple=True, type=click.Choice([*CASES]), help="These cases alone; nothing is written.")
@click.option("--as-rank", "job", type=click.Path(path_type=Path), hidden=True)
@with_out_dir
def main(only: tuple[str, ...], job: Path | None, out_dir: Path) -> None:
    if job:
        as_rank(job)
        return
    reason = why_none()
    cases: dict[str, Any] = {}
    for name in only or some(CASES):
        case = CASES[name]
        if case.rate and reason:
            print(f"{name}: left out, no machines here: {reason}")
            continue
        found = fit([point for devices in SEEN for point in measured(case, devices)])
        rows = compared(found, measured(case, UNSEEN))
        cases[name] = {"scatter": found.scatter, "coefficients": found.coefficients.model_dump(), **rows}
        for kind, row in rows.items():
            print(
                f"{name}, {kind}: {row['predicted_ms']:.1f} ms ({row['low_ms']:.1f} to {row['high_ms']:.1f}) said, "
                f"{row['measured_ms']:.1f} ms measured, {row['error']:+.1%}",
                flush=True,
            )
    largest = max(abs(case[kind]["error"]) for case in cases.values() for kind in ("strong", "weak"))
    print(f"largest error {largest:.1%}, target {TARGET:.0%}")
    result = {
        "question": f"what a fit of 1 and 2 devices says of {UNSEEN}",
        "target": TARGET,
        "largest_error": largest,
        "cases": cases,
    }
    if not only:
        print(save(out_dir, "scale", result))


if __name__ == "__main__":
    main()
