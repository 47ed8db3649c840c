"""What very many delivered logs of one repository cost its sender: at its start, at each look, and once they are old.

python benchmarks/many_logs.py
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from functools import partial
from typing import TYPE_CHECKING

import click

from common import few, middles, save, with_out_dir
from samebits.records.log import LOGS
from samebits.tracking.delivery import State, remove_old_logs
from samebits.tracking.sender import Sender

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

COUNTS = few((1_000, 10_000, 100_000), (100,))
LOOKS = 5


def make_logs(count: int) -> None:
    """So many logs that MLflow has whole, as far as their states say."""
    LOGS.mkdir(parents=True)
    line = b'{"event": "losses"}\n'
    state_file = LOGS / "000000.state.json"
    State(uri="sqlite:///mlflow.db", run_id="0" * 32, offset=len(line), ended=True).write(state_file)
    state = state_file.read_bytes()
    for number in range(count):
        (LOGS / f"{number:06d}.jsonl").write_bytes(line)
        (LOGS / f"{number:06d}.state.json").write_bytes(state)


def seconds_of(work: Callable[[], object]) -> float:
    """Wall seconds of a call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(count: int) -> dict[str, float]:
    """Seconds of each thing with so many logs."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        make_logs(count)
        sender = Sender()
        start = seconds_of(remove_old_logs) + seconds_of(sender._undelivered)
        looks = [seconds_of(sender._undelivered) for _ in range(LOOKS)]
        for log in LOGS.glob("*.jsonl"):
            os.utime(log, (0, 0))
        removal = seconds_of(remove_old_logs)
        assert not [*LOGS.glob("*.jsonl")]
    return {"the sender's start": start, "each look": statistics.median(looks), "removing all": removal}


@click.command(help=__doc__)
@click.option("--rounds", default=few(3, 1), show_default=True, help="Repositories of each size.")
@with_out_dir
def main(rounds: int, out_dir: Path) -> None:
    seconds = middles({f"{count:,}": partial(measure, count) for count in COUNTS}, rounds)
    question = "wall seconds that very many delivered logs cost the sender"
    print(save(out_dir, "many_logs", {"question": question, "seconds": seconds}))


if __name__ == "__main__":
    main()
