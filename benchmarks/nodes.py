"""Two machines with a worker each, beside one machine with two workers, on the same two cores.

    python benchmarks/nodes.py

The machines are network namespaces of this host, joined by a bridge in its memory; they take turns with the one
machine. A second part slows the link down (``tc tbf``) and shows what becomes of a step and of its bound. A third one
loses the second machine, and shows how soon the first one ends, whose limit is ``train.timeout_s`` and ten seconds.
Needs root.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click
from ruamel.yaml import YAML

from common import (
    FEWEST_ROUNDS,
    ROOT,
    few,
    in_turns,
    leave_out,
    middle_of,
    ratio_of,
    save,
    show,
    show_middle,
    some,
    stage,
    with_out_dir,
)
from samebits.records.run import read_run

sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT / "tests/system/nodes"))
from machines import machines, why_none  # beside the tests that need them too

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from machines import Machine

    from samebits.records.run import Run

EPOCHS = few(20, 1)
RATES = ("1gbit", "300mbit", "100mbit")
TIMEOUT_S = 10
MOST_OF_A_STEP, MORE_SECONDS = 1.05, 3.0  # limits for the cost of a second machine
FAULTS: dict[str, Callable[[Machine], object]] = {
    "killed": lambda node: node.kill(),
    "frozen": lambda node: node.freeze(),
    "cut off": lambda node: node.link("down"),
}
BITS = {"gbit": 1e9, "mbit": 1e6}
TRAIN = (sys.executable, f"{ROOT}/pipeline/train.py", "--strategy", "ddp", "--no-tracking")
COMMAND = (*TRAIN, "--no-checkpoints")


def train(folder: Path, commands: Sequence[Callable[[], subprocess.Popen[str]]]) -> tuple[Run, float]:
    """The run that the commands make together, and the wall seconds until the last one ends."""
    started = time.perf_counter()
    for process in [command() for command in commands]:
        _, stderr = process.communicate(timeout=300)
        if process.returncode:
            raise click.ClickException(stderr)
    return read_run(folder / "runs/ddp-fast"), time.perf_counter() - started


def on_one(folder: Path, params: str) -> tuple[Run, float]:
    """Two workers on this machine."""
    command = [*COMMAND, "--num-devices", "2", "--params", params]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return train(folder, [lambda: subprocess.Popen(command, cwd=folder, **pipes)])


def on_two(folder: Path, params: str, nodes: Sequence[Machine]) -> tuple[Run, float]:
    """One worker on each of two machines."""

    def start(rank: int, node: Machine) -> subprocess.Popen[str]:
        place = ["--nodes", 2, "--node-rank", rank, "--master", nodes[0].name, "--num-devices", 1]
        process: subprocess.Popen[str] = node.start(*COMMAND, *place, "--params", params, cwd=folder).popen
        return process

    return train(folder, [partial(start, rank, node) for rank, node in enumerate(nodes)])


def slow_link(folder: Path, nodes: Sequence[Machine], rate: str) -> dict[str, float]:
    """Milliseconds of a step over a link of this rate, the least for its bytes, and the ratios."""
    for node in nodes:
        node.limit(rate)
    trained, _ = on_two(folder, "slices.yaml", nodes)
    measurement, timing = trained.record.measurement, trained.timing
    steps = {
        name: 1e3 * median(map(sum, repeats)) / measurement.slice_steps
        for name, repeats in measurement.chunk_seconds.items()
    }
    assert timing.speedup
    assert timing.bound
    bits = 32 * trained.record.model_parameters  # in a ring of two each machine sends all gradients once
    least = 1e3 * bits / (float(rate[:-4]) * BITS[rate[-4:]])
    return {
        "step_ms": steps["strategy"],
        "without_network_ms": steps["together"],
        "link_ms": least,
        "speedup": timing.speedup.median,
        "bound": timing.bound.median,
    }


def seconds_to_end(folder: Path, fault: Callable[[Machine], object]) -> float:
    """Seconds from the loss of the second machine to the end of the first."""
    checkpoints = folder / ".samebits/resume"
    shutil.rmtree(checkpoints, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder) as own, machines(2, Path(own)) as nodes:
        first, _ = (
            node.start(*TRAIN, "--nodes", 2, "--node-rank", rank, "--master", nodes[0].name, "--num-devices", 1,
                       "--params", "long.yaml", cwd=folder)
            for rank, node in enumerate(nodes)
        )  # fmt: skip
        while not list(checkpoints.glob("*/*.safetensors")):
            time.sleep(0.05)
        fault(nodes[1])
        started = time.perf_counter()
        code, _, stderr = first.wait()
        if code != 4:
            raise click.ClickException(f"exit code {code}: {stderr}")
        return time.perf_counter() - started


@click.command(help=__doc__)
@click.option("--rounds", default=few(10, 1), show_default=True, help="Times each is trained.")
@with_out_dir
def main(rounds: int, out_dir: Path) -> None:
    if reason := why_none():
        leave_out(f"no machines here: {reason}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        YAML().dump({"train": {"epochs": EPOCHS, "repeats": 1}}, folder / "params.yaml")
        YAML().dump({"train": {"epochs": EPOCHS, "repeats": 4}}, folder / "slices.yaml")
        lost = {"epochs": 100_000, "repeats": 1, "timeout_s": TIMEOUT_S, "checkpoint_every_steps": 20}
        YAML().dump({"train": lost}, folder / "long.yaml")
        stage("prepare", folder=folder)
        with machines(2, folder / "machines") as nodes:
            trainings = {
                "one": lambda: on_one(folder, "params.yaml"),
                "two": lambda: on_two(folder, "params.yaml", nodes),
            }
            in_turns(trainings, 1)  # warms caches
            trained = in_turns(trainings, rounds)
            slowed = {rate: slow_link(folder, nodes, rate) for rate in RATES[: few(None, 1)]}
        ends = {name: [seconds_to_end(folder, fault) for _ in range(rounds)] for name, fault in some(FAULTS).items()}
    steps = {which: [run.timing.step_time_ms for run, _ in each] for which, each in trained.items()}
    around = {which: [wall - run.timing.training_seconds for run, wall in each] for which, each in trained.items()}
    ratio = ratio_of(steps["two"], steps["one"])
    middles = {name: middle_of(values) for name, values in around.items()}
    extra = middle_of([two - one for one, two in zip(around["one"], around["two"], strict=True)])
    show("a step on two machines over one on one machine", ratio)
    show_middle("all but the steps, one machine", middles["one"])
    show_middle("all but the steps, two machines", middles["two"])
    show_middle("two machines take longer by", extra)
    for rate, figures in slowed.items():
        print(f"{rate}: " + ", ".join(f"{key} {value:.3g}" for key, value in figures.items()))
    ended = {name: middle_of(values) for name, values in ends.items()}
    for name, middle in ended.items():
        show_middle(f"until a training ends whose second machine is {name}, train.timeout_s {TIMEOUT_S}", middle)
    result = {
        "question": "what a second machine costs beside a second worker, and what a slow link or its loss does",
        "step_ratio": ratio,
        "step_ms": {name: middle_of(values) for name, values in steps.items()},
        "other_seconds": {**middles, "difference": extra},
        "links": slowed,
        "seconds_to_end": {"timeout_s": TIMEOUT_S, **ended},
    }
    print(save(out_dir, "nodes", result))
    beyond = [
        *(["a step is slower by more than 5%"] if ratio["interval"][0] > MOST_OF_A_STEP else []),
        *(["a start takes over 3 s more"] if extra["median"] > MORE_SECONDS else []),
        *(f"{name}: over train.timeout_s and 10 s" for name, one in ended.items() if one["range"][1] > TIMEOUT_S + 10),
    ]
    if beyond and ratio["rounds"] >= FEWEST_ROUNDS:  # fewer rounds show nothing
        raise click.ClickException("beyond the limits: " + "; ".join(beyond))


if __name__ == "__main__":
    main()
