"""The kit's training loop against bare PyTorch and three others (see peers.py), by paired CPU time on one thread.

python benchmarks/loop.py
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from bare import against, bare
from common import few, save, with_out_dir
from peers import available

if TYPE_CHECKING:
    from pathlib import Path


@click.command(help=__doc__)
@click.option("--rounds", default=few(60, 1), show_default=True, help="Slices of each.")
@with_out_dir
def main(rounds: int, out_dir: Path) -> None:
    peers, packages = available()
    loops = {"bare": bare(lambda model: model), **peers}
    cases = against("single", loops, rounds, time.process_time)
    record = {"question": "CPU time of the kit's loop over others", "packages": packages, "cases": cases}
    print(save(out_dir, "loop", record))


if __name__ == "__main__":
    main()
