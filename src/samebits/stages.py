"""What the stages' scripts share: their options, the container that they may run in, and their exit codes."""

from __future__ import annotations

import functools
import gc
import io
import os
import runpy
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from samebits.errors import UserError, WithHint, WorkerError, counted, exit_on_error, printable, without_password
from samebits.host import caution, count_visible, torch_build
from samebits.models import UserModel
from samebits.params import load_params

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

HELP_OPTIONS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""Settings of every click command."""


class _Ending(click.Command):
    """Ends as stages do also while options are read, where click would say "Aborted!" or repeat control characters."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run it, and end with its exit code."""
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
            except Exception:  # noqa: BLE001 - a bug: Python would end with 1, which a verdict does
                sys.stderr.write(without_password(traceback.format_exc()))
                sys.exit(WorkerError.exit_code)
        sys.exit(code if isinstance(code, int) else 0)


class Group(_Ending, click.Group):
    """The command ``samebits``, or another one of several."""


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """What DVC is told of a stage, beside the code that its script imports.

    ``reads`` and ``writes`` are files and folders, ``metrics`` files that it writes too; ``params`` are keys, and the
    values of those in ``matrix`` are given to options one by one.
    """

    about: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...]
    metrics: tuple[str, ...] = ()
    params: tuple[str, ...] = ()
    matrix: Mapping[str, str] = field(default_factory=dict)
    always: bool = False
    """It runs each time, since DVC cannot see what it reads."""
    writes_words: bool = False
    """Sentences are its result, so that it depends on those who write them."""

    @property
    def files(self) -> tuple[str, ...]:
        """All that it writes."""
        return self.writes + self.metrics


class StageCommand(_Ending):
    """The command line of a stage, and what DVC is told of it."""

    spec: StageSpec


def stage(spec: StageSpec) -> Callable[[Callable[..., None]], StageCommand]:
    """Make a function the command line of a stage: it is called with ``params``, and with its own options.

    The command takes ``--params`` and ``--debug``, goes on in the image where stages run there, and ends with the exit
    code of ``samebits.errors``. Its help is the module's docstring. Put it above the function's own ``click.option``s.
    """

    def decorate(function: Callable[..., None]) -> StageCommand:
        @functools.wraps(function)
        def run(params_file: str, debug: bool, **options: Any) -> None:
            with exit_on_error(debug=debug):
                # What they import takes time, and --help needs none of it.
                from samebits.engines.launch import ending_told, hand_over
                from samebits.engines.stage import delivered, enter

                _hold_hash_seed(params_file)
                gc.disable()  # it walks through all of torch, again and again, for seconds; workers have their own
                with ending_told(os.environ), delivered(os.environ):
                    if hand_over(sys.argv, options.get("strategy"), os.environ):
                        return
                    enter(sys.argv)
                    function(load_params(params_file), **options)

        told = sys.modules[function.__module__].__doc__
        command = click.command(cls=StageCommand, help=told, context_settings=HELP_OPTIONS)(run)
        command.params += [
            click.Option(
                ["--params", "params_file"], default="params.yaml", show_default=True, help="Parameters to read."
            ),
            click.Option(["--debug"], is_flag=True, help="Show tracebacks."),
        ]
        command.spec = spec
        return command

    return decorate


def _hold_hash_seed(params_file: str) -> None:
    """Begin again where a user's model could see sets in another order each time: Python asks for the seed but once."""
    if not sys.flags.hash_randomization:
        return
    with suppress(UserError):  # which the stage itself says
        if isinstance(load_params(params_file).model, UserModel):
            os.environ["PYTHONHASHSEED"] = "0"
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - itself


def options_of(script: str, arguments: Sequence[str]) -> dict[str, Any]:
    """What a stage's script of this repository reads from its arguments, by parameter; it does not run.

    Raises:
        UserError: the script is not here.
        click.UsageError: it would refuse them.
    """
    if not Path(script).is_file():
        raise UserError(f"{Path.cwd()} has no {script}", hint="run this at the root of the repository")
    command: click.Command = runpy.run_path(script)["main"]
    return command.make_context(f"python {script}", list(arguments)).params


def say_what_stays_unused() -> None:
    """Say on stderr which of this host's GPUs trainings pass over, and what to do, before the first of them begins.

    As where an environment was installed on a login node without a GPU.
    """
    lines = [noted] if (noted := caution()) else []
    build, gpus = torch_build(), count_visible()
    if gpus and build.version and not build.cuda:
        text = f"torch {build.version} is a CPU build, and the driver shows {counted(gpus, 'GPU')}"
        lines.append(
            (f"{text}: trainings run on the CPU", "make repro TORCH=gpu, or set CUDA_VISIBLE_DEVICES= to agree")
        )
    for text, hint in lines:
        sys.stderr.write(f"warning: {text}. hint: {hint}\n")
