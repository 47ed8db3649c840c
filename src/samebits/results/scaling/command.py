"""The command ``samebits scale``."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from samebits.files import scratch_folder
from samebits.params import load_params, require_repository

if TYPE_CHECKING:
    from samebits.records.run import Run
    from samebits.results.scaling.measure import PlannedTraining


@click.command(short_help="Train on 1, 2, 4 ... devices, and project further.")
@click.option("--devices", help="Numbers to train with.  [default: 1,2,4 ... as far as this host has them]")
@click.option(
    "--project", "projected", help="Numbers to project to.  [default: 2, 4 and 8 times the most trained with]"
)
@click.option("--network", help="Between hosts, such as 400Gb/s,5us: bandwidth of a device's link, and its latency.")
@click.option("--steps", type=click.IntRange(min=4), default=50, show_default=True, help="Of each training.")
@click.option("--params", "params_file", default="params.yaml", show_default=True, help="Parameters to read.")
@click.option("--out-dir", default="reports", show_default=True, help="Folder to write.")
@click.option("--json", "as_json", is_flag=True, help="What is written, as JSON.")
def scale(
    devices: str | None,
    projected: str | None,
    network: str | None,
    steps: int,
    params_file: str,
    out_dir: str,
    as_json: bool,
) -> None:
    """Measure how ddp scales on this host, fit a cost model to that, and project past the host.

    Short trainings with 1, 2, 4 ... devices, in fast: strong scaling shares the same batch out, weak scaling gives each
    device as many samples. They run in a folder that goes away. OUT_DIR gets scaling.json and a plot. A projection is
    always named one; what more workers than devices do is shown and counts for nothing.

    \b
    Examples:
      samebits scale
      samebits scale --devices 1,2,4,8 --project 16,64 --network 400Gb/s,5us
    """
    from samebits.results.lines import width_of
    from samebits.results.scaling import measure
    from samebits.results.scaling.assemble import assemble
    from samebits.results.scaling.network import parse_network
    from samebits.results.scaling.plot import draw
    from samebits.results.scaling.words import lines_of

    require_repository()
    params, link = load_params(params_file), parse_network(network) if network else None
    counts = measure.parse_counts("--devices", devices) if devices else measure.default_devices(params)
    further = measure.default_projections(params, counts)
    if projected is not None:
        further = measure.parse_counts("--project", projected)
    trainings, notes = measure.plan(params, counts, further)
    pairs: list[tuple[PlannedTraining, Run]] = []
    with scratch_folder(Path(".samebits")) as folder:  # where a container sees it too
        aside = Console(stderr=True, highlight=False)
        with aside.status("training") if aside.is_terminal else nullcontext():
            for run in measure.train(params, trainings, folder, steps=steps):
                pairs.append((trainings[len(pairs)], run))
                told = f"{len(pairs)} of {len(trainings)}: {measure.describe(*pairs[-1])}"
                aside.print(told, markup=False, soft_wrap=True)
    per_host = measure.devices_here().existing
    scaled = assemble(params, pairs, projected=further, network=link, per_host=per_host, notes=notes)
    file = Path(out_dir) / "scaling.json"
    scaled.write(file)
    plot = draw(scaled, Path(out_dir) / "plots")
    if as_json:
        click.echo(scaled.model_dump_json(indent=2))
    else:
        console = Console(highlight=False)
        for line in lines_of(scaled, width_of(console)):
            console.print(line, soft_wrap=True)
    click.echo(f"{file} and {plot}", err=True)
