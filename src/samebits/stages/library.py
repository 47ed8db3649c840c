"""The library in a script or a notebook: train and compare, compare two runs, explain one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samebits.errors import from_exit_code
from samebits.files import scratch_folder
from samebits.here import process_of, stage_command
from samebits.params import load_params, parse_params, write_params
from samebits.results import comparison, verdict
from samebits.results.explanation import explain as explanation
from samebits.results.explanation.words import say_explanation
from samebits.results.page.write import as_frame
from samebits.results.table import markdown
from samebits.results.verdict_text import say_comparison
from samebits.stages.pipeline import STAGES
from samebits.tracking.download import find_run_files


class Verdict(verdict.Verdict):
    """A verdict on two trainings, which prints as sentences."""

    def __str__(self) -> str:
        return say_comparison(self, {})


class Explanation(explanation.Explanation):
    """Why a step takes as long as it does, which prints as sentences."""

    def __str__(self) -> str:
        return say_explanation("this run", self)


class Comparison(comparison.Comparison):
    """Runs beside each other, which print as answers and table, and are the report in a notebook."""

    def __str__(self) -> str:
        return markdown(self)

    def _repr_html_(self) -> str:
        return as_frame(self)


def run(
    params: Mapping[str, Any] | str | Path, folder: str | Path = "samebits-run", *, track: bool = False
) -> Comparison:
    """Train under every strategy and numerics that the params name, evaluate, and compare.

    Each stage is a process of its own, as under DVC. A model's factory is imported by its name from the working
    directory: in a notebook, write its file with ``%%writefile experiment.py``.

    Args:
        params: the values of a params.yaml, or such a file.
        folder: where params, data, runs and reports are written, in place of those of an earlier call.
        track: record the trainings in MLflow, where MLFLOW_TRACKING_URI says or in the working directory.

    Raises:
        UserError: the params or the model are wrong.
        HostError: this host cannot run them.
        WorkerError: a worker failed.
    """
    parsed = parse_params(params) if isinstance(params, Mapping) else load_params(params)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_params(parsed, folder / "params.yaml")
    untracked = () if track else ("--no-tracking",)
    for stage in STAGES:
        if stage == "train":
            for numerics in parsed.train.numerics:
                for strategy in parsed.train.strategies:
                    _run_stage(stage, folder, "--strategy", strategy, "--numerics", numerics, *untracked)
        else:
            _run_stage(stage, folder, *(untracked if stage == "compare" else ()))
    return Comparison.read(folder / "reports/comparison.json", made_by=stage_command("compare"))


def _run_stage(name: str, folder: Path, *arguments: str) -> None:
    """Run a stage. What it says goes to this process's ``sys.stderr``: a notebook shows no other one.

    But not the table of stage compare, which ``run`` returns.
    """
    command, environ = process_of(name)
    error = ""
    with subprocess.Popen(
        [*command, "--folder", str(folder), *arguments],
        env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout
        try:
            for line in process.stdout:
                if name != "compare":
                    sys.stderr.write(line)
                error = line if line.startswith("error: ") else error
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        message, _, hint = error.removeprefix("error: ").strip().partition(". hint: ")
        raise from_exit_code(process.returncode, message or f"stage {name} failed", hint or "see its messages above")


def compare(a: str | Path, b: str | Path) -> Verdict:
    """Whether two trainings are the same: folders of runs, or ids of MLflow runs.

    Raises:
        UserError: there is no such run.
        HostError: MLflow cannot be reached.
    """
    with scratch_folder() as scratch:
        first, second = scratch / "a", scratch / "b"
        first.mkdir()
        second.mkdir()
        found = verdict.compare_runs(find_run_files(str(a), first), find_run_files(str(b), second))
    return Verdict(**dict(found))


def explain(run: str | Path) -> Explanation:
    """Why a step of a run takes as long as it does, and what to change: a folder, or the id of an MLflow run.

    Raises:
        UserError: there is no such run, or its steps were not divided into parts.
        HostError: MLflow cannot be reached.
    """
    with scratch_folder() as scratch:
        found = comparison.explanation_of(find_run_files(str(run), scratch), str(run))
    return Explanation(**dict(found))
