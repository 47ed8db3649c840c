"""What the sender costs a training while it delivers, with SQLite and with a local server.

    python benchmarks/sender.py

It is measured within one training of some minutes, from the times of its own log: the sender is stopped and goes on in
turns, and adjacent turns are compared, which a host's drift hardly touches.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
import psutil

from common import ROOT, few, judged, save, wait_for, with_out_dir
from samebits.records.log import LossesEvent, parse_event
from tracking import DELIVERY_SECONDS, PYTHON, WAYS, Bench, stores, wait_for_delivery

if TYPE_CHECKING:
    from pathlib import Path

TURN_SECONDS = few(10.0, 3.0)  # long enough for several deliveries, short against a host's drift
READY_SECONDS = few(30.0, 3.0)  # the sender has imported MLflow by then


@dataclass(frozen=True)
class Segment:
    """A part of a training: begin and end in seconds since the epoch, and number of steps."""

    began: float
    ended: float
    steps: int


def wait_for_log(folder: Path) -> Path:
    """The log of the training, once it has a segment."""

    def found() -> Path | None:
        return next(filter(segments_of, (folder / ".samebits/runs").glob("*.jsonl")), None)

    log: Path = wait_for(found, DELIVERY_SECONDS, lambda: f"nothing trains in {folder}")
    return log


def segments_of(log: Path) -> list[Segment]:
    """The segments between lines of losses."""
    events = [parse_event(line, log) for line in log.read_bytes().splitlines(keepends=True)]
    losses = [event for event in events if isinstance(event, LossesEvent)]
    return [
        Segment(before.time_ms / 1000, after.time_ms / 1000, len(after.losses))
        for before, after in itertools.pairwise(losses)
    ]


def sender_of(folder: Path) -> psutil.Process:
    """The sender of the training in ``folder``."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if "samebits.tracking.sender" in process.cmdline() and process.cwd() == str(folder):
                return process
    raise SystemExit(f"no sender in {folder}")


def beside(bench: Bench, epochs: int, way: str) -> dict[str, Any]:
    """Cost of a delivering sender for the training, and CPU seconds of its start."""
    segments, turns, start_seconds = train_in_turns(bench, epochs, way)
    per_step = [
        statistics.mean(within) if (within := seconds_per_step(segments, began, ended)) else None
        for began, ended in itertools.pairwise(turns[1:])
    ]
    pairs = [(off, on) for off, on in zip(per_step[::2], per_step[1::2], strict=False) if off and on]
    over = judged(f"a step with the sender beside it, {way}", [on for _, on in pairs], [off for off, _ in pairs])
    print(f"CPU seconds of the sender's first {READY_SECONDS:.0f} s, {way}: {start_seconds:.2f}")
    return {**over, "start_cpu_seconds": start_seconds}


def seconds_per_step(segments: list[Segment], began: float, ended: float) -> list[float]:
    """Step times of the segments within a turn."""
    within = [segment for segment in segments if began <= segment.began and segment.ended <= ended]
    return [(segment.ended - segment.began) / segment.steps for segment in within]


def train_in_turns(bench: Bench, epochs: int, way: str) -> tuple[list[Segment], list[float], float]:
    """Train with a sender that is stopped and goes on in turns.

    The first turn lasts until the sender is ready, and in the next it is stopped. Returns the segments, the begin of
    each turn, and the CPU seconds of the sender in the first turn.
    """
    folder, arguments, environ = bench.command(epochs, way)
    training = [PYTHON, f"{ROOT}/pipeline/train.py", *arguments]
    command = subprocess.Popen(training, cwd=folder, env=environ, stdout=subprocess.DEVNULL)
    log = wait_for_log(folder)
    turns, sender, start_seconds = [time.time()], sender_of(folder), 0.0
    while command.poll() is None:
        time.sleep(READY_SECONDS if len(turns) == 1 else TURN_SECONDS)
        sender.suspend() if len(turns) % 2 else sender.resume()
        start_seconds = start_seconds or sum(sender.cpu_times()[:2])  # user and system
        turns.append(time.time())
    sender.resume()
    wait_for_delivery(folder)
    return segments_of(log), turns, start_seconds


@click.command(help=__doc__)
@click.option("--rounds", default=few(15, 1), show_default=True, help="Pairs of turns.")
@with_out_dir
def main(rounds: int, out_dir: Path) -> None:
    long = READY_SECONDS + (2 * rounds + 1) * TURN_SECONDS
    with stores() as (bench, of_epoch):
        costs = {way: beside(bench, round(long / of_epoch), way) for way in WAYS[1:]}
    print(save(out_dir, "sender", {"question": "what the sender costs a training beside it", "stores": costs}))


if __name__ == "__main__":
    main()
