"""Shared parts of the benchmarks: variants in turns, paired ratios, medians with their spread, and files of results.

The speed of a shared machine changes by a factor of two within minutes. Variants therefore take turns in short slices,
and ratios are formed within a round. A median comes with its distribution-free interval and the range.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict, TypeVar

import click

from samebits.errors import HostError
from samebits.files import write_json
from samebits.host import host_facts
from samebits.records.provenance import git_state, versions
from samebits.workers.processes import launch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from samebits.records.provenance import GitState
    from samebits.training.worker import Worker
    from samebits.workers.rank import Reporter

T = TypeVar("T")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers and machines end too

ROOT = Path(__file__).resolve().parent.parent
FEWEST_ROUNDS = 6  # with fewer, not even the range is a 95% interval of the median
RESULTS = ROOT / "benchmarks" / "results"

SMOKE = bool(os.environ.get("SAMEBITS_BENCH_SMOKE"))
"""Whether a script only shows that it works: each thing runs once and small, and no figure is kept."""

# Fixed since the first measurement, so that results compare. The defaults of params.yaml may change.
VECTORS: dict[str, Any] = {"task": "vectors", "kwargs": {"features": 128}}
MLP: dict[str, Any] = {"name": "mlp", "kwargs": {"hidden": [256, 128]}}
BATCH, LEARNING_RATE = 256, 0.1

with_out_dir = click.option(
    "--out-dir",
    default=RESULTS,
    type=click.Path(path_type=Path),
    help="Write OUT_DIR/HOST/NAME.json.  [default: benchmarks/results]",
)


def few(usual: Any, smoke: Any) -> Any:
    """The usual size, or the one for smoke."""
    return smoke if SMOKE else usual


def some(cases: dict[str, Any]) -> dict[str, Any]:
    """All cases, or in smoke the first."""
    return dict(itertools.islice(cases.items(), few(None, 1)))


def leave_out(reason: str) -> NoReturn:
    """End with the exit code for a host that cannot run the benchmark."""
    click.echo(f"left out: {reason}", err=True)
    sys.exit(HostError.exit_code)


class Ratio(TypedDict):
    """Median of paired ratios, its 95% interval by order statistics, their range and number."""

    median: float
    interval: tuple[float, float]
    range: tuple[float, float]
    rounds: int


def ratio_of(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """Summarise the ratios above / below of paired slices."""
    values = sorted(a / b for a, b in zip(above, below, strict=True))
    count = len(values)
    # The k-th smallest of n values is below the median with probability P(Binomial(n, 1/2) >= k).
    tail, k = 0.5**count, 0
    while tail + math.comb(count, k + 1) * 0.5**count <= 0.025 and k + 1 < count // 2:
        k += 1
        tail += math.comb(count, k) * 0.5**count
    return {
        "median": statistics.median(values),
        "interval": (values[k], values[count - 1 - k]),
        "range": (values[0], values[-1]),
        "rounds": count,
    }


class Middle(TypedDict):
    """Median, range and number of values."""

    median: float
    range: tuple[float, float]
    rounds: int


def middle_of(values: Sequence[float]) -> Middle:
    """Summarise the values of one quantity."""
    return {"median": statistics.median(values), "range": (min(values), max(values)), "rounds": len(values)}


@dataclass(frozen=True)
class Variant:
    """Something to time. ``run`` is timed, or returns its own seconds. ``reset`` comes before and is not timed."""

    run: Callable[[], float | None]
    reset: Callable[[], None]


def in_turn(names: Sequence[str], number: int) -> list[str]:
    """The names in the order of a round. Each round begins with the next name."""
    turn = number % len(names)
    return [*names[turn:], *names[:turn]]


def in_turns(things: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """The results of each thing by round. Each round begins with the next thing."""
    found: dict[str, list[T]] = {name: [] for name in things}
    for number in range(rounds):
        for name in in_turn([*things], number):
            found[name].append(things[name]())
    return found


def interleave(
    variants: Mapping[str, Variant], rounds: int, worker: Worker, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds of the slowest rank for each variant and round. Each round begins with the next variant."""
    names = list(variants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in in_turn(names, number):
            variants[name].reset()
            gc.collect()  # so that no variant collects the garbage of another
            worker.ranks.barrier()
            started = clock()
            counted = variants[name].run()
            seconds[name] += worker.ranks.max_over_ranks([clock() - started if counted is None else counted])
    return seconds


def verdict(ratio: Ratio) -> str:
    """The conclusion that the interval of a ratio allows."""
    low, high = ratio["interval"]
    if ratio["rounds"] < FEWEST_ROUNDS:
        return "too few rounds"
    if low <= 1.0 <= high:
        return "no difference shown"
    return "slower" if low > 1.0 else "faster"


def show(name: str, ratio: Ratio) -> None:
    """Print a ratio in one line."""
    (low, high), (least, most) = ratio["interval"], ratio["range"]
    print(
        f"{name}: {ratio['median']:.3f}x (95% interval of the median {low:.3f} to {high:.3f}, range {least:.2f} to "
        f"{most:.2f}, {ratio['rounds']} rounds): {verdict(ratio)}"
    )


def judged(name: str, above: Sequence[float], below: Sequence[float]) -> dict[str, Any]:
    """Compare paired slices, print the ratio, and return it with the conclusion that its interval allows."""
    ratio = ratio_of(above, below)
    show(name, ratio)
    return {"ratio": ratio, "verdict": verdict(ratio)}


def show_middle(name: str, values: Middle, unit: str = "s") -> None:
    """Print a median in one line."""
    least, most = values["range"]
    print(f"{name}: {values['median']:.3g} {unit} (range {least:.3g} to {most:.3g}, {values['rounds']} rounds)")


def middles(things: Mapping[str, Callable[[], Mapping[str, float]]], rounds: int) -> dict[str, dict[str, Middle]]:
    """Seconds of each part of the things, which take turns; printed, too."""
    by_thing = {name: {part: middle_of([one[part] for one in found]) for part in found[0]}
                for name, found in in_turns(things, rounds).items()}  # fmt: skip
    for name, parts in by_thing.items():
        for part, values in parts.items():
            show_middle(f"{name}: {part}", values)
    return by_thing


def run(*command: str, folder: Path, environ: Mapping[str, str] = os.environ) -> float:
    """Run a program in ``folder`` and return its wall seconds. If it fails, its output is shown."""
    started = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environ, check=False)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return seconds


def stage(name: str, *arguments: str, folder: Path, environ: Mapping[str, str] = os.environ) -> float:
    """Run a stage of the pipeline in ``folder`` and return its wall seconds."""
    return run(sys.executable, str(ROOT / f"pipeline/{name}.py"), *arguments, folder=folder, environ=environ)


def wait_for(what: Callable[[], Any], seconds: float, failure: Callable[[], str]) -> Any:
    """The result of ``what`` once it is true. After so many seconds the script ends with the text of ``failure``."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        if time.monotonic() > deadline:
            raise SystemExit(failure())
        time.sleep(0.1)
    return found


def result_of(work: Callable[[Reporter], Any], workers: int = 1) -> Any:
    """The result of ``work`` in the first of so many workers, as plain data. It comes in a file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"

        def run_work(reporter: Reporter) -> None:
            rank = os.environ["RANK"]  # read before work, because bare.py deletes it
            result = work(reporter)
            if rank == "0":
                write_json(file, result)

        launch(run_work, workers)
        return json.loads(file.read_text(encoding="utf-8"))


def _git() -> GitState:
    """The commit, dirty if anything but results has changed. Earlier benchmarks write results."""
    outputs = [":(top,exclude)benchmarks/results", ":(top,exclude)docs/reference", ":(top,exclude)dvc.lock"]
    done = subprocess.run(
        ["git", "status", "--porcelain", "--", ":/", *outputs], cwd=ROOT, capture_output=True, check=False
    )
    return git_state().model_copy(update={"dirty": bool(done.stdout)})


def save(out_dir: Path, name: str, record: dict[str, Any]) -> Path:
    """Write ``OUT_DIR/HOST/NAME.json``: the figures, the host's facts, the commit and the versions."""
    facts = host_facts()
    cpu, gpus = facts.cpu, facts.gpus
    device = f"{len(gpus)}x-{gpus[0].name}" if gpus else f"{cpu.model}-{cpu.cores}-cores"
    host = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    path = out_dir / host / f"{name}.json"
    if SMOKE and out_dir == RESULTS:
        path = Path(tempfile.gettempdir()) / "samebits-smoke" / f"{name}.json"
    write_json(
        path,
        {
            "benchmark": name,
            **record,
            "host": facts.model_dump(mode="json"),
            "host_fingerprint": facts.fingerprint,
            "git": _git().model_dump(mode="json"),
            "versions": versions(),
        },
    )
    return path


def import_torchvision() -> None:
    """Import torchvision, where it is installed, also if its kernels do not load, of which no model here calls any.

    That of the package index is built for CUDA. Beside a PyTorch for CPUs it describes two operators that nobody has
    declared, and its import raises "operator torchvision::nms does not exist", as does that of transformers.
    """
    import torch

    if not find_spec("torchvision"):
        return
    try:
        import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import_module("torchvision")
