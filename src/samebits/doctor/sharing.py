"""What other users of this host, or of its network, could change: the clone, DVC's cache, a server without a login."""

from __future__ import annotations

import grp
import importlib.util
import os
import pwd
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from samebits.doctor.finding import Finding, check, ok, skipped, warning
from samebits.errors import few

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_OF_THE_CLONE = (".", ".git", ".dvc", "src", "pipeline", "dvc.yaml", "params.yaml")
_DVC_CACHE = "/var/tmp/dvc"  # noqa: S108 - DVC's own, which is looked at


@check("clone")
def clone(folder: Path = Path()) -> Finding:
    """Whether nobody else can change the code that is run here."""
    paths = [folder / name for name in _OF_THE_CLONE]
    if open_ones := few([str(path) for path in _written_by_others(paths)]):
        return warning(f"other users can write to {open_ones}, and so decide what runs", "chmod -R go-w .")
    return ok("nobody else writes to it")


@check("dvc cache")
def dvc_cache(folder: Path = Path(), environ: Mapping[str, str] = os.environ) -> Finding:
    """Whether nobody else can put a pickle where DVC reads one."""
    if importlib.util.find_spec("dvc") is None:
        return skipped("DVC is not installed")
    cache = Path(environ.get("DVC_SITE_CACHE_DIR") or _configured(folder) or _DVC_CACHE)
    if any(_is_private(one) for one in (cache, *cache.parents)):
        return ok(f"in {cache}, where nobody else comes")
    if not _has_other_users(cache):
        return ok(f"in {cache}, on a host without other users")
    hint = "dvc config --local core.site_cache_dir ~/.cache/samebits/dvc"
    return warning(f"DVC reads pickles in {cache}, which is open to all users of this host", hint)


def _configured(folder: Path) -> str:
    """What DVC's settings say, be they of this clone, of the user or of the host."""
    command = [sys.executable, "-P", "-m", "dvc", "config", "core.site_cache_dir"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout.strip()


def _is_private(folder: Path) -> bool:
    """Whether nobody else even gets into it."""
    return folder.is_dir() and folder.stat().st_uid == os.getuid() and not folder.stat().st_mode & 0o077


def _has_other_users(cache: Path) -> bool:
    """Whether there are homes, or parts of DVC's cache, of somebody else; not all accounts are known here."""
    beside = [path for place in (Path.home().parent, cache / "repo") if place.is_dir() for path in place.iterdir()]
    return any(path.lstat().st_uid not in (0, os.getuid()) for path in beside)


def _written_by_others(paths: Iterable[Path]) -> list[Path]:
    """Those of the paths that are there, and that somebody else can change."""
    return [path for path in paths if path.exists() and _is_open(path)]


def _is_open(path: Path) -> bool:
    found = path.stat()
    mode, mine = found.st_mode, {os.getuid(), 0}
    return bool(found.st_uid not in mine or mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not _is_own_group(found)))


def _is_own_group(found: os.stat_result) -> bool:
    """Whether the group is its owner's alone, as distributions make one for each user."""
    try:
        owner, group = pwd.getpwuid(found.st_uid).pw_name, grp.getgrgid(found.st_gid)
    except KeyError:
        return found.st_gid == found.st_uid
    return group.gr_name == owner and set(group.gr_mem) <= {owner}
