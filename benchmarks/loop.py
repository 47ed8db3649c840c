"""The kit's training loop against bare PyTorch and three others (see peers.py), by paired CPU time on one thread.

python benchmarks/loop.py
"""

from __future__ import annotations

import time

import click

from bare import against, bare
from common import save
from peers import available


@click.command(help=__doc__)
@click.option("--rounds", default=60, show_default=True, help="Slices of each.")
def main(rounds: int) -> None:
    peers, packages = available()
    loops = {"bare": bare(lambda model: model), **peers}
    cases = against("single", loops, rounds, time.process_time)
    print(save("loop", {"question": "CPU time of the kit's loop over others", "packages": packages, "cases": cases}))


if __name__ == "__main__":
    main()
