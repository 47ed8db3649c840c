"""Write the files that follow from the code: dvc.yaml, .gitignore, ``MADE`` in the Makefile, pages of the reference.

    python tools/generate.py

A test fails where one of them is stale.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.append(str(Path(__file__).resolve().parent))  # under -P Python leaves it out

import reference_pages
from count_imports import closure, files_of
from pages import between
from samebits.params import Params
from samebits.records.run import run_name
from stage_scripts import stages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from samebits.stages.interface import StageSpec

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src/samebits"
_WIDTH = 120

EXPERIMENTS = (Path(), Path("gpu"))
"""Folders of the experiments, each with its params.yaml and with the same stages in its dvc.yaml."""

AROUND_A_STAGE = {"stages", "errors", "remarks", "results", "tracking", "engines", "__init__"}
"""Rooms whose code changes no result of a training: command line, messages, delivery, place of execution.

DVC follows the image through ``host.json``. tests/records/test_schemas.py guards the shape of the remarks that a
record keeps.
"""

WORDS = {"results", "remarks", "errors"}
"""Those of them whose words are results of a stage that writes words."""


# -- dvc.yaml -----------------------------------------------------------------------------------------------------


def code_of(stage: str, spec: StageSpec) -> list[str]:
    """The stage's module and the rooms whose code can change its result."""
    files, module = files_of(SRC), SRC / "stages" / f"{stage}.py"
    around = AROUND_A_STAGE - (WORDS if spec.writes_words else set())
    reached = {file.relative_to(SRC).parts[0] for file in closure(module, files) if file.is_relative_to(SRC)}
    rooms = sorted(room for room in reached if room.removesuffix(".py") not in around)
    return [*(f"src/samebits/{room}" for room in rooms), f"src/samebits/stages/{stage}.py"]


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


def _stage(name: str, spec: StageSpec, folder: Path) -> Iterator[str]:
    def inside(paths: Iterable[str]) -> list[str]:
        return [str(folder / path) for path in paths]

    yield f"  {name}:"
    yield f"    desc: {spec.about}"
    options = "".join(f" --{option} ${{item.{option}}}" for option in spec.matrix)
    if spec.matrix:
        yield "    matrix:"
        yield from (f"      {option}: ${{{key}}}" for option, key in spec.matrix.items())
    at = "" if folder == Path() else f" --folder {folder}"
    yield f"    cmd: python -P pipeline/{name}.py{at}{options}"
    if at:
        yield f"    wdir: {os.path.relpath('.', folder)}"  # of the code, and of a user's model and data
    if spec.always:
        yield "    always_changed: true"
    else:
        yield from _entry("deps", [*inside(spec.reads), *code_of(name, spec)], block=True)
    if spec.params:
        yield from _params(folder, spec.params)
    yield from _entry("outs", inside(spec.writes))
    if spec.metrics:
        yield from _entry("metrics", inside(spec.metrics), block=True)


def _plot(title: str, template: str, x: str, files: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield f"  - {title}:"
    yield f"      template: {template}"
    yield f"      x: {x}"
    yield "      y:"
    yield from (f"        {file}: {column}" for file, column in files)


def dvc_yaml(folder: Path = Path()) -> str:
    """The pipeline of the experiment in ``folder``, with metrics and plots of the runs of the default params."""
    train = Params().train
    lines = ["# Written by `python tools/generate.py`.", "stages:"]
    for name, command in stages().items():
        lines += [*_stage(name, command.spec, folder), ""]
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


# -- lists of the files of the stages ---------------------------------------------------------------------------


def _made() -> list[str]:
    """Files and folders of the experiments that the stages write."""
    names = {file.partition("/")[0] for command in stages().values() for file in command.spec.files}
    return sorted(str(folder / name) for folder in EXPERIMENTS for name in names)


def gitignore() -> str:
    """The file with the stages' outputs between its marks."""
    kept = [f"/{name}{'' if '.' in name else '/'}" for name in _made()]
    return between("# what the stages write\n", "# end\n", "\n".join(kept) + "\n", (ROOT / ".gitignore").read_text())


def makefile() -> str:
    """The file with the stages' outputs in ``MADE``, which ``make clean`` removes."""
    text = (ROOT / "Makefile").read_text()
    return re.sub(r"^MADE := .*$", f"MADE := {' '.join(_made())}", text, flags=re.MULTILINE)


FILES: dict[str, Callable[[], str]] = {
    **{str(folder / "dvc.yaml"): partial(dvc_yaml, folder) for folder in EXPERIMENTS},
    ".gitignore": gitignore,
    "Makefile": makefile,
    **{f"docs/reference/{name}": page for name, page in reference_pages.PAGES.items()},
}
"""Text of each written file by its path."""


if __name__ == "__main__":
    for path, content in FILES.items():
        (ROOT / path).write_text(content(), encoding="utf-8")
