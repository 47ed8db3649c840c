"""Finds the files and packages that a user's model is made of, so that an edit of any of them trains again.

Imports are followed through the text of each file, also imports inside functions. Files that a process imports or opens
by other means are added once it has run. This module imports no user code and does not need torch.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sys
from contextlib import contextmanager, suppress
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, PackageNotFoundError, distribution, packages_distributions
from pathlib import Path
from pkgutil import get_importer
from types import MappingProxyType
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from samebits.errors import HostError, UserError, few, in_system, is_own
from samebits.files import Part, read_json, write_json
from samebits.hashes import sha256
from samebits.models import UserModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from samebits.models import Model

_MEMORY = Path(".samebits/sources.json")
_OF_TOOLS = {".git", ".dvc", ".samebits", "__pycache__"}


class Sources(Part):
    """SHA-256 of each file, and the version of each package.

    The key of a file is its path from the root; for files elsewhere, it is the module's name.
    """

    files: dict[str, str]
    packages: dict[str, str]

    @property
    def digest(self) -> str:
        """One hash of all files and packages."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def find_sources(model: Model, ran: Mapping[str, Path] = MappingProxyType({})) -> Sources | None:
    """The sources of a user's model; None for a built-in one.

    ``ran`` are additional files by name that a process has imported or opened, as ``Watched`` returns them.
    """
    if not isinstance(model, UserModel):
        return None
    files = {**_given(model.source), **ran}
    todo = [model.name.partition(":")[0]]
    for name, path in files.items():
        todo += _imports(path, name.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    packages = _follow(todo, files)
    hashes = {name: sha256(path) for name, path in sorted(files.items()) if path.is_file()}
    return Sources(files=hashes, packages=_versions(packages))


class _Memory(Part):
    """The files found by running a model, by name, and the digest of all its sources at that time."""

    files: dict[str, str]
    digest: str


def recalled(model: Model) -> dict[str, Path]:
    """The files that earlier runs of this model on this machine found."""
    memory = _memories().get(model.name)
    return {name: Path(path) for name, path in memory.files.items() if Path(path).is_file()} if memory else {}


def is_known(model: Model, sources: Sources) -> bool:
    """Whether a run of the model has found these sources in their present state."""
    memory = _memories().get(model.name)
    return memory is not None and memory.digest == sources.digest


def remember(model: Model, ran: Mapping[str, Path]) -> None:
    """Remember the files that a run of the model has imported and opened, for the next search for its sources."""
    files = {**recalled(model), **ran}
    sources = find_sources(model, files)
    assert sources is not None, "a built-in model has no sources"
    one = _Memory(files={name: str(path) for name, path in files.items()}, digest=sources.digest)
    with suppress(UserError, HostError):  # the next run finds them again
        write_json(_MEMORY, {name: m.model_dump() for name, m in {**_memories(), model.name: one}.items()})


def _memories() -> dict[str, _Memory]:
    try:
        return TypeAdapter(dict[str, _Memory]).validate_python(read_json(_MEMORY, made_by="nothing"))
    except ValueError:  # missing or damaged: the next run finds the files again
        return {}


class Watched:
    """The files that this process imports and opens for a user's model, from the construction of this object on."""

    def __init__(self) -> None:
        self._before = set(sys.modules)
        self._opened: set[str] = set()

    @contextmanager
    def opening(self) -> Iterator[None]:
        """A block in which the model's code runs: files opened in it belong to the model."""
        _hear_of_files()
        _LISTENING.append(self._opened)
        try:
            yield
        finally:
            _LISTENING.remove(self._opened)

    def files(self) -> dict[str, Path]:
        """Files by name: the user's own modules, and other files read below the root."""
        found = {}
        for name, module in list(sys.modules.items()):
            path = _file_of(getattr(module, "__spec__", None))
            if path and name != "__main__" and is_own(path) and (name not in self._before or _below_root(path)):
                found[_named(path, name)] = path
        return found | {_named(path, path.name): path for path in self._data() if _below_root(path)}

    def remember(self, model: Model) -> None:
        """Remember files that no earlier run on this machine found; warn, because edits of them went unnoticed."""
        if not isinstance(model, UserModel):
            return
        before = recalled(model)
        if new := {name: path for name, path in self.files().items() if name not in before}:
            known = find_sources(model, before)
            late = [name for name in new if known is not None and name not in known.files]
            remember(model, new)
            if late:
                text = f"{few(late)}: first read in this training; an edit of it trains again from now on"
                sys.stderr.write(f"{text}. hint: import it at the top of one of the model's files\n")

    def unseen(self) -> list[str]:
        """Files read outside the root, whose edits go unnoticed."""
        root = Path.cwd().resolve()
        return [str(path) for path in self._data() if not (path.is_relative_to(root) or in_system(path))]

    def _data(self) -> list[Path]:
        paths = map(Path, sorted(self._opened))
        return [path for path in paths if path.suffix not in {".py", ".pyc"} and path.is_file()]


# -- what is opened --------------------------------------------------------------------------------------------

_LISTENING: list[set[str]] = []


@cache
def _hear_of_files() -> None:
    """Install an audit hook that hears of each opened file; it stays for the life of the process."""

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and _LISTENING and isinstance(arguments[0], str | os.PathLike):
            mode, flags = arguments[1], arguments[2]
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if not writes and not (isinstance(mode, str) and set(mode) & set("wax+")):
                for opened in _LISTENING:
                    opened.add(os.path.abspath(arguments[0]))  # noqa: PTH100 - no link is followed, nothing is read

    sys.addaudithook(hook)


# -- imports in the text -----------------------------------------------------------------------------------------


def _follow(modules: list[str], files: dict[str, Path]) -> set[str]:
    """Add to ``files`` those of modules, of their packages and of all their imports; return installed packages."""
    packages: set[str] = set()
    seen: set[str] = set()
    while modules:
        name = modules.pop()
        top = name.partition(".")[0]
        if name in seen or top in sys.stdlib_module_names:
            continue
        for found, path in _located(name):
            if not is_own(path):
                packages |= {top} - {"samebits"}
            elif found not in seen:
                files[_named(path, found)] = path
                modules += _imports(path, found)
            seen.add(found)
        seen.add(name)
    return packages


def _imports(path: Path, module: str) -> list[str]:
    """The names in all imports of a file; some of them are functions instead of modules."""
    if path.suffix != ".py":
        return []
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []  # its import will raise the error
    parts = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = parts[: len(parts) - node.level + 1] if node.level else []
            base = [*above, *([node.module] if node.module else [])]
            found += [".".join(base), *(".".join([*base, alias.name]) for alias in node.names)]
    return [name for name in found if name]


def search_path() -> list[str]:
    """``sys.path`` with the working directory: after Python's own modules, which no file there replaces."""
    here = str(Path.cwd())
    if here in sys.path:
        return sys.path
    installed = {"site-packages", "dist-packages"}
    at = next((i for i, entry in enumerate(sys.path) if Path(entry).name in installed), len(sys.path))
    return [*sys.path[:at], here, *sys.path[at:]]


def _located(name: str) -> list[tuple[str, Path]]:
    """The files of a dotted name and of the packages above it, as far as they exist; nothing is imported."""
    found: list[tuple[str, Path]] = []
    where: list[str] | None = None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        prefix = ".".join(parts[:count])
        spec = _spec(prefix, where)
        if spec is None:
            break
        if path := _file_of(spec):
            found.append((prefix, path))
        if spec.submodule_search_locations is None:
            break
        where = list(spec.submodule_search_locations)
    return found


def _spec(name: str, where: list[str] | None) -> ModuleSpec | None:
    """As ``PathFinder.find_spec``, which needs the packages above a namespace to be imported."""
    portions: list[str] = []
    for entry in search_path() if where is None else where:
        finder = get_importer(entry)
        spec = finder.find_spec(name) if finder else None
        if spec is not None and spec.loader is not None:
            return spec
        portions += (spec and spec.submodule_search_locations) or []
    if portions:
        namespace = ModuleSpec(name, None, is_package=True)
        namespace.submodule_search_locations = portions
        return namespace
    if where is None:
        hooks = (finder for finder in sys.meta_path if finder is not PathFinder)  # as of editable installations
        return next((spec for hook in hooks if (spec := hook.find_spec(name, None))), None)
    return None


def _file_of(spec: ModuleSpec | None) -> Path | None:
    origin = spec.origin if spec is not None and spec.has_location else None
    if not origin:
        return None
    file = Path(origin).absolute()
    return file.resolve() if file.is_symlink() else _resolved(file.parent) / file.name


@cache
def _resolved(folder: Path) -> Path:
    """Modules are many, and their folders few."""
    return folder.resolve()


def _given(source: str | None) -> dict[str, Path]:
    """The files of ``model.source``, which count as the model's even if it does not import them."""
    if source is None:
        return {}
    path = Path(source).resolve()
    inside = [path] if path.is_file() else [one for one in sorted(path.rglob("*")) if one.is_file()]
    return {_named(one, one.name): one for one in inside if not _OF_TOOLS & {*one.relative_to(path).parts}}


def _below_root(path: Path) -> bool:
    """Whether a file is below the root, but not in a folder of git, DVC, samebits or a virtual environment."""
    root = Path.cwd().resolve()
    parts = path.relative_to(root).parts if path.is_relative_to(root) else (".git",)
    return not (_OF_TOOLS & {*parts} or any(part.startswith(".venv") for part in parts))


def _named(path: Path, name: str) -> str:
    """A file's path from the root; for a file elsewhere ``name``, which is the same on every host."""
    root = Path.cwd().resolve()
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else name


_distributions = cache(packages_distributions)  # which reads every package's list of files


def _versions(packages: set[str]) -> dict[str, str]:
    """Versions by name: of the distribution that is called as the package, or of the last one that has it."""
    versions = {}
    for package in sorted(packages):
        found = _distribution(package) or _distribution([package, *_distributions().get(package, [])][-1])
        versions[found.metadata["Name"] if found else package] = found.version if found else "unknown"
    return versions


def _distribution(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None
