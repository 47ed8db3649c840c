"""Checks of what other users of this host could change: the clone, and DVC's cache."""

from __future__ import annotations

import grp
import importlib.util
import os
import pwd
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from samebits.doctor.finding import Finding, check, ok, skipped, warning
from samebits.errors import few

if TYPE_CHECKING:
    from collections.abc import Mapping

_COMPILED = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")  # folders of code that PyTorch loads
_PEOPLE = range(1000, 2**32)  # user ids of people, in all distributions
_PLACES = (Path("/home"), Path("/proc"))  # owners of their entries are users of this host
_DVC_CACHE = "/var/tmp/dvc"  # noqa: S108 - DVC's own default, read only


@check("clone")
def clone(folder: Path = Path(), environ: Mapping[str, str] = os.environ) -> Finding:
    """Whether nobody else can change code that runs here: the clone, the environment, and compiled kernels."""
    named = [Path(environ[name]) for name in _COMPILED if environ.get(name)]
    roots = [folder, *named, *([Path(sys.prefix)] if sys.prefix != sys.base_prefix else [])]
    found, hints = list[Path](), list[str]()
    for root in roots:
        path = root.resolve()
        inside = root is not folder and path.is_relative_to(folder.resolve())
        if inside or any(map(_is_private, (path, *path.parents))):
            continue
        if above := [one for one in path.parents if _is_open(one.stat()) and not one.stat().st_mode & stat.S_ISVTX]:
            found += above
            hints.append(f"ask for `chmod go-w {above[0]}`")
        if open_ones := _written_by_others(root):
            found += open_ones
            hints.append(_how_to_close(root, open_ones))
    if found:
        names = few([str(path) for path in found])
        return warning(f"other users can write to {names}, and so decide what runs", "; ".join(hints))
    return ok("nobody else writes to it")


@check("dvc cache")
def dvc_cache(folder: Path = Path(), environ: Mapping[str, str] = os.environ) -> Finding:
    """Whether nobody else can write a pickle that DVC reads."""
    if importlib.util.find_spec("dvc") is None:
        return skipped("DVC is not installed")
    cache = Path(environ.get("DVC_SITE_CACHE_DIR") or _configured(folder) or _DVC_CACHE)
    if any(_is_private(one) for one in (cache, *cache.parents)):
        return ok(f"in {cache}, where nobody else comes")
    if not _has_other_users(cache):
        return ok(f"in {cache}, on a host without other users")
    hint = "`dvc config --local core.site_cache_dir ~/.cache/samebits/dvc`"
    return warning(f"DVC reads pickles in {cache}, which is open to all users of this host", hint)


def _configured(folder: Path) -> str:
    """The folder from DVC's settings of this clone, the user or the host."""
    command = [sys.executable, "-P", "-m", "dvc", "config", "core.site_cache_dir"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout.strip()


def _is_private(folder: Path) -> bool:
    """Whether nobody else can enter a folder."""
    return folder.is_dir() and folder.stat().st_uid == os.getuid() and not folder.stat().st_mode & 0o077


def _has_other_users(cache: Path) -> bool:
    """Whether another user has an account, a home, a process, or part of DVC's cache. None of them shows all users."""
    places = (*_PLACES, Path.home().parent, cache / "repo")
    uids = {account.pw_uid for account in pwd.getpwall() if account.pw_uid != 65534}  # nobody
    for path in (path for place in places if place.is_dir() for path in place.iterdir()):
        with suppress(OSError):  # the process has ended
            uids.add(path.lstat().st_uid)
    return bool({uid for uid in uids if uid in _PEOPLE} - {os.getuid()})


def _written_by_others(root: Path) -> list[Path]:
    """Files and folders below a root that another user can change. The root may be missing."""
    found = list[Path]()
    with suppress(OSError):
        found += [root] if _is_open(root.stat()) else []
    folders = [str(root)]
    while folders:  # an environment has tens of thousands of files
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with suppress(OSError):  # the file is gone
                    folders += [entry.path] if entry.is_dir(follow_symlinks=False) else []
                    if not entry.is_symlink() and _is_open(entry.stat(follow_symlinks=False)) and not _of_uv(entry):
                        found.append(Path(entry.path))
    return sorted(found)


def _of_uv(entry: os.DirEntry[str]) -> bool:
    """Whether a file is the empty lock that uv makes in an environment, open to all."""
    return entry.name == ".lock" and not entry.stat(follow_symlinks=False).st_size


def _how_to_close(root: Path, open_ones: list[Path]) -> str:
    """A command that takes nothing from the others who work there, or whose other clone has the same files."""
    foreign = any(path.lstat().st_uid not in (os.getuid(), 0) for path in open_ones)
    of_a_group = root.stat().st_mode & (stat.S_ISGID | stat.S_IWGRP) == stat.S_ISGID | stat.S_IWGRP
    if foreign or of_a_group:
        return f"trust all who may write there, or work in your own: git clone --no-hardlinks {root.resolve()}"
    return f"chmod -R go-w {root}"


def _is_open(found: os.stat_result) -> bool:
    mode, mine = found.st_mode, {os.getuid(), 0}
    return bool(found.st_uid not in mine or mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not _is_own_group(found)))


def _is_own_group(found: os.stat_result) -> bool:
    """Whether the owner is the group's only member. Distributions make such a group for each user."""
    try:
        owner, group = pwd.getpwuid(found.st_uid).pw_name, grp.getgrgid(found.st_gid)
    except KeyError:
        return found.st_gid == found.st_uid
    return group.gr_name == owner and set(group.gr_mem) <= {owner}
