"""The ``samebits`` command."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from samebits import __version__
from samebits.commands import HELP_OPTIONS, require_repository
from samebits.container.command import container
from samebits.errors import HostError, UserError, exit_on_error

if TYPE_CHECKING:
    from samebits.verdict import Require


@click.group(context_settings=HELP_OPTIONS)
@click.version_option(__version__)
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.pass_context
def main(context: click.Context, debug: bool) -> None:
    """Measure what DataParallel and DistributedDataParallel buy on this host, and whether it is the same model.

    Results go to stdout, messages to stderr. Exit codes: 0 done, 1 the verdict is worse than asked for, 2 the input is
    wrong, 3 this host cannot do it, 4 a worker failed, 130 and 143 after Ctrl-C and SIGTERM.
    """
    context.with_resource(exit_on_error(debug=debug))


@main.command()
@click.option("--port", default=5000, show_default=True, help="Where to answer, on this host alone.")
def ui(port: int) -> None:
    """Serve MLflow's pages over the runs of this repository.

    The address that is printed once the server answers opens a view with the columns and charts that a comparison
    needs.

    \b
    Examples:
      samebits ui
      samebits ui --port 5001
    """
    from samebits.tracking.serve import serve

    require_repository()
    serve(port)


@main.command("compare", short_help="Say whether two trainings are the same.")
@click.argument("a")
@click.argument("b")
@click.option("--require", type=click.Choice(["bitwise", "tolerance"]), help="Exit with 1 if the verdict is worse.")
@click.option("--json", "as_json", is_flag=True, help="The verdicts as JSON.")
@click.pass_context
def compare_two(context: click.Context, a: str, b: str, require: Require | None, as_json: bool) -> None:
    """Say whether two trainings are the same: bitwise, within tolerance, or diverged.

    A and B are folders of runs or ids of MLflow runs. What differs between their settings and hosts is listed.

    \b
    Examples:
      samebits compare runs/single-fast runs/ddp-fast
      samebits compare runs/ddp-fast 0f3c9a8e7b6d5c4f3a2b1c0d9e8f7a6b --require tolerance
    """
    from samebits.tracking.fetch import find_run_files
    from samebits.verdict import compare_runs, meets, say

    with tempfile.TemporaryDirectory(prefix="samebits-") as folder:
        scratch = [Path(folder) / name for name in ("a", "b")]
        for path in scratch:
            path.mkdir()
        found = compare_runs(*(find_run_files(name, path) for name, path in zip((a, b), scratch, strict=True)))
    click.echo(json.dumps({"a": a, "b": b, **found}, indent=2) if as_json else say(found))
    context.exit(int(not meets(found["grade"], require)))


@main.command(short_help="Make the report again from comparison.json.")
@click.argument("comparison", default="reports/comparison.json")
@click.option("--out-dir", help="Folder to write.  [default: that of COMPARISON]")
def report(comparison: str, out_dir: str | None) -> None:
    """Make the page, the plots and the table again from a COMPARISON, reports/comparison.json by default.

    Nothing else is read, so that a report can be made where nothing was trained.

    \b
    Examples:
      samebits report
      samebits report downloads/comparison.json --out-dir /tmp/report
    """
    from samebits.files import read_json
    from samebits.report.page import write_report

    path = Path(comparison)
    read, folder = read_json(path, made_by="python pipeline/compare.py"), Path(out_dir or path.parent)
    write_report(read, folder)
    click.echo(folder / "index.html")


@main.command(short_help="Print the shell's completion code.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the shell code that completes samebits' commands and options.

    \b
    Examples:
      echo 'eval "$(samebits completion bash)"' >> ~/.bashrc
      samebits completion fish > ~/.config/fish/completions/samebits.fish
    """
    from click.shell_completion import get_completion_class

    made = get_completion_class(shell)
    assert made is not None
    click.echo(made(context.find_root().command, {}, "samebits", "_SAMEBITS_COMPLETE").source())


@main.command()
@click.option("--model", "with_model", is_flag=True, help="Also run one batch of the model under each strategy.")
@click.option("--checkpoint", type=click.Path(path_type=Path), help="A safetensors file to try on the model; --model.")
@click.option("--params", "params_file", default="params.yaml", show_default=True, help="Parameters to read.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(with_model: bool, checkpoint: Path | None, params_file: str, as_json: bool) -> None:
    """Tell what this host, this repository and the model lack for a training, and what to do about it.

    Exit codes: 0 nothing failed; 2 params.yaml or the model is wrong; 3 the host or its software is.

    \b
    Examples:
      samebits doctor
      samebits doctor --model --json
      samebits doctor --checkpoint runs/ddp-fast/model.safetensors
    """
    from samebits.doctor.visit import visit

    visit(Path(params_file), with_model=with_model or checkpoint is not None, checkpoint=checkpoint, as_json=as_json)


@main.command()
@click.option("--strategy", "only", type=click.Choice(["single", "dp", "ddp"]), help="This one alone.")
@click.option("--num-devices", help="In place of train.num_devices: auto or a number.")
@click.option("--quick", is_flag=True, help="The first steps alone, compared with the losses in runs/.")
@click.option("--params", "params_file", default="params.yaml", show_default=True, help="Parameters to read.")
@click.pass_context
def verify(context: click.Context, only: str | None, num_devices: str | None, quick: bool, params_file: str) -> None:
    """Train the exact runs again and compare their bits with dvc.lock.

    The workspace is not touched. One line for the data and for each run; exit code 0 only if all are bitwise the same.

    \b
    Examples:
      samebits verify
      samebits verify --strategy ddp --num-devices 4
      samebits verify --quick
    """
    from samebits.params import load_params, with_num_devices
    from samebits.verify import stale
    from samebits.verify import verify as results

    require_repository()
    params = with_num_devices(load_params(params_file), num_devices, "exact")
    strategies = [strategy for strategy in params.train.strategies if only in (None, strategy)]
    if not strategies:
        raise UserError(f"--strategy: {only} is not in train.strategies", hint="choose one that is")
    params = params.model_copy(update={"train": params.train.model_copy(update={"repeats": 1})})
    for name in stale(strategies):
        click.echo(f"dvc.lock is older than {name}", err=True)
    same = True
    with tempfile.TemporaryDirectory(prefix="samebits-") as folder:
        for found in results(params, strategies, Path(folder), quick=quick):
            click.echo(found.text)
            same = same and found.same
    context.exit(int(not same))


def agreed(question: str) -> bool:
    """Ask on stderr; an end of the input is a no."""
    try:
        return click.confirm(question, err=True)
    except click.Abort:
        click.echo(err=True)
        return False


@main.command()
@click.argument("run")
@click.option("--num-devices", help="In place of the recorded number: auto or a number.")
@click.option("--require", type=click.Choice(["bitwise", "tolerance"]), help="Exit with 1 if the verdict is worse.")
@click.option("--yes", is_flag=True, help="Do not ask before the recorded code is run.")
@click.option("--json", "as_json", is_flag=True, help="The verdict as JSON.")
@click.pass_context
def reproduce(
    context: click.Context, run: str, num_devices: str | None, require: Require | None, yes: bool, as_json: bool
) -> None:
    """Train a RUN of MLflow again from its commit, patch and params, and say whether it is the same.

    RUN is the id of a training. It is trained in a git worktree of its own, and the verdict is logged to MLflow. By
    default an exact run has to be bitwise the same, and a fast one within tolerance.

    \b
    Examples:
      samebits reproduce 0f3c9a8e7b6d5c4f3a2b1c0d9e8f7a6b
      samebits reproduce 0f3c9a8e7b6d5c4f3a2b1c0d9e8f7a6b --num-devices 4 --yes
    """
    from samebits import reproduce as again
    from samebits.tracking.fetch import fetch_run
    from samebits.tracking.reproduction import log_reproduction
    from samebits.verdict import compare_runs, meets, say

    with tempfile.TemporaryDirectory(prefix="samebits-") as folder:
        scratch = Path(folder)
        original = scratch / "original"
        original.mkdir()
        found = again.recorded(run, fetch_run(run, original))
        click.echo("\n".join(found.describe()), err=True)
        if not yes and not agreed("run it?"):
            raise UserError("nothing was run", hint="answer y, or give --yes")
        with again.worktree(found, scratch) as tree:
            made = again.train_again(found, tree, scratch / "again", num_devices=num_devices)
            comparison = compare_runs(found.run, made)
            log_reproduction(run, made, comparison, again.as_json(found, made, comparison))
    click.echo(again.as_json(found, made, comparison) if as_json else say(comparison))
    required = require or ("bitwise" if found.run.record["numerics"] == "exact" else "tolerance")
    context.exit(int(not meets(comparison["grade"], required)))


main.add_command(container)


@main.group()
def track() -> None:
    """Deliver local logs to MLflow."""


@track.command()
def sync() -> None:
    """Deliver every log that MLflow does not have whole.

    Needed where a server was away for longer than the sender waits, and no training was started since. Runs that
    have begun nowhere go to the store that MLFLOW_TRACKING_URI names now.

    \b
    Example:
      MLFLOW_TRACKING_URI=http://mlflow.example:5000 samebits track sync
    """
    from samebits.tracking.delivery import sync as deliver

    require_repository()
    count, problems = deliver()
    if count or not problems:
        click.echo(f"{count} {'log' if count == 1 else 'logs'} delivered" if count else "nothing is left to deliver")
    for log, problem in problems.items():
        click.echo(f"{log}: {problem}", err=True)
    if problems:
        raise HostError(f"{len(problems)} could not be delivered", hint="see above; is MLFLOW_TRACKING_URI right?")
