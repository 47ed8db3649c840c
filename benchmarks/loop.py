"""The kit's training loop against a bare one (see bare.py), by paired CPU time on one thread.

python benchmarks/loop.py
"""

from __future__ import annotations

import time

import click

from bare import against_bare
from common import save


@click.command(help=__doc__)
@click.option("--rounds", default=60, show_default=True, help="Slices of each.")
def main(rounds: int) -> None:
    cases = against_bare("single", lambda model: model, rounds, time.process_time)
    print(save("loop", {"question": "CPU time of the kit's loop over a bare loop", "cases": cases}))


if __name__ == "__main__":
    main()
