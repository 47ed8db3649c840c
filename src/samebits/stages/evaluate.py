"""Stage evaluate: the loss and accuracy of trained models on the whole test split.

\b
Examples:
  samebits stage evaluate
  samebits stage evaluate /tmp/try --out-dir /tmp/try/evaluation
"""

from pathlib import Path

import click

from samebits.errors import UserError, few
from samebits.numerics.environment import prepare_environment
from samebits.params import Params, keys_affecting
from samebits.records.progress import tell
from samebits.records.run import read_refusal, run_name
from samebits.stages.interface import StageSpec, experiment_folder, path_option, stage


@stage(
    StageSpec(
        about="loss and accuracy of every run on the whole test split",
        reads=("source.json", "data/test.safetensors", "data/card.json", "runs"),
        writes=("reports/evaluation",),
        params=keys_affecting("runs", "evaluation", "evaluation_batch"),
    )
)
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path))
@path_option("--data-dir", default="data", told="Folder that stage prepare wrote.")
@path_option("--out-dir", default="reports/evaluation", told="Folder for a file of each run.")
def main(params: Params, runs: tuple[Path, ...], data_dir: str, out_dir: str) -> None:
    prepare_environment()
    from samebits.workers.launch import evaluate_in_worker  # after the checks: importing torch takes seconds

    train = params.train
    names = [run_name(strategy, numerics) for numerics in train.numerics for strategy in train.strategies]
    folders = [run if run.name not in ("", "..") else run.resolve() for run in runs] or [
        experiment_folder() / "runs" / name for name in names
    ]
    if twice := [folder for folder in folders if [one.name for one in folders].count(folder.name) > 1]:
        what = f"{few([str(folder) for folder in twice])} would write one file, {twice[0].name}.json"
        raise UserError(what, hint="evaluate them one by one, each with an --out-dir of its own")
    for number, folder in enumerate(folders, start=1):
        if not runs and (refusal := read_refusal(folder)):
            click.echo(f"{folder.name}: refused: {refusal.what}")
            continue
        tell("evaluating", number, len(folders))
        file = Path(out_dir) / f"{folder.name}.json"
        evaluation = evaluate_in_worker(params, data_dir=Path(data_dir), run_dir=folder, file=file)
        above = evaluation.above_floor
        floor = "" if above is None else f", {100 * above:+.1f}% over the floor"
        click.echo(f"{folder.name}: loss {evaluation.eval_loss:.4f}{floor}")
