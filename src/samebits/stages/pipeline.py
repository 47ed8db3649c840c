"""The stages in their order, as subcommands of ``samebits stage`` and as DVC's stages in ``dvc.yaml``."""

from __future__ import annotations

import itertools
import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import click

from samebits.params import Params
from samebits.records.run import run_name
from samebits.stages.interface import StageCommand

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from samebits.stages.interface import StageSpec

STAGES = ("host", "prepare", "train", "evaluate", "compare")
"""Names of the stages, each that of its module here, in the order of execution."""

_WIDTH = 120


def stage_named(name: str) -> StageCommand:
    """The command of a stage. Its module is imported now, because a stage needs no other's libraries."""
    command = import_module(f"samebits.stages.{name}").main
    assert isinstance(command, StageCommand)
    return command


def stages() -> dict[str, StageCommand]:
    """The command of each stage by its name, in the order of execution."""
    return {name: stage_named(name) for name in STAGES}


class StageGroup(click.Group):
    """The stages as subcommands."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """The names in the order of execution."""
        return [*STAGES]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - the same
        """The command of that name."""
        return stage_named(cmd_name) if cmd_name in STAGES else None


def made_by_stages() -> list[str]:
    """Files and folders at the top of an experiment's folder that the stages write."""
    return sorted({file.partition("/")[0] for command in stages().values() for file in command.spec.files})


def pipeline_yaml(
    head: str,
    call: Callable[[str], str],
    code: Callable[[str, StageSpec], Sequence[str]] = lambda *_: (),
    folder: Path = Path(),
) -> str:
    """The pipeline of the experiment in ``folder``, with metrics and plots of the runs of the default params.

    ``call`` gives the command of a stage, and ``code`` the source files that it depends on. ``head`` is a comment.
    """
    train = Params().train
    lines = [f"# {head}", "stages:"]
    for name, command in stages().items():
        lines += [*_stage(name, command.spec, call(name), code, folder), ""]
    runs = {numerics: [run_name(strategy, numerics) for strategy in train.strategies] for numerics in train.numerics}
    lines.append("metrics:")
    lines += [f"  - reports/evaluation/{run}.json" for run in itertools.chain.from_iterable(runs.values())]
    lines += ["", "plots:"]
    for title, x, file, column in (
        ("loss at each step", "step", "runs/{}/losses.csv", "loss"),
        ("loss over time", "seconds", "reports/curves/{}.csv", "loss"),
        ("time of a step", "milliseconds", "reports/step_times/{}.csv", "percent_of_steps"),
    ):
        for numerics, names in runs.items():
            files = [(file.format(run), column) for run in names]
            lines += _plot(f"{title} in {numerics}", "linear", x, files)
    lines += _plot("speed-up over single", "scatter", "devices", [("reports/speedups.csv", "[speedup, bound]")])
    lines += _plot("where a step goes", "stacked_bars", "milliseconds", [("reports/breakdown.csv", "run")])
    return "\n".join(lines) + "\n"


def _stage(
    name: str, spec: StageSpec, call: str, code: Callable[[str, StageSpec], Sequence[str]], folder: Path
) -> Iterator[str]:
    def inside(paths: Iterable[str]) -> list[str]:
        return [str(folder / path) for path in paths]

    yield f"  {name}:"
    yield f"    desc: {spec.about}"
    options = "".join(f" --{option} ${{item.{option}}}" for option in spec.matrix)
    if spec.matrix:
        yield "    matrix:"
        yield from (f"      {option}: ${{{key}}}" for option, key in spec.matrix.items())
    at = "" if folder == Path() else f" --folder {folder}"
    yield f"    cmd: {call}{at}{options}"
    if at:
        yield f"    wdir: {os.path.relpath('.', folder)}"  # of the code, and of a user's model and data
    if spec.always:
        yield "    always_changed: true"
    else:
        yield from _entry("deps", [*inside(spec.reads), *code(name, spec)], block=True)
    if spec.params:
        yield from _params(folder, spec.params)
    yield from _entry("outs", inside(spec.writes))
    if spec.metrics:
        yield from _entry("metrics", inside(spec.metrics), block=True)


def _entry(key: str, values: Sequence[str], *, block: bool = False) -> Iterator[str]:
    line = f"    {key}: [{', '.join(values)}]"
    if len(line) <= _WIDTH and not block:
        yield line
    else:
        yield f"    {key}:"
        yield from (f"      - {value}" for value in values)


def _params(folder: Path, keys: Sequence[str]) -> Iterator[str]:
    if folder == Path():
        yield from _entry("params", keys)
    else:
        yield "    params:"
        yield f"      - {folder}/params.yaml:"
        yield from (f"          - {key}" for key in keys)


def _plot(title: str, template: str, x: str, files: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield f"  - {title}:"
    yield f"      template: {template}"
    yield f"      x: {x}"
    yield "      y:"
    yield from (f"        {file}: {column}" for file, column in files)
