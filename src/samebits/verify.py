"""Train the exact runs again, away from the workspace, and compare their bits with ``dvc.lock``."""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from samebits.data.prepare import prepare
from samebits.errors import UserError, last_line
from samebits.records import read_losses
from samebits.summary import where

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from samebits.params import Params
    from samebits.params.schema import StrategyName

LOCK = Path("dvc.lock")
BITS = ("model.safetensors", "losses.csv")
"""Files of a run that are functions of commit, params and data alone."""

QUICK_STEPS = 50
_DATA = ("data/train.safetensors", "data/card.json")


@dataclass(frozen=True)
class Verified:
    """What became of one run; ``same``: all of its bits are those of the lock."""

    name: str
    same: bool
    text: str


def verify(
    params: Params, strategies: Sequence[StrategyName], scratch: Path, *, quick: bool = False
) -> Iterator[Verified]:
    """Prepare the data and train each exact run in ``scratch``; one verdict for the data, then one for each run.

    ``quick`` trains the first steps alone and compares them with the losses of the run in the workspace.

    Raises:
        UserError: ``dvc.lock`` has no such run, or for ``quick`` the workspace has not the run of the lock.
    """
    from samebits.launch import run_training  # torch takes seconds to import

    stages = _locked_stages()
    locked = {strategy: locked_files(stages, f"train@{strategy}-exact") for strategy in strategies}
    expected = {strategy: _known_losses(strategy, locked[strategy]) for strategy in strategies} if quick else {}
    data = scratch / "data"
    prepare(params, data)
    yield _compare("data", "prepared again", data.parent, locked[strategies[0]], _DATA)
    for strategy in strategies:
        out = scratch / f"{strategy}-exact"
        steps = min(QUICK_STEPS, params.total_steps) if quick else None
        placement = run_training(params, strategy, "exact", data_dir=data, out_dir=out, resume=None, steps=steps)
        place = where(placement.as_dict())
        if quick:
            yield _compare_losses(out.name, place, expected[strategy], read_losses(out / "losses.csv"))
        else:
            files = {f"runs/{out.name}/{name}": name for name in BITS}
            wanted = {files[path]: md5 for path, md5 in locked[strategy].items() if path in files}
            yield _compare(out.name, place, out, wanted, BITS)


def _locked_stages() -> dict[str, Any]:
    """What ``dvc.lock`` has of each stage.

    Raises:
        UserError: there is no lock.
    """
    try:
        lock: dict[str, Any] = YAML(typ="safe").load(LOCK.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{LOCK}: no such file", hint="run `dvc repro` once and commit it") from None
    except (OSError, YAMLError) as error:
        raise UserError(f"{LOCK}: cannot be read: {error}", hint="git checkout dvc.lock") from None
    return dict(lock.get("stages", {}))


def locked_files(stages: dict[str, Any], stage: str) -> dict[str, str]:
    """MD5 of each file that a stage had read or written when ``dvc.lock`` was made.

    Raises:
        UserError: the lock does not have the stage.
    """
    entry = stages.get(stage)
    if entry is None:
        hint = "add exact to train.numerics, run `dvc repro`, and commit dvc.lock"
        raise UserError(f"{LOCK}: no stage {stage}", hint=hint)
    return {item["path"]: item["md5"] for item in [*entry.get("deps", []), *entry["outs"]] if "md5" in item}


def stale(strategies: Sequence[StrategyName]) -> list[str]:
    """What has changed in params and code since the lock was made; the host and what is missing do not count."""
    stages = [f"train@{strategy}-exact" for strategy in strategies]
    command = [sys.executable, "-m", "dvc", "status", "--json", *stages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        status: dict[str, list[Any]] = json.loads(done.stdout)
    except ValueError:
        return [f"`dvc status` failed: {last_line(done.stderr)}"]
    found = {name for parts in status.values() for part in parts if isinstance(part, dict) for name in _changed(part)}
    return sorted(found)


def _changed(part: dict[str, Any]) -> Iterator[str]:
    for name, state in part.get("changed deps", {}).items():
        if isinstance(state, dict):
            yield from (f"{name}: {key}" for key in state)
        elif state == "modified" and name != "host.json":
            yield name


def _md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


def _compare(name: str, place: str, folder: Path, wanted: dict[str, str], files: Sequence[str]) -> Verified:
    found = {file: _md5(folder / file) for file in files}
    other = [file for file in files if found[file] != wanted.get(file)]
    if not other:
        return Verified(name, same=True, text=f"{name}: bitwise, {place}")
    return Verified(name, same=False, text=f"{name}: DIFFERENT, {place}: {' and '.join(other)} not as in {LOCK}")


def _known_losses(strategy: str, locked: dict[str, str]) -> list[float]:
    path = Path(f"runs/{strategy}-exact/losses.csv")
    if not path.exists() or _md5(path) != locked.get(str(path)):
        raise UserError(f"{path}: not the file of {LOCK}", hint="run `dvc checkout`, or leave --quick out")
    return read_losses(path)


def _compare_losses(name: str, place: str, expected: list[float], found: list[float]) -> Verified:
    pairs = itertools.zip_longest(expected[: len(found)], found)
    first = next((step for step, (a, b) in enumerate(pairs, start=1) if a != b), None)
    if first is None:
        return Verified(name, same=True, text=f"{name}: bitwise for {len(found)} steps, {place}")
    text = f"{name}: DIFFERENT, {place}: the losses differ from step {first} on"
    return Verified(name, same=False, text=text)
