"""Which folders of the host a command needs inside, each at its own path: DVC and MLflow keep absolute paths."""

from __future__ import annotations

import configparser
import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from samebits.errors import HostError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_TEMPORARY = ".dvc/tmp/exps"  # where DVC runs experiments of a queue, in clones of the repository
_SYSTEM = [Path(f"/{name}") for name in ("bin", "dev", "etc", "lib", "lib64", "proc", "sbin", "sys", "usr")]
_USED = [
    Path(f"/{name}") for name in ("", "home", "home/samebits", "opt", "opt/samebits", "opt/src", "run", "tmp", "var")
]


def folders(cwd: Path, arguments: Sequence[str], tracking_uri: str, files: Iterable[Path] = ()) -> list[Path]:
    """What to mount for a command in ``cwd``: its repository, store and cache, ``files``, and what it is told of.

    It is told of files by its arguments, and by the parameters for the user's model and data.

    Raises:
        HostError: something that is needed lies where the image has files of its own.
    """
    needed = [_repository(cwd), *_shared_git(cwd), *_store(tracking_uri)]
    for folder in needed:
        if _is_the_images(folder.resolve()):
            hint = "keep the repository and MLflow's store in folders of their own"
            raise HostError(f"{folder} cannot be mounted: the image has its own", hint=hint)
    named = [cwd / value for argument in arguments if "/" in (value := _value(argument))]
    named += [path for path in _named_in(cwd, _params_file(arguments)) if _is_there(path)]
    found = [_seen(path.resolve()) for path in [*named, *_caches(cwd)]]
    return outermost([*needed, *files, *(path for path in found if path is not None)])


def outermost(paths: Iterable[Path]) -> list[Path]:
    """Paths without those that lie in another of them."""
    unique = sorted({path.resolve() for path in paths})
    return [path for path in unique if not any(other in path.parents for other in unique)]


def _seen(path: Path) -> Path | None:
    """What to mount so that ``path`` is seen inside; None for what the image has its own of."""
    folder = path
    while not os.path.isdir(folder):  # noqa: PTH112 - too long a name is none
        folder = folder.parent
    if not _is_the_images(folder):
        return folder
    if path == folder or any(system in (path, *path.parents) for system in _SYSTEM):
        return None
    if _is_there(path):
        return path
    hint = "make the folder first, or name one elsewhere"
    raise HostError(f"{path} would not be seen outside: the image has a {folder} of its own", hint=hint)


def _is_there(path: Path) -> bool:
    return os.path.exists(path)  # noqa: PTH110 - too long a name is none


def _is_the_images(folder: Path) -> bool:
    return folder in _USED or any(system in (folder, *folder.parents) for system in _SYSTEM)


def _store(tracking_uri: str) -> list[Path]:
    """The folder of a store that is files."""
    scheme, _, rest = tracking_uri.partition(":")
    if scheme == "sqlite":
        return [Path(rest.removeprefix("///")).parent]
    return [Path(urlsplit(tracking_uri).path)] if scheme == "file" else []


def _value(argument: str) -> str:
    """An argument, or what follows ``--option=``."""
    return argument.partition("=")[2] if argument.startswith("--") and "=" in argument else argument


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


def _params_file(arguments: Sequence[str]) -> str:
    """What ``--params`` says, or its default."""
    for given, following in zip(arguments, [*arguments[1:], "params.yaml"], strict=False):
        option, _, value = given.partition("=")
        if option == "--params":
            return value or following
    return "params.yaml"


def _named_in(cwd: Path, params_file: str) -> Iterator[Path]:
    """Paths of the user's model and data; what is wrong with the file is told by the command itself."""
    try:
        raw = YAML(typ="safe").load(cwd / params_file)
    except (OSError, YAMLError):
        return
    for section in ("model", "data"):
        for text in _texts(raw.get(section) if isinstance(raw, dict) else None):
            yield from (cwd / text, cwd / text.rpartition(":")[0])  # a tensor of a file, or a function of a module


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _caches(cwd: Path) -> Iterator[Path]:
    """A cache of DVC's that is elsewhere: results may be links into it."""
    for name in ("config", "config.local"):
        config = configparser.ConfigParser(interpolation=None)
        with suppress(configparser.Error):
            config.read(cwd / ".dvc" / name, encoding="utf-8")
        if config.has_option("cache", "dir"):
            yield cwd / ".dvc" / config.get("cache", "dir")


def _git(cwd: Path, *arguments: str) -> Path | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return Path(done.stdout.strip()) if done.returncode == 0 and done.stdout.strip() else None
