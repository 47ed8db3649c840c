"""The kit's training under ddp against a bare DistributedDataParallel script (see bare.py), by wall time.

    python benchmarks/ddp.py

Both share two processes and their process group; a slice's time is that of the slowest rank.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import click
from torch.nn.parallel import DistributedDataParallel

from bare import against, bare
from common import few, save, with_out_dir

if TYPE_CHECKING:
    from pathlib import Path


@click.command(help=__doc__)
@click.option("--rounds", default=few(60, 1), show_default=True, help="Slices of each.")
@with_out_dir
def main(rounds: int, out_dir: Path) -> None:
    wrap = partial(DistributedDataParallel, gradient_as_bucket_view=True)
    cases = against("ddp", {"bare": bare(wrap)}, rounds, time.perf_counter)
    print(save(out_dir, "ddp", {"question": "wall time of the kit's ddp over a bare DDP script", "cases": cases}))


if __name__ == "__main__":
    main()
