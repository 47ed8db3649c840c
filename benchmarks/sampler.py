"""What reading the counters beside a training takes: a share of one core's time.

    python benchmarks/sampler.py [--stand-in A]

It watches the GPUs of this host, or without one its cores, while nothing trains. ``--stand-in`` watches the GPUs of one
of the hosts of ``tools/nvml`` instead, whose library answers at once: what is left is this library's own part.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import click

from common import ROOT, few
from samebits.host import count_visible
from samebits.strategies.placement import Placement
from samebits.training.loop import TrainResult
from samebits.workers.sampler import CPU_SHARE, SAMPLE_SECONDS, Sampler


def become(host: str) -> None:
    """Start this script again on a host of the stand-in."""
    sys.path.append(str(ROOT / "tools"))
    import nvml  # tools/nvml

    folder = Path(tempfile.mkdtemp())
    arguments = [argument for argument in sys.argv if argument not in ("--stand-in", host)]
    environ = {**os.environ, **nvml.environ(nvml.build(folder), nvml.HOSTS[host])}
    environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.execve(sys.executable, [sys.executable, *arguments], environ)


def watch(gpus: int, seconds: float, interval: float) -> tuple[float, int]:
    """The share of a core's time, and the number of readings of each device."""
    placement = Placement(
        strategy="dp" if gpus > 1 else "single",
        device_type="cuda" if gpus else "cpu",
        num_devices=max(1, gpus),
        devices_used=max(1, gpus),
        devices=tuple(range(max(1, gpus))),
        rows_per_device=1,
    )
    sampler = Sampler(placement, on=True, seconds=interval)
    with sampler.during("training"):
        time.sleep(seconds)
    usage = sampler.usage(TrainResult(losses=[], step_seconds=[], seconds=seconds), 1)
    assert usage
    return usage.sampler_share, usage.training.devices[0].readings if gpus else 0


@click.command(help=__doc__)
@click.option("--seconds", default=few(30.0, 2.0), show_default=True, help="How long to watch.")
@click.option("--interval", default=SAMPLE_SECONDS, show_default=True, help="Seconds from one reading to the next.")
@click.option("--stand-in", "host", help="One of the hosts of tools/nvml.")
def main(seconds: float, interval: float, host: str | None) -> None:
    if host:
        become(host)
    gpus = count_visible()
    share, readings = watch(gpus, seconds, interval)
    what = f"{gpus} GPU{'s' if gpus > 1 else ''}, {readings} readings of each" if gpus else "the cores"
    verdict = "within" if share <= CPU_SHARE else "beyond"
    print(f"{what}: {share:.4%} of one core's time, {verdict} the {CPU_SHARE:.1%} that it may take")


if __name__ == "__main__":
    main()
