"""Which folders of the host a command needs inside, each at its own path: DVC and MLflow keep absolute paths."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from samebits.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_TEMPORARY = ".dvc/tmp/exps"  # where DVC runs experiments of a queue, in clones of the repository


def folders(cwd: Path, arguments: Sequence[str], tracking_uri: str, files: Iterable[Path] = ()) -> list[Path]:
    """Folders to mount for a command in ``cwd``: its repository, and what its arguments, store and data are in."""
    wanted = [_repository(cwd), *_shared_git(cwd)]
    if tracking_uri.startswith("sqlite:///"):
        wanted.append(Path(tracking_uri.removeprefix("sqlite:///")).parent)
    wanted += [_existing(cwd / argument) for argument in arguments if "/" in argument]
    wanted += [_existing(cwd / file) for file in files]
    return outermost(wanted)


def outermost(paths: Iterable[Path]) -> list[Path]:
    """Paths without those that lie in another of them.

    Raises:
        UserError: one is the root of the file system.
    """
    unique = sorted({path.resolve() for path in paths})
    if Path("/") in unique:
        raise UserError("the whole file system would be mounted", hint="keep the repository and its data in folders")
    return [path for path in unique if not any(other in path.parents for other in unique)]


def _repository(cwd: Path) -> Path:
    """The working tree that ``cwd`` is in; of DVC's temporary experiments the repository that they are in."""
    whole = str(cwd.resolve())
    if f"/{_TEMPORARY}/" in f"{whole}/":
        return Path(whole.partition(f"/{_TEMPORARY}")[0])
    top = _git(cwd, "rev-parse", "--show-toplevel")
    return top if top else cwd


def _shared_git(cwd: Path) -> list[Path]:
    """Git's own folder, which for a worktree is elsewhere."""
    found = _git(cwd, "rev-parse", "--path-format=absolute", "--git-common-dir")
    return [found] if found else []


def _git(cwd: Path, *arguments: str) -> Path | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return Path(done.stdout.strip()) if done.returncode == 0 and done.stdout.strip() else None


def _existing(path: Path) -> Path:
    """The folder that ``path`` is, or the nearest above it that is there."""
    path = path.absolute()
    while not path.is_dir():
        path = path.parent
    return path
