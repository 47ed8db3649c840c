"""Write what follows from the code: stages' scripts, dvc.yaml, .gitignore, ``MADE`` in the Makefile, the reference.

    python tools/generate.py

A test fails where one of them is stale.
"""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.append(str(Path(__file__).resolve().parent))  # under -P Python leaves it out

import reference_pages
from count_imports import closure, files_of
from pages import between
from samebits.stages import pipeline
from samebits.stages.init import template

if TYPE_CHECKING:
    from collections.abc import Callable

    from samebits.stages.interface import StageSpec

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src/samebits"

EXPERIMENTS = (Path(), Path("gpu"))
"""Folders of the experiments, each with its params.yaml and with the same stages in its dvc.yaml."""

AROUND_A_STAGE = {"stages", "here", "errors", "remarks", "results", "tracking", "engines", "__init__"}
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


def dvc_yaml(folder: Path = Path()) -> str:
    """The pipeline of the experiment in ``folder``, by the scripts of this repository."""
    head = "Written by `python tools/generate.py`."
    return pipeline.pipeline_yaml(head, lambda name: f"python -P pipeline/{name}.py", code_of, folder)


def script(name: str) -> str:
    """The thin form of a stage, which needs no installed command."""
    return f'''"""Stage {name}, whose code is in the library. Written by `python tools/generate.py`."""

from samebits.errors import exit_on_error

if __name__ == "__main__":
    with exit_on_error():  # also the imports
        from samebits.stages.{name} import main

        main()
'''


# -- lists of the files of the stages ---------------------------------------------------------------------------


def _made() -> list[str]:
    """Files and folders of the experiments that the stages write."""
    return sorted(str(folder / name) for folder in EXPERIMENTS for name in pipeline.made_by_stages())


def gitignore() -> str:
    """The file with the stages' outputs between its marks."""
    kept = [f"/{name}{'' if '.' in name else '/'}" for name in _made()]
    return between("# what the stages write\n", "# end\n", "\n".join(kept) + "\n", (ROOT / ".gitignore").read_text())


def makefile() -> str:
    """The file with the stages' outputs in ``MADE``, which ``make clean`` removes."""
    text = (ROOT / "Makefile").read_text()
    return re.sub(r"^MADE := .*$", f"MADE := {' '.join(_made())}", text, flags=re.MULTILINE)


def params_of_init() -> str:
    """The params.yaml that `samebits init` writes: ours, with the model of its experiment.py."""
    text = (ROOT / "params.yaml").read_text()
    for ours, theirs in (
        ("  name: mlp             ", "  name: experiment:make "),
        ("  kwargs: {}\n  source", "  kwargs: {width: 256}        # what your factory is called with\n  source"),
    ):
        assert text.count(ours) == 1, ours
        text = text.replace(ours, theirs)
    return text


FILES: dict[str, Callable[[], str]] = {
    **{f"pipeline/{name}.py": partial(script, name) for name in pipeline.STAGES},
    **{str(folder / "dvc.yaml"): partial(dvc_yaml, folder) for folder in EXPERIMENTS},
    ".dvc/plots/stacked_bars.json": partial(template, "stacked_bars.json"),
    "src/samebits/stages/templates/params.yaml": params_of_init,
    ".gitignore": gitignore,
    "Makefile": makefile,
    **{f"docs/reference/{name}": page for name, page in reference_pages.PAGES.items()},
}
"""Text of each written file by its path."""


if __name__ == "__main__":
    for path, content in FILES.items():
        (ROOT / path).write_text(content(), encoding="utf-8")
