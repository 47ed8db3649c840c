"""List handlers of exceptions that no test reached, from what ``make coverage`` left; exit with 1 if there are any.

That is each ``except``, and each block under ``suppress``, which must have begun. Whether a test looks at what is said
then, no line can tell.
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
    """Of each ``except``, and of each block under ``suppress``, its line and the first of its body."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) or (isinstance(node, ast.With) and _suppresses(node)):
            yield node.lineno, node.body[0].lineno


def _suppresses(block: ast.With) -> bool:
    return any("suppress(" in ast.unparse(item.context_expr) for item in block.items)


def main() -> None:
    """Print path, line and source of each."""
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
