"""Checks of the working directory: git, DVC, params.yaml, and logs without delivery to MLflow."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

from samebits.doctor.finding import Finding, check, failed, ok, warning
from samebits.errors import UserError, counted
from samebits.here import install_command, is_kit
from samebits.params import load_params, require_every_key
from samebits.records.log import LOGS, all_logs, writer_gone
from samebits.records.provenance import git_state
from samebits.results.lock import LOCK, read_lock
from samebits.tracking.delivery import Delivery


@check("git")
def git() -> Finding:
    """Whether a result can name its commit."""
    state = git_state()
    if state.commit is None:
        return warning(f"results cannot name their commit: {state.problem}", _why_no_commit())
    if state.dirty:
        text = f"{state.commit[:12]} with changes, of which runs keep a patch"
        return warning(text, "commit them before you publish")
    return ok(state.commit[:12])


def _why_no_commit() -> str:
    """Hint for a folder without a commit. It differs if git refuses the folder only because of its owner."""
    if shutil.which("git") is None:
        return "install git"
    if not _is_repository() and _is_repository("-c", "safe.directory=*"):
        return 'git config --global --add safe.directory "$PWD"'
    if _is_repository():
        return "`git add --all && git commit`: there is no commit yet"
    return "git clone the repository, rather than copying its files" if is_kit() else "`git init`, and commit"


def _is_repository(*options: str) -> bool:
    return subprocess.run(["git", *options, "rev-parse"], capture_output=True).returncode == 0


@check("dvc")
def dvc(folder: Path = Path()) -> Finding:
    """Whether DVC can run stages here."""
    beside = Path(sys.executable).with_name("dvc")
    if importlib.util.find_spec("dvc") is None or not (beside.exists() or shutil.which("dvc")):
        return failed("not installed", install_command())
    if not (folder / ".dvc" / "config").exists():
        hint = "run this at the root of the repository, or `dvc init` there"
        return failed("no .dvc/config here, so no stage can run", hint, exit_code=UserError.exit_code)
    lock = folder / ".dvc" / "tmp" / "rwlock"
    try:
        sound = not lock.exists() or isinstance(json.loads(lock.read_bytes()), dict)
    except ValueError:
        sound = False
    if not sound:
        text = ".dvc/tmp/rwlock is damaged, as a killed dvc leaves it, and every dvc command fails"
        return failed(text, "`rm .dvc/tmp/rwlock`, while no dvc runs")
    if (folder / LOCK).exists():
        try:
            read_lock(folder)
        except UserError as error:
            text = f"{error.message}; a dvc that is killed while it writes it leaves it so, and every dvc command fails"
            return failed(text, error.hint)
    return ok("can run stages")


@check("params")
def params(path: Path) -> Finding:
    """Whether the parameters are valid. ``load_params`` raises errors."""
    checked = load_params(path)
    try:
        require_every_key(checked, str(path))
    except UserError as error:  # scripts take the default
        return warning(f"{error.message}: `dvc repro` fails, and a script by hand runs", error.hint)
    return ok(f"{path}: {checked.model.name} on {checked.data.task}, global batch {checked.train.global_batch_size}")


@check("logs")
def logs() -> Finding:
    """Whether all logs are delivered to MLflow."""
    deliveries = {log: Delivery(log) for log in all_logs()}
    if strange := sorted(set(LOGS.glob("*.jsonl")) - deliveries.keys()):
        return warning(f"{strange[0].name} is not a file, and no log", f"move it away: {strange[0]}")
    for log, delivery in deliveries.items():
        if refused := delivery.state.refused:
            why = refused.partition(". hint: ")[0]
            return warning(f"{log.name} cannot be delivered: {why}", f"move it away: {log}")
    waiting = [log for log, delivery in deliveries.items() if not delivery.done and writer_gone(log)]
    if waiting:
        some = counted(len(waiting), "run")
        return warning(f"{some} not delivered to MLflow in full, {waiting[0].stem} the first", "`samebits track sync`")
    return ok(f"all of {len(deliveries)} delivered to MLflow" if deliveries else "none yet")
