"""Stage evaluate: the loss and accuracy of a trained model on the whole test split.

\b
Examples:
  python pipeline/evaluate.py --strategy ddp
  python pipeline/evaluate.py --strategy dp --out-dir /tmp/try
"""

from pathlib import Path
from typing import get_args

import click

from samebits.commands import HELP_OPTIONS, enter_container
from samebits.errors import exit_on_error
from samebits.params import load_params
from samebits.params.schema import NumericsName, StrategyName


@click.command(help=__doc__, context_settings=HELP_OPTIONS)
@click.option("--strategy", type=click.Choice(get_args(StrategyName)), required=True, help="Which run to evaluate.")
@click.option("--numerics", type=click.Choice(get_args(NumericsName)), default="fast", show_default=True)
@click.option("--params", "params_file", default="params.yaml", show_default=True, help="Parameters to read.")
@click.option("--data-dir", default="data", show_default=True, help="Folder that prepare.py wrote.")
@click.option("--out-dir", default=None, help="Folder of the run.  [default: runs/STRATEGY-NUMERICS]")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def main(
    strategy: str, numerics: NumericsName, params_file: str, data_dir: str, out_dir: str | None, debug: bool
) -> None:
    with exit_on_error(debug=debug):
        enter_container()
        params = load_params(params_file)
        from samebits.evaluation import evaluate_run  # after the checks: importing torch takes seconds

        out = Path(out_dir or f"runs/{strategy}-{numerics}")
        result = evaluate_run(params, numerics, data_dir=Path(data_dir), out_dir=out)
        above = result["above_floor"]
        floor = "" if above is None else f", {100 * above:+.1f}% over the floor"
        click.echo(f"{out.name}: loss {result['eval_loss']:.4f}{floor}")


if __name__ == "__main__":
    main()
