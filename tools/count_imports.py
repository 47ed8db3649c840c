"""Count the modules, lines and rooms of a package, and the imports between rooms, as a measure of its coupling.

    python tools/count_imports.py [src/samebits]

A room is a package or module of the first level. An arrow leads from a room to each room that it imports. A room's
floor is its position in the longest chain of arrows; rooms that reach each other share a floor. Imports under
TYPE_CHECKING are no arrows. They are counted separately.
"""

from __future__ import annotations

import ast
import graphlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

Graph = dict[str, set[str]]


def files_of(package: Path) -> dict[str, Path]:
    """The file of each module by the module's name, ``samebits.records.card``. A package's is its ``__init__.py``."""
    files = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return files


def imports(file: Path, modules: Collection[str], *, for_types: bool) -> set[str]:
    """The modules that a file imports anywhere, with ``for_types`` also under TYPE_CHECKING."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not for_types:
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name in modules)
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}:{node.lineno}: relative imports are not followed"
            if node.module in modules:
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                inside = {name for name in names if name in modules}
                found.update(inside if inside == names else {*inside, str(node.module)})
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(file.read_text(encoding="utf-8")))
    return found


def closure(script: Path, modules: Mapping[str, Path]) -> set[Path]:
    """Files of all modules that a script imports, directly or indirectly, and of their packages."""
    todo, seen = [script], {script}
    while todo:
        for module in imports(todo.pop(), modules, for_types=False):
            for name in (module.rsplit(".", depth)[0] for depth in range(module.count(".") + 1)):
                if (file := modules[name]) not in seen:
                    seen.add(file)
                    todo.append(file)
    return seen - {script}


def room(module: str) -> str:
    """The room of a module. The package's ``__init__.py`` is one too."""
    return module.split(".")[1] if "." in module else "__init__"


def between_rooms(files: Mapping[str, Path], *, for_types: bool = False) -> set[tuple[str, str]]:
    """Pairs of modules in different rooms: the first imports the second."""
    return {
        (module, other)
        for module, file in files.items()
        for other in imports(file, files, for_types=for_types)
        if room(other) != room(module)
    }


def arrows(pairs: Collection[tuple[str, str]]) -> set[tuple[str, str]]:
    """The arrows of pairs of modules."""
    return {(room(module), room(other)) for module, other in pairs}


def floors(rooms: Collection[str], pairs: Collection[tuple[str, str]]) -> list[set[frozenset[str]]]:
    """Rooms by floor, from those without imports upwards. Rooms that reach each other are in one set."""
    reached: Graph = {here: {here} for here in rooms}
    while grown := [(a, b) for a, b in pairs if not reached[b] <= reached[a]]:
        for a, b in grown:
            reached[a] |= reached[b]
    together = {here: frozenset(there for there in reached[here] if here in reached[there]) for here in rooms}
    below = {group: {together[b] for a, b in pairs if a in group} - {group} for group in together.values()}
    level: dict[frozenset[str], int] = {}
    for group in graphlib.TopologicalSorter(below).static_order():
        level[group] = max((level[under] + 1 for under in below[group]), default=0)
    return [{group for group in level if level[group] == floor} for floor in sorted(set(level.values()))]


def count(package: Path) -> str:
    """The figures as text, then the floors from the top."""
    files = files_of(package)
    rooms = {room(module) for module in files}
    packages = [file.parent for file in files.values() if file.name == "__init__.py" and file.parent != package]
    pairs, with_types = between_rooms(files), between_rooms(files, for_types=True)
    storeys = floors(rooms, arrows(pairs))
    tangles = [sorted(group) for storey in storeys for group in storey if len(group) > 1]
    first = sum(folder.parent == package for folder in packages)
    figures = {
        "modules": len(files),
        "lines": sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files.values()),
        "packages": f"{first}, {len(packages)} with those inside",
        "rooms": len(rooms),
        "arrows": f"{len(arrows(pairs))}, {len(arrows(with_types))} with imports for types",
        "imports between rooms": f"{len(pairs)}, {len(with_types)} with imports for types",
        "floors": len(storeys),
        "rooms that reach each other": "; ".join(", ".join(group) for group in sorted(tangles)) or "none",
    }
    lines = [f"{name}: {value}" for name, value in figures.items()]
    for number, storey in reversed(list(enumerate(storeys, start=1))):
        lines.append(f"  {number}: " + ", ".join(sorted(" + ".join(sorted(group)) for group in storey)))
    return "\n".join(lines)


if __name__ == "__main__":
    print(count(Path(sys.argv[1] if len(sys.argv) > 1 else "src/samebits").resolve()))
