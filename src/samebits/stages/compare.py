"""Stage compare: put the runs beside each other, as data, as a table and as a page.

\b
Example:
  samebits stage compare --no-tracking
"""

import os
from pathlib import Path

import click

from samebits.params import Params
from samebits.records.progress import VARIABLE
from samebits.records.provenance import git_state
from samebits.results.comparison import REPORT, compare
from samebits.results.page.write import write_report
from samebits.results.terminal import show
from samebits.stages.interface import StageSpec, experiment_folder, path_option, stage
from samebits.tracking.sender import hand_over


@stage(
    StageSpec(
        about="the runs beside each other, as data, as a table and as a page",
        reads=("host.json", "runs", "reports/evaluation"),
        writes=tuple(f"reports/{name}" for name in REPORT),
        params=("seed", "data", "model", "train", "tracking"),
        writes_words=True,
    )
)
@path_option("--out-dir", default="reports", told="Folder to write.")
@click.option("--no-tracking", is_flag=True, help="Leave no trace in MLflow.")
@click.option("-v", "--verbose", is_flag=True, help="Print the notes of the runs as well.")
def main(params: Params, out_dir: str, no_tracking: bool, verbose: bool) -> None:
    folder, reports = experiment_folder(), Path(out_dir)
    comparison = compare(params, git_state(), folder=folder)
    comparison.write(reports / "comparison.json")
    write_report(comparison, reports)
    if VARIABLE not in os.environ:  # else who shows the progress shows the answers at the end
        show(comparison, reports, verbose=verbose)
    if not no_tracking and (problem := hand_over(comparison, reports=reports, runs=folder / "runs", wait_seconds=60)):
        click.echo(problem, err=True)
