"""The working directory: git, DVC, params.yaml, and logs that MLflow does not have yet."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path

from samebits.doctor.finding import Finding, check, failed, ok, warning
from samebits.errors import UserError
from samebits.params import load_params
from samebits.provenance import git_state
from samebits.runlog import LOGS, writer_gone
from samebits.tracking.delivery import Delivery


@check("git")
def git() -> Finding:
    """Whether a result can name the commit that it comes from."""
    state = git_state()
    commit = state["commit"]
    if commit.startswith("unavailable"):
        hint = "git clone the repository, rather than copying its files"
        if "not installed" in commit:
            hint = "install git"
        elif "dubious ownership" in commit:
            hint = 'git config --global --add safe.directory "$PWD"'
        return warning(f"results cannot name their commit: {commit.removeprefix('unavailable: ')}", hint)
    if state["dirty"]:
        return warning(f"{commit[:12]} with changes, of which runs keep a patch", "commit them before you publish")
    return ok(commit[:12])


@check("dvc")
def dvc(folder: Path = Path()) -> Finding:
    """Whether DVC can run stages here."""
    beside = Path(sys.executable).with_name("dvc")
    if importlib.util.find_spec("dvc") is None or not (beside.exists() or shutil.which("dvc")):
        return failed("not installed", "make .venv")
    if not (folder / ".dvc" / "config").exists():
        text, hint = "no .dvc/config here, so no stage can run", "run this at the root of the repository"
        return failed(text, hint, exit_code=UserError.exit_code)
    lock = folder / ".dvc" / "tmp" / "rwlock"
    try:
        sound = not lock.exists() or isinstance(json.loads(lock.read_bytes()), dict)
    except ValueError:
        sound = False
    if not sound:
        text = ".dvc/tmp/rwlock is damaged, as a killed dvc leaves it, and every dvc command fails"
        return failed(text, "rm .dvc/tmp/rwlock, while no dvc runs")
    return ok("can run stages")


@check("params")
def params(path: Path) -> Finding:
    """Whether the file of parameters is right; ``load_params`` raises what is wrong with it."""
    found = load_params(path)
    return ok(f"{path}: {found.model.name} on {found.data.task}, global batch {found.train.global_batch_size}")


@check("logs")
def logs() -> Finding:
    """Whether MLflow has all that was logged here."""
    found = sorted(LOGS.glob("*.jsonl"))
    waiting = [log for log in found if not Delivery(log).done and writer_gone(log)]
    if waiting:
        some = "1 run was" if len(waiting) == 1 else f"{len(waiting)} runs were"
        return warning(f"{some} not delivered to MLflow in full, {waiting[0].stem} the first", "samebits track sync")
    return ok(f"all of {len(found)} delivered to MLflow" if found else "none yet")
