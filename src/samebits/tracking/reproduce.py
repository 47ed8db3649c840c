"""Train a run again from nothing but its record in MLflow, and compare the two."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samebits.errors import HostError, UserError, few, last_line, printable, reason
from samebits.files import regular, write_text
from samebits.records.card import read_card
from samebits.records.provenance import Provenance, versions
from samebits.records.run import read_run
from samebits.results.verdict import compare_runs, settings_that_differ
from samebits.results.verdict_text import sentences
from samebits.results.verify import run_stage
from samebits.strategies import BASELINE
from samebits.tracking.changes import describe_changes, is_shown, snapshot
from samebits.tracking.download import errors_by_run, fetch_run
from samebits.tracking.recorder import events, record_all, set_tags
from samebits.tracking.settings import settings_changed, values_of, values_of_commit
from samebits.tracking.store import NOTE_TAG, connect, errors_of_the_store, tracking_uri

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from samebits.records.run import Run
    from samebits.results.verdict import Verdict
    from samebits.tracking.settings import Values

_LONGEST_LINE = 400
_MOST_LINES = 400  # of a patch or of params on a terminal
_CHANGES = "changes.diff"
WITHIN = {"SAMEBITS_REPRODUCES": "1"}  # in the environment of the recorded code
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_PATCHED_BYTES = 2**32  # of all files that a patch changes: a small one can stand for very much
_PATCH_MEMORY = 2**32  # of git, which holds a file whole
_PATCH_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """A reproduction: the original run, the repeated run of the same ``commit``, and the verdict.

    ``differences`` are those of settings and hosts.
    """

    run_id: str
    commit: str
    original: Run
    again: Run
    verdict: Verdict
    differences: dict[str, tuple[Any, Any]]

    def as_json(self) -> str:
        """The verdict and the keys of both runs as JSON."""
        runs = {"original": self.run_id, "again": self.again.record.run}
        verdict = self.verdict.model_dump(mode="json")
        return json.dumps({**runs, **verdict, "differences": self.differences}, indent=2)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A run as MLflow has it: its files in ``folder``, the commit, the patch on top of it if any, and packages.

    ``params`` is the text of its ``params.yaml``, whose keys the recorded code checks. ``omits`` are untracked files
    that existed and that the patch leaves out.
    """

    run_id: str
    folder: Path
    run: Run
    params: str
    commit: str
    patch: Path | None
    packages: dict[str, str]
    omits: tuple[str, ...] = ()

    def describe(self, changes: Path | None = None) -> str:
        """What will be run, for the user's consent. ``changes`` is the diff of the patched commit."""
        lines = [f"run {self.run_id}: {self.run.name}, {len(self.run.losses)} steps, of this commit:"]
        lines.append(_git("show", "--no-patch", "--format=%h of %as by %an: %s", self.commit).stdout.strip())
        if not _git("for-each-ref", "--count=1", f"--contains={self.commit}", "refs/heads", "refs/tags").stdout:
            lines.append("no branch or tag of this clone has that commit: look at it before you go on")
        if changes:
            lines.append("with these changes on top, by a patch that came from MLflow:")
            shown = changes.read_bytes().decode().split("\n")
            names = shown.index("")
            lines += [*shown[:names], *_first_of(shown[names:], changes)]
        if self.omits:
            lines.append(f"without files that it was made beside, and that MLflow has not: {few(self.omits, 20)}")
        if changed := settings_changed(self._committed, self._values):
            lines.append("with these params, which came from MLflow, in place of the commit's:")
            lines += _first_of(changed, self.folder / "params.yaml")
        now, then = versions(), self.packages
        changed = [f"{name} {then[name]} -> {now[name]}" for name in now if name in then and then[name] != now[name]]
        if changed:
            lines.append(f"packages that differ here: {few(changed, 20)}")
        lines.append(f"its code runs on this host, with data of SHA-256 {self.run.record.data.sha256[:12]}")
        return "\n".join(_cut(printable(line.expandtabs())) for line in lines)

    def require_shown_factory(self, tree: Path) -> None:
        """Raise UserError: the params bring the factory of an installed package, and with it code that is not shown."""
        name = str(self._values.get("model.name", ""))
        module, colon, _ = name.partition(":")
        if colon and self._committed.get("model.name") != name and not is_shown(module, tree):
            what = f"model.name: {name} came from MLflow, and is neither in the commit nor in the patch"
            raise UserError(what, hint="write it into params.yaml, commit that, and train again")

    @cached_property
    def _values(self) -> Values:
        return values_of(self.params)

    @cached_property
    def _committed(self) -> Values:
        """The params of the commit, as they are recorded; empty if they cannot be read."""
        try:
            text = _git("show", f"{self.commit}:./params.yaml").stdout
            return values_of_commit(text, self._values)
        except Exception:  # noqa: BLE001 - a commit may hold anything
            return {}


def reproduce(run_id: str, scratch: Path, *, num_devices: str | None, confirm: Callable[[str], bool]) -> Reproduction:
    """Fetch a run, train it again in a git worktree of its own, compare, and log the verdict to MLflow.

    ``confirm`` gets the description of what will be run, and returns whether it may run.

    Raises:
        UserError: there is no such run, it cannot be repeated here, or ``confirm`` returned False.
        SamebitsError: the recorded code failed.
    """
    if WITHIN.items() <= os.environ.items():  # it could answer its own question
        raise UserError(
            "a recorded run reproduces another one", hint="reproduce that one by hand, and look at it first"
        )
    original = scratch / "original"
    original.mkdir()
    fetch_run(run_id, original)
    with errors_by_run(run_id, original):
        recorded = read_recorded(run_id, original)
    if num_devices is not None and recorded.run.record.strategy == BASELINE.name:
        raise UserError("--num-devices: the run is of single, which uses one device", hint="leave it out")
    with worktree(recorded, scratch) as tree:
        if not confirm(recorded.describe(scratch / _CHANGES if recorded.patch else None)):
            raise UserError("nothing was run", hint="answer y, or give --yes")
        recorded.require_shown_factory(tree)
        write_text(tree / "params.yaml", recorded.params)
        _link_files(recorded.run.record.params.data.kwargs.model_dump(), tree)
        again = train_again(recorded, tree, num_devices=num_devices)
        reproduction = Reproduction(
            run_id=run_id,
            commit=recorded.commit,
            original=recorded.run,
            again=again,
            verdict=compare_runs(recorded.run, again),
            differences=settings_that_differ(recorded.run, again),
        )
        try:
            log_reproduction(reproduction)
        except HostError as error:
            sys.stderr.write(f"the verdict stays untracked: {error}\n")
    return reproduction


def read_recorded(run_id: str, folder: Path) -> Recorded:
    """The run whose artifacts were downloaded to ``folder``.

    Raises:
        UserError: the commit is unknown, is no hash, or is not in this repository, or the patch is missing.
    """
    provenance = Provenance.read(folder / "provenance.json", made_by="samebits track sync")
    commit = provenance.git.commit
    if commit is None:
        hint = "only runs of a git repository can be repeated"
        raise UserError(f"run {run_id} has no commit: {provenance.git.problem}", hint=hint)
    if not _HASH.fullmatch(commit):  # a branch may move between the question and the run
        raise UserError(f"run {run_id}: its commit is {commit!r}, expected a hash", hint="look at its provenance.json")
    if _git("cat-file", "-e", f"{commit}^{{commit}}").returncode:
        raise UserError(f"commit {commit} is not in this repository", hint="git fetch, or work in a clone that has it")
    patch = folder / provenance.patch if provenance.patch else None
    if provenance.patch_problem or (patch and not patch.is_file()):
        why = provenance.patch_problem or f"{provenance.patch} is not among its artifacts"
        what = f"run {run_id} was made from changed files, whose patch is not there: {why}"
        raise UserError(what, hint="train it again with git at hand")
    return Recorded(
        run_id=run_id,
        folder=folder,
        run=read_run(folder),
        params=read_params(run_id, folder),
        commit=commit,
        patch=patch,
        packages=provenance.packages,
        omits=provenance.patch_omits,
    )


def read_params(run_id: str, folder: Path) -> str:
    """The text of a run's ``params.yaml``. Raises UserError: it is no YAML."""
    try:
        text = regular(folder / "params.yaml").read_text(encoding="utf-8")
        values_of(text)
    except Exception as error:  # noqa: BLE001 - ruamel's constructors raise anything, such as KeyError
        what = f"params.yaml of run {run_id} cannot be read: {reason(error)}"
        raise UserError(what, hint="see its artifacts in MLflow") from None
    return text


@contextmanager
def worktree(recorded: Recorded, scratch: Path) -> Iterator[Path]:
    """A temporary worktree with the recorded code. ``scratch`` gets the diff of the patched files.

    Raises UserError: the patch does not apply, or hides what it changes.
    """
    tree = scratch / "worktree"
    added = _git("worktree", "add", "--detach", "--quiet", str(tree), recorded.commit)
    if added.returncode:
        raise UserError(f"git worktree failed: {last_line(added.stderr)}", hint="see `git worktree list`")
    try:
        if recorded.patch:
            before = snapshot(tree)
            _apply(recorded.patch.resolve(), tree)
            with _readable():
                names, lines = describe_changes(tree, before)
            write_text(scratch / _CHANGES, "\n".join([*names, "", *lines]))
        yield tree
    finally:
        _git("worktree", "remove", "--force", str(tree))


def _apply(patch: Path, tree: Path) -> None:
    """Apply a patch. Raises UserError: it does not apply, or goes beyond a limit of memory, time or a file's size."""

    def run(limit: str, *options: str) -> subprocess.CompletedProcess[str]:
        limited = ["sh", "-c", f'ulimit -v {_PATCH_MEMORY // 1024} {limit} && exec git "$@"', "git"]
        return _run([*limited, "-C", str(tree), "apply", *options, str(patch)], seconds=_PATCH_SECONDS)

    files = run("", "--numstat", "-z").stdout.count("\0")
    blocks = _PATCHED_BYTES // max(files, 1) // 512
    applied = run(f"&& ulimit -f {blocks}", "--binary")
    if applied.returncode in (-signal.SIGXFSZ, 128 + signal.SIGXFSZ):
        what = f"the patch writes a file of more than {blocks * 512 / 2**20:.0f} MiB"
        raise UserError(what, hint="whoever made the run has to commit it")
    if applied.returncode:
        raise UserError(f"the patch does not apply: {last_line(applied.stderr)}", hint="compare it by hand")


@contextmanager
def _readable() -> Iterator[None]:
    """Raise UserError for a patched tree that cannot be read, such as one with a path longer than the system allows."""
    try:
        yield
    except OSError as error:
        what = f"what the patch changes cannot be read: {reason(error)}"
        raise UserError(what, hint="whoever made the run has to leave that out") from None


def _cut(line: str) -> str:
    """A line that fits on a terminal."""
    return f"{line[:_LONGEST_LINE]} ..." if len(line) > _LONGEST_LINE + len(" ...") else line


def _first_of(lines: list[str], path: Path) -> list[str]:
    """The lines that fit on a terminal, and the path of the others."""
    first, left = lines[:_MOST_LINES], max(len(lines) - _MOST_LINES, 0)
    shown = [_cut(line) for line in first]
    cut = shown != first
    if left or cut:
        what = " and ".join([f"{left} more lines"] * (left > 0) + ["the rest of lines that end in ..."] * cut)
        shown.append(f"... and {what}, as long as you are asked in {path}")
    return shown


def _link_files(kwargs: dict[str, Any], tree: Path) -> None:
    """Link the user's own data, which git does not have, into ``tree``. Their hash is checked before they are used.

    Only files within the repository are linked, and only within the tree.
    """
    for value in kwargs.values():
        path = Path(str(value).partition(":")[0])
        inside = (tree / path).parent.resolve().is_relative_to(tree.resolve())  # a commit may contain links
        if inside and path.is_file() and not (tree / path).exists():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).symlink_to(path.resolve())


def train_again(recorded: Recorded, tree: Path, *, num_devices: str | None) -> Run:
    """Train with the recorded code in ``tree``.

    Raises:
        UserError: the data are not those of the run.
        SamebitsError: an error of the recorded code.
    """
    record = recorded.run.record
    run_stage(tree, "prepare", variables=WITHIN)
    card = read_card(tree / "data" / "card.json")
    if card.sha256 != record.data.sha256:
        got = f"{card.sha256[:12]}, expected {record.data.sha256[:12]}"
        raise UserError(f"the data are not those of the run: SHA-256 {got}", hint="get the files that it was made from")
    out = tree / "runs" / record.name  # in the tree, because a container sees nothing else
    arguments: list[object] = ["--strategy", record.strategy, "--numerics", record.numerics]
    arguments += ["--no-tracking", "--out-dir", out]
    if record.strategy != BASELINE.name:
        arguments += ["--num-devices", num_devices or record.placement.num_devices]
    if len(recorded.run.losses) < record.params.total_steps:
        arguments += ["--steps", len(recorded.run.losses)]
    run_stage(tree, "train", *arguments, variables=WITHIN)
    return read_run(out)


@errors_of_the_store()
def log_reproduction(reproduction: Reproduction) -> str:
    """Record the repeated run and its verdict, tag the original with both, and return the new run's id."""
    client, verdict = connect(tracking_uri()), reproduction.verdict
    tags = {"samebits.reproduces": reproduction.run_id, "git_commit": reproduction.commit, "verdict": verdict.grade}
    run_id = record_all(client, events(reproduction.again, tags))
    description = [f"Run {reproduction.run_id} made again: **{verdict.grade}**.", *sentences(verdict)]
    set_tags(client, run_id, {NOTE_TAG: "\n\n".join(description)})
    client.log_text(run_id, reproduction.as_json(), "verdict.json")
    set_tags(client, reproduction.run_id, {"samebits.reproduced": f"{verdict.grade} by {run_id}"})
    return run_id


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return _run(["git", *arguments])


def _run(command: list[str], *, seconds: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run git. Its output is decoded here, because subprocess would turn a carriage return into the end of a line."""
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        hint = "whoever made the run has to commit it"
        raise UserError(f"the patch is not applied within {seconds:.0f} s", hint=hint) from None
    except OSError as error:
        raise HostError(f"git cannot be run: {reason(error)}", hint="install git") from None
    said = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(done.args, done.returncode, *said)
