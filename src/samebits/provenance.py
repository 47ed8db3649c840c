"""Where a result comes from: the commit, what was changed on top of it, and the versions in use."""

from __future__ import annotations

import subprocess
from importlib import metadata
from typing import TypedDict

_PACKAGES = ("torch", "numpy", "safetensors", "mlflow", "dvc", "samebits")


class GitState(TypedDict):
    """``commit`` is "unavailable: <reason>" outside a repository."""

    commit: str
    dirty: bool


def git_state() -> GitState:
    """The commit of the working directory, and whether tracked files differ from it (``dvc.lock`` aside)."""
    try:
        commit = _git("rev-parse", "HEAD")
        changes = _git("status", "--porcelain", "--", ".", ":(exclude)dvc.lock")
    except FileNotFoundError:
        return {"commit": "unavailable: git is not installed", "dirty": False}
    except subprocess.CalledProcessError as error:
        reason = str(error.stderr).strip().split("\n", maxsplit=1)[0]
        return {"commit": f"unavailable: {reason}", "dirty": False}
    return {"commit": commit, "dirty": bool(changes)}


def versions() -> dict[str, str]:
    """Versions of the packages that a result may depend on."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "unavailable: not installed"
    return found


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()
