"""The largest batch that `samebits doctor --memory` forecasts, beside the largest that was found by trying.

    python benchmarks/memory_forecast.py

Each model has so much memory beside the process itself, on one CPU device. The truth is found within half a percent of
the batch, twice: where the C library gives freed memory back at once, as forecasts take for granted, and as it does
otherwise.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from common import MLP, VECTORS, few, save, some, with_out_dir
from samebits.doctor.fitting import Case, search
from samebits.doctor.model import data_to_try
from samebits.params import parse_params
from samebits.strategies.placement import Devices

MOST = 10**7  # samples, more than fit
PRECISION = few(1 / 200, 1 / 2)
MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"data": VECTORS, "model": MLP},
    "gpt": {"data": {"task": "tokens"}, "model": {"name": "gpt"}},
    "convnet": {"data": {"task": "images"}, "model": {"name": "convnet"}},
}


def case_of(name: str, folder: Path) -> Case:
    """A training of one device, without a limit."""
    raw = MODELS[name]
    train = {"global_batch_size": 32, "numerics": ["fast"], "strategies": ["single"]}
    params = parse_params({**raw, "data": {**raw["data"], "num_samples": 512, "test_samples": 8}, "train": train})
    data_dir, _ = data_to_try(params, folder / "none", folder / name)
    return Case(
        params=params,
        strategy="single",
        numerics="fast",
        machine=Devices(gpus=0, cores=1),
        data_dir=data_dir,
        folder=folder,
        limit=None,
        seconds=600,
    )


def measured(name: str, mib: int, folder: Path) -> dict[str, float]:
    """Numbers of samples: the forecast, and the truth with and without freed memory that goes back at once."""
    free = case_of(name, folder)
    small = free.estimate()
    assert small, "a small batch fits"
    limit = small.step.memory.devices[0].baseline + mib * 2**20
    data = free.params.data.model_copy(update={"num_samples": MOST})
    case = replace(free, limit=limit, params=free.params.model_copy(update={"data": data}))
    estimate = case.estimate()
    assert estimate, "the smallest batch fits"
    assert estimate.forecast, "memory grows with the batch"
    forecast = estimate.forecast.samples
    found: dict[str, float] = {"forecast": forecast}
    for kind, at_once in (("at once", True), ("as usual", False)):
        fits = partial(case.fits, limit=limit, at_once=at_once)
        bracket = search(fits, forecast, unit=1, most=MOST, precision=PRECISION)
        assert bracket.fitted, "a smaller batch was looked at"
        found[kind] = bracket.fitted
        found[f"error, {kind}"] = forecast / bracket.fitted - 1
    return found


@click.command(help=__doc__)
@click.option(
    "--mib", "sizes", type=int, multiple=True, default=few((64, 256), (16,)), show_default=True, help="Memory to fill."
)
@click.option("--model", "names", multiple=True, type=click.Choice(list(MODELS)), help="These alone.")
@with_out_dir
def main(sizes: tuple[int, ...], names: tuple[str, ...], out_dir: Path) -> None:
    cases = {}
    for mib in sizes:
        for name in names or some(MODELS):
            with tempfile.TemporaryDirectory() as folder:
                found = measured(name, mib, Path(folder))
            cases[f"{name}, {mib} MiB"] = found
            print(
                f"{name}, {mib} MiB: forecast {found['forecast']:,}; {found['at once']:,} fits where freed memory goes "
                f"back at once ({found['error, at once']:+.1%}), {found['as usual']:,} as usual "
                f"({found['error, as usual']:+.1%})",
                flush=True,
            )
    if not names:
        question = "the largest batch that is forecast, and the largest that fits"
        print(save(out_dir, "memory_forecast", {"question": question, "cases": cases}))


if __name__ == "__main__":
    main()
