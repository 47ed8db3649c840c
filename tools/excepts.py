"""List the exception handlers that no test reached, from the data of ``make coverage``. Exit code 1: there are some.

A handler is an ``except`` or a block under ``suppress``; the block must have begun. The data cannot tell whether a
test checks the message.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from coverage import Coverage

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent


def handlers(tree: ast.AST) -> Iterator[tuple[int, int]]:
    """The line of each handler and the first line of its body."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) or (isinstance(node, ast.With) and _suppresses(node)):
            yield node.lineno, node.body[0].lineno


def _suppresses(block: ast.With) -> bool:
    return any("suppress(" in ast.unparse(item.context_expr) for item in block.items)


def main() -> None:
    """Print path, line and source of each unreached handler."""
    coverage = Coverage()
    coverage.load()
    data = coverage.get_data()
    measured = {Path(name).resolve(): set(data.lines(name) or ()) for name in data.measured_files()}
    total = missed = 0
    for path in sorted((ROOT / "src").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for line, body in handlers(ast.parse(text)):
            total += 1
            if body not in measured.get(path, ()):
                missed += 1
                print(f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[line - 1].strip()}")
    print(f"{total - missed} of {total} handlers of exceptions were reached")
    sys.exit(missed > 0 or not total)


if __name__ == "__main__":
    main()
