"""Whose repository this folder is, the kit's own or a user's, and what a stage and other commands are called in it."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

CLI = ("-m", "samebits.cli")
"""Python's arguments, behind ``-P``, that run the installed command."""

TOLD = "SAMEBITS_PLACE_TOLD"
"""Variable of a stage behind another, which has said where both run."""

_EXPERIMENTS = ".dvc/tmp/exps"  # folder of clones in which DVC runs queued experiments, and which it then removes


def is_kit(root: Path = Path()) -> bool:
    """Whether a folder is the root of the kit's own repository, whose sources then run in place of installed ones."""
    return (root / "src" / "samebits").is_dir()


def runs_sources(tree: Path) -> bool:
    """Whether stages in a tree of this repository run its sources. A patched tree does not say so by itself."""
    return is_kit() and is_kit(tree)


def call_of(stage: str, root: Path = Path()) -> list[str]:
    """Python's arguments, behind ``-P``, that run a stage in ``root``: its script there, or the installed library."""
    return [f"pipeline/{stage}.py"] if runs_sources(root) else [*CLI, "stage", stage]


def process_of(stage: str, root: Path = Path()) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of a process that runs a stage in ``root``, with the code of that tree."""
    sources = {"PYTHONPATH": str(root / "src")} if runs_sources(root) else {}
    return [sys.executable, "-P", *call_of(stage, root)], {**os.environ, **sources}


def stage_in(arguments: Sequence[str]) -> str:
    """Name of the stage that such arguments run."""
    if tuple(arguments[:2]) == CLI:
        return arguments[arguments.index("stage") + 1]
    return Path(arguments[0]).stem


def stage_command(stage: str, *options: str) -> str:
    """What somebody types to run a stage here, for a hint."""
    return " ".join([f"python pipeline/{stage}.py" if is_kit() else f"samebits stage {stage}", *options])


def this_stage(*more: str) -> str | None:
    """What somebody types to run this process's stage again with more options; None if it runs none."""
    program, *arguments = sys.argv
    if arguments[:1] == ["stage"]:
        stage, *arguments = arguments[1:] or [""]
    elif Path(program).parent.name == "pipeline":
        stage = Path(program).stem
    else:
        return None
    return stage_command(stage, shlex.join([*arguments, *more]))


def repository_of_experiment(folder: Path) -> Path | None:
    """The repository whose temporary DVC experiment a folder is; None if it is none."""
    outer, marker, _ = f"{folder.resolve()}/".partition(f"/{_EXPERIMENTS}/")
    return Path(outer) if marker else None


def repro_command() -> str:
    """What somebody types to run the whole pipeline here, for a hint."""
    return "make repro" if is_kit() else "dvc repro"


def install_command(**variables: str) -> str:
    """What brings the environment up to date, for a hint; ``variables`` are those of ``make``."""
    if is_kit():
        return " ".join(["make .venv", *(f"{name}={value}" for name, value in variables.items())])
    return "install samebits again, with what it needs"


def torch_command(build: str) -> str:
    """What installs the ``cpu`` or the ``gpu`` build of torch, for a hint."""
    if is_kit():
        return f"make repro TORCH={build}"
    return f"install PyTorch's build for {'CUDA' if build == 'gpu' else 'CPUs'}"


def of_kit(what: str) -> str:
    """A page or a command of the kit's own repository, for a hint that is read elsewhere too."""
    return what if is_kit() else f"{what} of samebits's repository"
