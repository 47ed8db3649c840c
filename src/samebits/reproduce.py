"""Train a recorded run again from nothing but what MLflow has of it, and say whether it is the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samebits.errors import UserError, from_exit_code, last_line
from samebits.files import read_json, write_text
from samebits.provenance import versions
from samebits.records import Run, read_run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from samebits.verdict import Comparison


@dataclass(frozen=True)
class Recorded:
    """A run as MLflow has it: its files in ``folder``, the commit, the patch on top of it or None, and packages."""

    run_id: str
    folder: Path
    run: Run
    commit: str
    patch: Path | None
    packages: dict[str, str]

    def describe(self) -> list[str]:
        """What will be done, for the user to agree to."""
        record = self.run.record
        lines = [f"run {self.run_id}: {self.run.name}, {len(self.run.losses)} steps, commit {self.commit[:12]}"]
        if self.patch:
            done = _git("apply", "--stat", str(self.patch))
            lines += ["with this patch on top:", *done.stdout.rstrip().splitlines()]
        now, then = versions(), self.packages
        changed = [f"{name} {then[name]} -> {now[name]}" for name in now if name in then and then[name] != now[name]]
        if changed:
            lines.append(f"packages that differ here: {', '.join(changed)}")
        lines.append(f"its code runs on this host, with data of SHA-256 {record['data_sha256'][:12]}")
        return lines


def recorded(run_id: str, folder: Path) -> Recorded:
    """What has been fetched to ``folder``.

    Raises:
        UserError: the commit is not known, or is not in this repository, or the patch is missing.
    """
    provenance = read_json(folder / "provenance.json", made_by="samebits")
    commit, patch = provenance["git"]["commit"], provenance["patch"]
    if commit.startswith("unavailable"):
        raise UserError(f"run {run_id} has no commit: {commit}", hint="only runs of a git repository can be repeated")
    if _git("cat-file", "-e", f"{commit}^{{commit}}").returncode:
        raise UserError(f"commit {commit} is not in this repository", hint="git fetch, or work in a clone that has it")
    file = None
    if patch:
        file = folder / patch
        if patch.startswith("unavailable") or not file.exists():
            what = f"run {run_id} was made from changed files, whose patch is not there: {patch}"
            raise UserError(what, hint="train it again with git at hand")
    return Recorded(run_id, folder, read_run(folder), commit, file, provenance["packages"])


@contextmanager
def worktree(found: Recorded, scratch: Path) -> Iterator[Path]:
    """The recorded code and params in a git worktree of their own, which goes away.

    Raises:
        UserError: the patch does not apply.
    """
    tree = scratch / "worktree"
    done = _git("worktree", "add", "--detach", "--quiet", str(tree), found.commit)
    if done.returncode:
        raise UserError(f"git worktree failed: {last_line(done.stderr)}", hint="see `git worktree list`")
    try:
        if found.patch:
            done = _git("-C", str(tree), "apply", "--binary", str(found.patch.resolve()))
            if done.returncode:
                raise UserError(f"the patch does not apply: {last_line(done.stderr)}", hint="compare it by hand")
        write_text(tree / "params.yaml", (found.folder / "params.yaml").read_text(encoding="utf-8"))
        _link_files(found.run.record["params"]["data"].get("kwargs", {}), tree)
        yield tree
    finally:
        _git("worktree", "remove", "--force", str(tree))


def _link_files(kwargs: dict[str, Any], tree: Path) -> None:
    """Let ``tree`` see the user's own data, which git does not have; their hash is checked before they are used."""
    for value in kwargs.values():
        path = Path(str(value).partition(":")[0])
        if not path.is_absolute() and path.is_file() and not (tree / path).exists():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).symlink_to(path.resolve())


def train_again(found: Recorded, tree: Path, out: Path, *, num_devices: str | None) -> Run:
    """Run the recorded code in ``tree``.

    Raises:
        UserError: the data are not those of the run.
        SamebitsError: what the recorded code says.
    """
    record = found.run.record
    devices = num_devices or str(record["placement"]["num_devices"])
    _stage(tree, "prepare")
    card = read_json(tree / "data" / "card.json", made_by="python pipeline/prepare.py")
    if card["sha256"] != record["data_sha256"]:
        got = f"{card['sha256'][:12]}, expected {record['data_sha256'][:12]}"
        raise UserError(f"the data are not those of the run: SHA-256 {got}", hint="get the files that it was made from")
    arguments = ["--strategy", record["strategy"], "--numerics", record["numerics"], "--no-tracking"]
    if record["strategy"] != "single":
        arguments += ["--num-devices", devices]
    _stage(tree, "train", *arguments, "--out-dir", str(out))
    return read_run(out)


def _stage(tree: Path, name: str, *arguments: str) -> None:
    environ = {**os.environ, "PYTHONPATH": str(tree / "src")}
    command = [sys.executable, str(tree / "pipeline" / f"{name}.py"), *arguments]
    done = subprocess.run(command, cwd=tree, env=environ, stdout=sys.stderr, check=False)
    if done.returncode:
        hint = "see its message above"
        raise from_exit_code(done.returncode, f"pipeline/{name}.py of the recorded commit failed", hint)


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)


def as_json(found: Recorded, again: Run, comparison: Comparison) -> str:
    """The verdict with what was compared."""
    runs: dict[str, Any] = {"original": found.run_id, "again": again.record["run"]}
    return json.dumps({**runs, **comparison}, indent=2)
