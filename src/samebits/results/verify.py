"""``samebits verify``: train the exact runs again in a scratch folder, and compare their bits with ``dvc.lock``."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samebits.errors import UserError, from_exit_code, last_line
from samebits.files import own_cache_of_dvc, regular
from samebits.here import TOLD, process_of
from samebits.params import write_params
from samebits.records.run import LOSSES, RECORD, WEIGHTS, RunRecord, read_losses
from samebits.results.lock import LOCK, read_lock
from samebits.results.text import devices_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from samebits.params import Params
    from samebits.strategies import StrategyName

BITS = (WEIGHTS, LOSSES)
"""Files of a run that depend on commit, params and data alone."""

QUICK_STEPS = 10
_DATA = ("data/train.safetensors", "data/card.json")
_PIPELINE = "dvc.yaml"


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The verdict on the data or on one run; ``same``: all of its bits are those of the lock."""

    same: bool
    text: str


def verify(
    params: Params, strategies: Sequence[StrategyName], scratch: Path, *, folder: Path = Path(), quick: bool = False
) -> Iterator[Verified]:
    """Prepare the data and train each exact run in ``scratch``; yield a verdict on the data, then one on each run.

    The stages do the work, so it happens where stages run: on the host or in the image. ``folder`` is the
    experiment's, with its lock. ``quick`` trains only the first steps, and compares their losses with those of the run
    in the workspace.

    Raises:
        UserError: ``dvc.lock`` has no such run, or with ``quick`` the workspace's run is not the one of the lock.
        SamebitsError: a stage failed.
    """
    lock, made = read_lock(folder), folder / LOCK
    locked = {
        strategy: {os.path.relpath(path, folder): md5 for path, md5 in lock.files(_stage(strategy), made).items()}
        for strategy in strategies
    }
    known = {strategy: _known_losses(strategy, locked[strategy], folder) for strategy in strategies} if quick else {}
    once = params.train.model_copy(update={"repeats": 1})  # nothing is timed
    params = params.model_copy(update={"train": once})
    prepare_in(scratch, params)
    yield _compare_bits("data", "prepared again", scratch, locked=locked[strategies[0]], files=_DATA, made=made)
    for strategy in strategies:
        steps = ["--steps", min(QUICK_STEPS, params.total_steps)] if quick else []
        out = train_in(scratch, params, f"{strategy}-exact", "--strategy", strategy, "--numerics", "exact", *steps)
        placement = RunRecord.read(out / RECORD, made_by="samebits verify").placement
        where = f"{strategy} on {devices_of(placement)}"
        if quick:
            yield _compare_losses(out.name, where, known[strategy], read_losses(out / LOSSES))
        else:
            files = {f"runs/{out.name}/{name}": name for name in BITS}
            bits = {files[path]: md5 for path, md5 in locked[strategy].items() if path in files}
            yield _compare_bits(out.name, where, out, locked=bits, files=BITS, made=made)


def _stage(strategy: str) -> str:
    """Name of the stage that trains the exact run."""
    return f"train@{strategy}-exact"


def prepare_in(scratch: Path, params: Params) -> None:
    """Prepare the data of ``params`` in ``scratch``. Raises what ``run_stage`` does."""
    _run_in(scratch, "prepare", params)


def train_in(scratch: Path, params: Params, name: str, *arguments: object) -> Path:
    """Train with ``params`` on the data in ``scratch``, and return the run's folder there.

    Raises what ``run_stage`` does.
    """
    options = ["--out-dir", scratch / name, "--no-tracking", "--no-checkpoints"]
    _run_in(scratch, "train", params, *options, *arguments)
    return scratch / name


def _run_in(scratch: Path, stage: str, params: Params, *arguments: object) -> None:
    write_params(params, scratch / "params.yaml")
    told = {} if stage == "prepare" else {TOLD: "1"}  # the data are prepared first
    run_stage(Path(), stage, "--folder", scratch, *arguments, quiet=True, variables=told)


def run_stage(
    root: Path, name: str, *arguments: object, quiet: bool = False, variables: Mapping[str, str] | None = None
) -> None:
    """Run a stage in the tree ``root``, in the kit's own repository with the code of that tree.

    The stage's stdout goes to stderr, or nowhere if ``quiet``. ``variables`` are added to its environment.

    Raises:
        SamebitsError: the stage failed; its message is on stderr.
        Interrupted: a signal ended the stage, or this process while the stage ran.
    """
    root = root.resolve()
    command, environ = process_of(name, root)
    out = subprocess.DEVNULL if quiet else sys.stderr
    environ = {**environ, **(variables or {})}
    with subprocess.Popen([*command, *map(str, arguments)], cwd=root, env=environ, stdout=out) as stage:
        before = signal.signal(signal.SIGTERM, lambda *_: stage.terminate())
        try:
            code = stage.wait()
        except KeyboardInterrupt:  # a terminal sends Ctrl-C to the stage too
            code = stage.wait() or 128 + signal.SIGINT  # whatever it waits for has an end, or a second Ctrl-C
        finally:
            signal.signal(signal.SIGTERM, before)
    if code:
        raise from_exit_code(code, f"stage {name} failed", "see its message above")


def stale(strategies: Sequence[StrategyName], folder: Path = Path()) -> list[str]:
    """Params and code that changed after the lock was made. Changes of the host and missing files do not count."""
    stages, made = [f"{folder / _PIPELINE}:{_stage(strategy)}" for strategy in strategies], folder / LOCK
    command = [sys.executable, "-P", "-m", "dvc", "status", "--json", *stages]
    environ = {**os.environ, **own_cache_of_dvc()}
    status = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    try:
        by_stage: dict[str, list[Any]] = json.loads(status.stdout)
    except ValueError:
        return [f"whether {made} is up to date is not known: `dvc status` failed: {last_line(status.stderr)}"]
    parts = [part for parts in by_stage.values() for part in parts if isinstance(part, dict)]
    return [f"{made} is older than {name}" for name in sorted({name for part in parts for name in _changed(part)})]


def _changed(part: dict[str, Any]) -> Iterator[str]:
    for name, state in part.get("changed deps", {}).items():
        if isinstance(state, dict):
            yield from (f"{name}: {key}" for key in state)
        elif state == "modified" and Path(name).name != "host.json":
            yield name


def _md5(path: Path) -> str:
    return hashlib.md5(regular(path).read_bytes(), usedforsecurity=False).hexdigest()


def _compare_bits(
    name: str, where: str, folder: Path, *, locked: dict[str, str], files: Sequence[str], made: Path
) -> Verified:
    different = [file for file in files if _md5(folder / file) != locked.get(file)]
    if not different:
        return Verified(same=True, text=f"{name}: bitwise, {where}")
    return Verified(same=False, text=f"{name}: DIFFERENT, {where}: {' and '.join(different)} not as in {made}")


def _known_losses(strategy: str, locked: dict[str, str], folder: Path) -> list[float]:
    name = f"runs/{strategy}-exact/{LOSSES}"
    path = folder / name
    if not path.is_file() or _md5(path) != locked.get(name):
        hint = f"run `dvc checkout {folder / _PIPELINE}`, or leave --quick out"
        raise UserError(f"{path}: not the file of {folder / LOCK}", hint=hint)
    return read_losses(path)


def _compare_losses(name: str, where: str, known: list[float], losses: list[float]) -> Verified:
    pairs = itertools.zip_longest(known[: len(losses)], losses)
    first = next((step for step, (a, b) in enumerate(pairs, start=1) if a != b), None)
    if first is None:
        return Verified(same=True, text=f"{name}: bitwise for {len(losses)} steps, {where}")
    return Verified(same=False, text=f"{name}: DIFFERENT, {where}: the losses differ from step {first} on")
