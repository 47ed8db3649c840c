"""Shared by the stages: their options, their container, and their exit codes."""

from __future__ import annotations

import functools
import gc
import io
import os
import re
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from samebits.errors import UserError, WithHint, WorkerError, counted, exit_on_error, printable, without_password
from samebits.here import CLI, torch_command
from samebits.host import caution, count_visible, torch_build
from samebits.host.software import rocm_unused
from samebits.host.torch_names import require_torch_names
from samebits.models import UserModel
from samebits.params import load_params

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

HELP_OPTIONS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""Settings of every click command."""


class _Ending(click.Command):
    """Ends as stages do, also on wrong options, where click would say "Aborted!" or repeat control characters."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the command, and end with its exit code."""
        with exit_on_error():
            try:
                code = super().main(*args, **{**extra, "standalone_mode": False})
            except click.ClickException as error:
                text = io.StringIO()
                error.show(text)
                click.echo("\n".join(map(printable, text.getvalue().splitlines())), err=True)
                sys.exit(error.exit_code)
            except click.Abort:
                raise KeyboardInterrupt from None
            except (WithHint, MemoryError):
                raise
            except Exception as error:  # noqa: BLE001 - a bug; Python's own exit code 1 stands for a verdict
                if isinstance(error, ImportError | AttributeError) and "torch" in sys.modules:
                    require_torch_names()  # an error that names what this PyTorch lacks
                sys.stderr.write(without_password(traceback.format_exc()))
                sys.exit(WorkerError.exit_code)
        sys.exit(code if isinstance(code, int) else 0)


class Group(_Ending, click.Group):
    """A command with subcommands, such as ``samebits``."""


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """DVC's description of a stage, without the code that its script imports.

    ``reads`` and ``writes`` are files and folders in the experiment's folder; ``metrics`` are further files that it
    writes. ``params`` are keys. The stage runs for each value of the keys in ``matrix``, which its options take.
    """

    about: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...]
    metrics: tuple[str, ...] = ()
    params: tuple[str, ...] = ()
    matrix: Mapping[str, str] = field(default_factory=dict)
    always: bool = False
    """The stage runs every time, since DVC cannot see its inputs."""
    writes_words: bool = False
    """The result contains sentences, so that it depends on the code that writes them."""

    @property
    def files(self) -> tuple[str, ...]:
        """All files and folders that it writes."""
        return self.writes + self.metrics


class StageCommand(_Ending):
    """The command line of a stage, and its description for DVC."""

    spec: StageSpec

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help, whose examples call the stage as this call did: as a command, or by its script."""
        text = self.help or ""
        if "stage" not in ctx.command_path.split():
            text = re.sub(r"samebits stage (\w+)", r"python pipeline/\1.py", text)
        click.Command(self.name, help=text).format_help_text(ctx, formatter)


def experiment_folder() -> Path:
    """The value of ``--folder``: the folder of params.yaml, of the data, the runs and the reports."""
    return Path(click.get_current_context().params["folder"])


def path_option(*names: str, default: str, told: str) -> Callable[[Any], Any]:
    """An option for a path, by default ``default`` in the experiment's folder."""
    told = f"{told}  [default: FOLDER/{default}]"
    return click.option(*names, default=lambda: str(experiment_folder() / default), help=told)


folder_option = click.option(
    "--folder", default=".", show_default=True, is_eager=True, help="Folder of params.yaml, data, runs and reports."
)
"""The option that decides where an experiment lies. It is read first, because others' defaults depend on it."""
params_option = path_option("--params", "params_file", default="params.yaml", told="Parameters to read.")


def stage(spec: StageSpec) -> Callable[[Callable[..., None]], StageCommand]:
    """Make a function the command of a stage. The function gets ``params`` and its own options.

    The command takes ``--folder``, ``--params`` and ``--debug``, continues in the image if stages run there, and ends
    with an exit code of ``samebits.errors``. Its help is the module's docstring. Put it above the function's own
    ``click.option``s.
    """

    def decorate(function: Callable[..., None]) -> StageCommand:
        @functools.wraps(function)
        def run(folder: str, params_file: str, debug: bool, **options: Any) -> None:  # noqa: ARG001 - of the context
            with exit_on_error(debug=debug):
                # These imports take time, and --help does not need them.
                from samebits.engines.exit_reports import ending_told
                from samebits.engines.launch import hand_over
                from samebits.engines.stage import delivered, enter

                _hold_hash_seed(params_file)
                arguments = _own_arguments()
                gc.disable()  # it walks through all of torch for seconds; workers have their own
                with ending_told(os.environ), delivered(os.environ):
                    if hand_over(arguments, options.get("strategy"), os.environ):
                        return
                    enter(arguments)
                    function(load_params(params_file), **options)

        told = sys.modules[function.__module__].__doc__
        named = {"help": told, "short_help": f"{spec.about[0].upper()}{spec.about[1:]}."}
        command = click.command(cls=StageCommand, context_settings=HELP_OPTIONS, **named)(run)
        for option in (folder_option, params_option, click.option("--debug", is_flag=True, help="Show tracebacks.")):
            option(command)
        command.spec = spec
        return command

    return decorate


def _own_arguments() -> list[str]:
    """Python's arguments, behind ``-P``, that run this stage elsewhere as it was called here."""
    script = click.get_current_context().parent is None
    return sys.argv if script else [*CLI, *sys.argv[1:]]


def _hold_hash_seed(params_file: str) -> None:
    """Restart Python with a fixed hash seed for a user's model, whose sets would have another order in each run."""
    if not sys.flags.hash_randomization:
        return
    with suppress(UserError):  # the stage itself reports it
        if isinstance(load_params(params_file).model, UserModel):
            os.environ["PYTHONHASHSEED"] = "0"
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - itself


def say_what_stays_unused() -> None:
    """Warn on stderr, before the first training, of GPUs of this host that trainings will not use.

    One cause is an environment that was installed on a login node without a GPU.
    """
    lines = [noted] if (noted := caution()) else []
    build, gpus = torch_build(), count_visible()
    if unused := rocm_unused(build):
        lines.append(unused)
    elif gpus and build.version and not build.cuda:
        text = f"torch {build.version} is a CPU build, and the driver shows {counted(gpus, 'GPU')}"
        lines.append(
            (f"{text}: trainings run on the CPU", f"{torch_command('gpu')}, or set CUDA_VISIBLE_DEVICES= to agree")
        )
    for text, hint in lines:
        sys.stderr.write(f"warning: {text}. hint: {hint}\n")
