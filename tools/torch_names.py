"""Find PyTorch's private names in the library's sources: ``python tools/torch_names.py`` prints them with their lines.

Found are imports from ``torch``, attributes, ``getattr`` and the like with a constant name, overriding methods, and
modules that a text names.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from samebits.host.torch_names import NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator

SRC = Path(__file__).resolve().parent.parent / "src/samebits"
LIST = SRC / "host/torch_names.py"
OTHERS = {"_exit": "os", "_getframe": "sys", "_replace": "named tuples", "_fields": "named tuples"}
"""Private names of others than PyTorch, which Python documents."""


_WHOLE = re.compile(r"torch(\.\w+)*\._[a-zA-Z]\w*(\.\w+)*")


class Use(NamedTuple):
    """A place that uses a private name. ``guarded``: it goes on without it."""

    file: str
    line: int
    guarded: bool


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _own_names(trees: dict[str, ast.Module]) -> set[str]:
    """Private names that the sources themselves define."""
    own = set()
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            own.add(node.attr)
    return own


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _names(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Private names that one node has, whole or their last parts, and whether the node itself is a guard."""
    match node:
        case ast.ImportFrom(module=str(module), names=names):
            yield from ((f"{module}.{one.name}", False) for one in names if _WHOLE.fullmatch(f"{module}.{one.name}"))
        case ast.Import(names=names):
            yield from ((one.name, False) for one in names if _WHOLE.fullmatch(one.name))
        case ast.Constant(value=str(text)) if _WHOLE.fullmatch(text):
            yield text, False
        case ast.Attribute(attr=name):
            if _WHOLE.fullmatch(whole := ast.unparse(node)):
                yield whole, False
            elif _is_private(name):
                yield name, False
        case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), _]) if _is_private(name):
            yield name, True
        case ast.Call(func=ast.Name(id="hasattr"), args=[_, ast.Constant(value=str(name))]) if _is_private(name):
            yield name, True
        case ast.FunctionDef(name=name) if _is_private(name):  # PyTorch calls it, if it knows it
            yield name, True


def _guards(tree: ast.Module) -> set[int]:
    """Lines whose ``ImportError`` or ``AttributeError`` is caught."""
    caught = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            named = [handler.type for handler in node.handlers if handler.type is not None]
        elif isinstance(node, ast.With):
            calls = [item.context_expr for item in node.items]
            named = [one for one in calls if ast.unparse(one).startswith("suppress(")]
        else:
            continue
        if any({"ImportError", "AttributeError"} & {*re.findall(r"\w+", ast.unparse(one))} for one in named):
            caught |= {line for part in node.body for line in range(part.lineno, (part.end_lineno or 0) + 1)}
    return caught


def uses(src: Path = SRC) -> tuple[dict[str, list[Use]], list[str]]:
    """Of each name of ``NAMES`` its uses; and what is used without being listed there, with its place."""
    files = (file for file in sorted(src.rglob("*.py")) if file != LIST)
    trees = {str(file.relative_to(src)): ast.parse(file.read_text(encoding="utf-8")) for file in files}
    own, found, unlisted = _own_names(trees), defaultdict[str, list[Use]](list), list[str]()
    for file, tree in trees.items():
        caught = _guards(tree)
        inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            for name, guards in _names(node):
                if id(node) in inner and "." in name:  # the whole name is longer
                    continue
                line: int = node.lineno  # type: ignore[attr-defined]  # each of these nodes has one
                listed = [one.path for one in NAMES if _is_meant(name, one.path)]
                for path in listed:
                    found[path].append(Use(file, line, guards or line in caught))
                if not listed and name not in own and name not in OTHERS:
                    unlisted.append(f"{file}:{line}: {name}")
    return {path: sorted({*places}) for path, places in found.items()}, unlisted


def _is_meant(name: str, path: str) -> bool:
    """Whether a name in the sources, whole or its last part, is a listed one or a part of it."""
    if "." in name:
        return name == path or name.startswith(f"{path}.")
    return re.sub(r"\(.*?\)", "", path).endswith(f".{name}")


if __name__ == "__main__":
    known, unknown = uses()
    for path, places in sorted(known.items()):
        lines = ", ".join(f"{use.file}:{use.line}" for use in places)
        sys.stdout.write(f"{path}: {lines}\n")
    sys.exit("\n".join(f"not in {LIST.name}: {name}" for name in unknown) or 0)
