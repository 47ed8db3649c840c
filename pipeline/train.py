"""Stage train: train the model of params.yaml under one strategy, and time it.

\b
Examples:
  python pipeline/train.py --strategy ddp
  python pipeline/train.py --strategy dp --num-devices 2 --out-dir /tmp/try --no-tracking
"""

from pathlib import Path
from typing import get_args

import click

from samebits.commands import HELP_OPTIONS, enter_container
from samebits.errors import exit_on_error
from samebits.params import load_params, with_num_devices
from samebits.params.schema import NumericsName, StrategyName
from samebits.runlog import start_sender
from samebits.summary import describe_run, notes_of


@click.command(help=__doc__, context_settings=HELP_OPTIONS)
@click.option("--strategy", type=click.Choice(get_args(StrategyName)), required=True, help="How to use the devices.")
@click.option("--numerics", type=click.Choice(get_args(NumericsName)), default="fast", show_default=True)
@click.option("--num-devices", default=None, help="In place of train.num_devices: auto or a number.")
@click.option("--params", "params_file", default="params.yaml", show_default=True, help="Parameters to read.")
@click.option("--data-dir", default="data", show_default=True, help="Folder that prepare.py wrote.")
@click.option("--out-dir", default=None, help="Folder to write.  [default: runs/STRATEGY-NUMERICS]")
@click.option("--no-tracking", is_flag=True, help="Leave no trace in MLflow.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def main(
    strategy: StrategyName,
    numerics: NumericsName,
    num_devices: str | None,
    params_file: str,
    data_dir: str,
    out_dir: str | None,
    no_tracking: bool,
    debug: bool,
) -> None:
    with exit_on_error(debug=debug):
        enter_container()
        params = with_num_devices(load_params(params_file), num_devices, numerics)
        from samebits.launch import run_training  # after the checks: importing torch takes seconds

        out = Path(out_dir or f"runs/{strategy}-{numerics}")
        run_training(
            params,
            strategy,
            numerics,
            data_dir=Path(data_dir),
            out_dir=out,
            start_sender=None if no_tracking else start_sender,
        )
        click.echo(describe_run(out))
        for note in notes_of(out):
            click.echo(note, err=True)


if __name__ == "__main__":
    main()
