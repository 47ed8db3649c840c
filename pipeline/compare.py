"""Stage compare: put the runs beside each other, as data and as a table.

\b
Example:
  python pipeline/compare.py --no-tracking
"""

from pathlib import Path

import click

from samebits.commands import HELP_OPTIONS, enter_container
from samebits.compare import compare
from samebits.errors import exit_on_error
from samebits.files import write_json
from samebits.params import load_params
from samebits.provenance import git_state
from samebits.report.page import write_report
from samebits.report.table import show
from samebits.tracking.sender import hand_over


@click.command(help=__doc__, context_settings=HELP_OPTIONS)
@click.option("--params", "params_file", default="params.yaml", show_default=True, help="Parameters to read.")
@click.option("--out-dir", default="reports", show_default=True, help="Folder to write.")
@click.option("--no-tracking", is_flag=True, help="Leave no trace in MLflow.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def main(params_file: str, out_dir: str, no_tracking: bool, debug: bool) -> None:
    with exit_on_error(debug=debug):
        enter_container()
        comparison, reports = {**compare(load_params(params_file)), "git": git_state()}, Path(out_dir)
        write_json(reports / "comparison.json", comparison)
        write_report(comparison, reports)
        show(comparison)
        if not no_tracking and not hand_over(comparison, reports=reports, runs=Path("runs"), wait_seconds=60):
            click.echo("MLflow has not answered yet; delivery goes on, or run `samebits track sync`", err=True)


if __name__ == "__main__":
    main()
