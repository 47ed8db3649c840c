"""Stage prepare: draw the data set that params.yaml describes.

\b
Example:
  python pipeline/prepare.py --params other.yaml --out-dir /tmp/data
"""

from pathlib import Path

import click

from samebits.commands import HELP_OPTIONS, enter_container
from samebits.data.prepare import prepare
from samebits.errors import exit_on_error
from samebits.params import load_params


@click.command(help=__doc__, context_settings=HELP_OPTIONS)
@click.option("--params", "params_file", default="params.yaml", show_default=True, help="Parameters to read.")
@click.option("--out-dir", default="data", show_default=True, help="Folder to write.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def main(params_file: str, out_dir: str, debug: bool) -> None:
    with exit_on_error(debug=debug):
        enter_container()
        card = prepare(load_params(params_file), Path(out_dir))
        floor = "" if card.floor is None else f", floor {card.floor:.6f}"
        click.echo(f"{card.task}: {card.train.num_samples} + {card.test.num_samples} samples{floor}")


if __name__ == "__main__":
    main()
