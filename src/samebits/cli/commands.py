"""The ``samebits`` command."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from samebits import __version__
from samebits.engines.command import container
from samebits.errors import UserError, exit_on_error, printable_lines
from samebits.files import scratch_folder
from samebits.here import CLI, stage_command
from samebits.params import load_params, require_repository
from samebits.results.scaling.command import scale
from samebits.stages.interface import HELP_OPTIONS, Group, folder_option, params_option
from samebits.stages.pipeline import StageGroup
from samebits.strategies import STRATEGIES
from samebits.tracking.command import compare, explain, track

if TYPE_CHECKING:
    from samebits.engines.launch import Engine
    from samebits.engines.settings import Kind
    from samebits.host.cluster_environment import Nodes
    from samebits.results.verdict import Require


@click.group(cls=Group, context_settings=HELP_OPTIONS)
@click.version_option(__version__)
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.pass_context
def main(context: click.Context, debug: bool) -> None:
    """Measure what DataParallel and DistributedDataParallel buy on this host, and whether it is the same model.

    Results go to stdout, messages to stderr. Exit codes: 0 done, 1 the verdict is worse than asked for, 2 the input is
    wrong, 3 this host cannot do it, 4 a worker failed, 130, 143 and 129 after Ctrl-C, SIGTERM and a lost terminal.
    """
    context.with_resource(exit_on_error(debug=debug))


@main.command()
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=5000,
    show_default=True,
    help="Where to answer, on this host alone.",
)
def ui(port: int) -> None:
    """Serve MLflow's pages over the runs of this repository.

    The address that is printed once the server answers opens a view with the columns and charts that a comparison
    needs.

    \b
    Examples:
      samebits ui
      samebits ui --port 5001
    """
    from samebits.tracking.ui import serve

    require_repository()
    serve(port)


@main.command(context_settings={"ignore_unknown_options": True})
@folder_option
@click.argument("dvc_options", nargs=-1, type=click.UNPROCESSED)
def repro(folder: str, dvc_options: tuple[str, ...]) -> None:
    """Run the pipeline by `dvc repro`, with a line for each stage and the answers at the end.

    What DVC and the stages write is in .samebits/repro.log. Options of `dvc repro` are passed on to it, and its exit
    code is that of this command.

    \b
    Example:
      samebits repro --force
    """
    from samebits.stages.repro import answer

    click.get_current_context().exit(answer(Path(folder), dvc_options))


@main.command(short_help="Make the report again from comparison.json.")
@click.argument("comparison", required=False)
@click.option("--out-dir", help="Folder to write.  [default: that of COMPARISON]")
@click.option("--against", help="Another comparison.json: the page says what changed since.")
@click.option("-v", "--verbose", is_flag=True, help="Print the answers and the notes as well.")
def report(comparison: str | None, out_dir: str | None, against: str | None, verbose: bool) -> None:
    """Make the page, the plots and the table again from a COMPARISON, reports/comparison.json by default.

    Nothing else is read, so that a report can be made where nothing was trained. Without COMPARISON it must be of
    params.yaml as it is now.

    \b
    Examples:
      samebits report
      samebits report downloads/comparison.json --out-dir /tmp/report
      samebits report --against last-week/comparison.json
    """
    from samebits.results.comparison import Comparison
    from samebits.results.current import require_current
    from samebits.results.page.write import write_report
    from samebits.results.terminal import show

    path = Path(comparison or "reports/comparison.json")
    folder = Path(out_dir or path.parent)
    found = Comparison.read(path, made_by=stage_command("compare"))
    if comparison is None and Path("params.yaml").exists():
        require_current(found.params, path, load_params("params.yaml"))
    before = Comparison.read(Path(against), made_by=stage_command("compare")) if against else None
    write_report(found, folder, before)
    if verbose:
        show(found, folder, verbose=True)
    else:
        click.echo(folder / "index.html")


@main.command()
@click.option("--model", "with_model", is_flag=True, help="Also make two steps of the model under each strategy.")
@click.option("--checkpoint", type=click.Path(path_type=Path), help="A safetensors file to try on the model; --model.")
@click.option("--memory", "with_memory", is_flag=True, help="Also find the largest global batch that fits.")
@click.option(
    "--memory-gib", type=click.FloatRange(min=0.0, max=2**20), help="On devices with so much, in place of what is free."
)
@click.option("--nodes", "over_nodes", is_flag=True, help="Of all machines, on each of which this is started.")
@folder_option
@params_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(
    with_model: bool,
    checkpoint: Path | None,
    with_memory: bool,
    memory_gib: float | None,
    over_nodes: bool,
    folder: str,
    params_file: str,
    as_json: bool,
) -> None:
    """Tell what this host, this repository and the model lack for a training, and what to do about it.

    With --nodes, the machines of a Slurm allocation, or those of torchrun's variables, meet. The first one prints the
    lines of all beside each other, what differs between them, and how fast each pair of them talks.

    With --memory, the largest batch is forecast from small ones, and then tried, for each strategy of params.yaml.

    Exit codes: 0 nothing failed; 2 params.yaml or the model is wrong; 3 the host or its software is; 4 a trial failed.

    \b
    Examples:
      samebits doctor
      samebits doctor --model --json
      samebits doctor --folder gpu
      samebits doctor --checkpoint runs/ddp-fast/model.safetensors
      samebits doctor --memory --memory-gib 24
      salloc --nodes=2 samebits doctor --nodes
    """
    from samebits.doctor.checks import visit
    from samebits.engines.exit_reports import ending_told
    from samebits.engines.launch import run_in_allocation
    from samebits.numerics.environment import prepare_environment

    with_model = with_model or checkpoint is not None
    if memory_gib is not None and math.isnan(memory_gib):
        raise click.BadParameter("nan is no size", param_hint="'--memory-gib'")
    with_memory = with_memory or memory_gib is not None
    if over_nodes and (with_model or with_memory):
        option = "--model" if with_model else "--memory"
        raise UserError(f"--nodes and {option}: each has a look of its own", hint="give one of them at a time")
    if over_nodes and run_in_allocation([*CLI, *sys.argv[1:]], os.environ):
        return
    with ending_told(os.environ):
        nodes = _several_nodes() if over_nodes else None
        prepare_environment()
        visit(
            Path(params_file),
            data_dir=Path(folder) / "data",
            with_model=with_model,
            checkpoint=checkpoint,
            as_json=as_json,
            nodes=nodes,
            with_memory=with_memory,
            limit=None if memory_gib is None else int(memory_gib * 2**30),
        )


def _several_nodes() -> Nodes:
    """The machines that the command was started on. Raises UserError: there is only one."""
    from samebits.host.cluster_environment import find_nodes

    nodes = find_nodes()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # we report problems of joining machines ourselves
    if not nodes.several:
        hint = "salloc --nodes=2 samebits doctor --nodes, or set PET_NNODES and the like on each machine"
        raise UserError("--nodes: this was started on one machine alone", hint=hint)
    return nodes


@main.command()
@click.option("--strategy", "only", type=click.Choice([*STRATEGIES]), help="This one alone.")
@click.option("--num-devices", help="In place of train.num_devices: auto or a number.")
@click.option("--quick", is_flag=True, help="The first steps alone, compared with the losses in runs/.")
@folder_option
@params_option
@click.pass_context
def verify(
    context: click.Context, only: str | None, num_devices: str | None, quick: bool, folder: str, params_file: str
) -> None:
    """Train the exact runs again and compare their bits with dvc.lock.

    The workspace is not touched. One line for the data and for each run; exit code 0 only if all are bitwise the same.

    \b
    Examples:
      samebits verify
      samebits verify --strategy ddp --num-devices 4
      samebits verify --quick
      samebits verify --folder gpu
    """
    from samebits.params import with_num_devices
    from samebits.results import verify as results
    from samebits.results.lines import working
    from samebits.results.lock import LOCK

    require_repository()
    params = with_num_devices(load_params(params_file), num_devices, "exact")
    strategies = [strategy for strategy in params.train.strategies if only in (None, strategy)]
    if not strategies:
        raise UserError(f"--strategy: {only} is not in train.strategies", hint="choose one that is")
    there = (Path(folder) / LOCK).exists()  # else the error alone is said, below
    for remark in results.stale(strategies, Path(folder)) if there else ():
        click.echo(remark, err=True)
    same = True
    with scratch_folder(Path(".samebits")) as scratch, working("training again"):  # a container sees the folder too
        for verified in results.verify(params, strategies, scratch, folder=Path(folder), quick=quick):
            click.echo(verified.text)
            same = same and verified.same
    context.exit(int(not same))


def agreed(question: str) -> bool:
    """Ask on stderr. The end of the input counts as a no."""
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
    from samebits.results.verdict import meets
    from samebits.results.verdict_text import say_comparison
    from samebits.tracking.reproduce import reproduce as train_again

    def confirm(what: str) -> bool:
        click.echo(what, err=True)
        return yes or agreed("run it?")

    require_repository()
    with scratch_folder(Path(".samebits")) as folder:
        reproduction = train_again(run, folder, num_devices=num_devices, confirm=confirm)
    verdict = reproduction.verdict
    click.echo(
        reproduction.as_json() if as_json else printable_lines(say_comparison(verdict, reproduction.differences))
    )
    required = require or ("bitwise" if reproduction.original.record.numerics == "exact" else "tolerance")
    context.exit(int(not meets(verdict.grade, required)))


@main.command(
    "launch", context_settings={"allow_interspersed_args": False}, short_help="Train on a cluster's machines."
)
@click.option("--dry-run", is_flag=True, help="Print what would be started, and start nothing.")
@click.option("--nodes", type=click.IntRange(min=1), help="Machines, in place of nodes in cluster.toml.")
@click.option("--kind", type=click.Choice(["Job", "TrainJob"]), help="For Kubernetes, in place of kind there.")
@click.argument("engine", type=click.Choice(["slurm", "kubernetes"]))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def launch_training(
    engine: Engine, arguments: tuple[str, ...], dry_run: bool, nodes: int | None, kind: Kind | None
) -> None:
    """Run a training on the machines of a cluster.

    ARGUMENTS are those of stage train; what stands before ENGINE is for the launch. Slurm is waited for, and the
    exit code is the training's. For kubernetes there is --dry-run alone, which prints a Job or a TrainJob.
    cluster.toml says what the cluster wants to know: see the guide of several machines.

    \b
    Examples:
      samebits launch slurm --strategy ddp --numerics exact
      samebits launch --dry-run --nodes 4 slurm --strategy ddp
      samebits launch --dry-run kubernetes --strategy ddp | kubectl apply -f -
    """
    from samebits.engines.launch import TrainingCall, launch
    from samebits.stages.train import main as train

    require_repository()
    training = TrainingCall.of(arguments, train.make_context(stage_command("train"), list(arguments)).params)
    text = launch(engine, training, nodes=nodes, kind=kind, dry_run=dry_run, environ=os.environ)
    click.echo(text, nl=False)


@main.command()
def init() -> None:
    """Make an experiment of this folder: params.yaml, dvc.yaml, and experiment.py with a model to replace by yours.

    `dvc repro` then trains it and prints the answers. No file of yours is overwritten: .gitignore and .dvcignore get
    lines between marks, and `dvc init` runs where it has not. The names of the written files are printed.

    \b
    Example:
      git init my-experiment && cd my-experiment && samebits init
      git add --all && git commit --message "An experiment" && dvc repro
    """
    from samebits.stages.init import init as write_files

    for name in write_files():
        click.echo(name)
    click.echo("next: commit these files, run `dvc repro`, and commit dvc.lock", err=True)


@main.group(cls=StageGroup)
def stage() -> None:
    """Run one stage of the pipeline, as `dvc repro` does."""


for command in (container, compare, explain, scale, track):
    main.add_command(command)
