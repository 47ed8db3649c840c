"""Stage train: train the model of params.yaml under one strategy, and time it.

\b
Examples:
  samebits stage train --strategy ddp
  samebits stage train --strategy dp --num-devices 2 --out-dir /tmp/try --no-tracking
"""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import get_args

import click

from samebits.engines.exit_reports import FOLDER as FOLDER_OF_ENDINGS
from samebits.errors import RefusedError, from_exit_code
from samebits.here import call_of
from samebits.host.cluster_environment import find_nodes
from samebits.numerics.environment import prepare_environment
from samebits.params import Params, keys_affecting, with_num_devices
from samebits.params.schema import NumericsName
from samebits.records.run import LOSSES, RECORD, TIMING, WEIGHTS
from samebits.stages.interface import StageSpec, experiment_folder, path_option, say_what_stays_unused, stage
from samebits.strategies import STRATEGIES, StrategyName

_OUT = "runs/${item.strategy}-${item.numerics}"


@stage(
    StageSpec(
        about="train one model under one strategy, and time it",
        reads=("host.json", "source.json", "data/train.safetensors", "data/card.json"),
        writes=tuple(f"{_OUT}/{name}" for name in (WEIGHTS, RECORD, LOSSES)),
        metrics=(f"{_OUT}/{TIMING}",),
        params=keys_affecting("exact", "fast", "time", "devices"),
        matrix={"strategy": "train.strategies", "numerics": "train.numerics"},
    )
)
@click.option("--strategy", type=click.Choice([*STRATEGIES]), required=True, help="How to use the devices.")
@click.option("--numerics", type=click.Choice(get_args(NumericsName)), default="fast", show_default=True)
@click.option("--num-devices", default=None, help="In place of train.num_devices: auto or a number.")
@path_option("--data-dir", default="data", told="Folder that stage prepare wrote.")
@click.option("--out-dir", default=None, help="Folder to write.  [default: FOLDER/runs/STRATEGY-NUMERICS]")
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=None,
    help="End after at most so many steps; no checkpoints are read or written.",
)
@click.option("--no-tracking", is_flag=True, help="Leave no trace in MLflow.")
@click.option("--nodes", type=int, default=None, help="How many machines, if nobody else tells: see the guide.")
@click.option("--node-rank", type=int, default=None, help="Which of them this is, from 0.")
@click.option("--master", default=None, help="Node 0's HOST or HOST:PORT.")
@click.option("--trace", is_flag=True, help="Also write some steps as OUT_DIR/trace.json.gz, for Perfetto.")
@click.option("--no-checkpoints", is_flag=True, help="Neither go on from a checkpoint nor write any.")
def main(
    params: Params,
    strategy: StrategyName,
    numerics: NumericsName,
    num_devices: str | None,
    data_dir: str,
    out_dir: str | None,
    steps: int | None,
    no_tracking: bool,
    nodes: int | None,
    node_rank: int | None,
    master: str | None,
    trace: bool,
    no_checkpoints: bool,
) -> None:
    here = find_nodes(nodes, node_rank, master)
    params = with_num_devices(params, num_devices or here.num_devices, numerics)
    prepare_environment()
    if here.several:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # we report a lost machine ourselves
    # After the checks: importing torch takes seconds.
    from samebits.records.run import read_run, run_name, write_refusal
    from samebits.results.text import describe_run, notes_of
    from samebits.tracking.sender import start_sender
    from samebits.training.checkpoints import FOLDER
    from samebits.workers.launch import run_training

    if "DVC_STAGE" not in os.environ:  # else the stage host has warned
        say_what_stays_unused()
    out = Path(out_dir or experiment_folder() / "runs" / run_name(strategy, numerics))
    try:
        run_training(
            params,
            strategy,
            numerics,
            data_dir=Path(data_dir),
            out_dir=out,
            start_sender=None if no_tracking else start_sender,
            checkpoints=None if no_checkpoints else FOLDER,
            steps=steps,
            trace=trace,
            nodes=here,
            prepare=partial(make_data, data_dir),
        )
    except RefusedError as error:
        if "DVC_STAGE" not in os.environ or params.train.numerics == ("exact",):
            raise
        if here.rank == 0:  # the pipeline goes on, because the other numerics can be compared
            write_refusal(out, error, params, strategy, numerics)
        click.echo(f"{run_name(strategy, numerics)}: refused: {error}", err=True)
        return
    if here.rank == 0:
        run = read_run(out)
        click.echo("\n".join([describe_run(run), *notes_of(run)]))


def make_data(folder: str) -> None:
    """Run stage prepare on this machine in another process, because this one could not fork after computing."""
    params_file = click.get_current_context().params["params_file"]
    command = [sys.executable, "-P", *call_of("prepare"), "--params", params_file, "--out-dir", folder]
    environ = {**os.environ, FOLDER_OF_ENDINGS: ""}  # only this process reports its end there
    code = subprocess.run(command, stdout=sys.stderr, env=environ).returncode
    if code:
        raise from_exit_code(code, "stage prepare failed on this machine", hint="see above")
