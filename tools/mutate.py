"""Change the library at random places, one token at a time, and see whether the tests notice.

    python tools/mutate.py --changes 300 --seed 0

The places and changes follow from the seed alone. Each change is tried by the tests that ran its line, then by those of
its package, then by all of `make test`, in copies of the commit, until one fails. What is known is kept in a file, so
that a run that was stopped goes on. It ends with a table by package and the changes that nothing noticed.
"""

from __future__ import annotations

import collections
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import tokenize
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import coverage

ROOT = Path(__file__).resolve().parent.parent
QUICK = "not slow and not container"
_SWAPS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+", "*": "+", "/": "*",
    "//": "*", "%": "//", "+=": "-=", "-=": "+=", "and": "or", "or": "and", "not": "", "is": "is not",
    "in": "not in", "if": "if not", "while": "while not", "True": "False", "False": "True", "any": "all", "all": "any",
    "min": "max", "max": "min", "break": "continue", "continue": "break", "sorted": "list",
}  # fmt: skip
_TWO = ("-n", "2", "--dist", "loadfile")
_MOST_TESTS = 60  # that ran a line and are tried first
_SECONDS = 1500.0  # until a change that has no end counts as noticed


@dataclass(frozen=True)
class Change:
    """One token of a file, by line and column, and what takes its place."""

    file: str
    line: int
    column: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column + 1}: {self.before} -> {self.after or 'nothing'}"

    @property
    def package(self) -> str:
        """The package of the library that it is in."""
        return Path(self.file).parts[2].removesuffix(".py")

    def made(self, root: Path) -> str:
        """The text of its file with it."""
        lines = (root / self.file).read_text(encoding="utf-8").splitlines(keepends=True)
        text = lines[self.line - 1]
        assert text[self.column :].startswith(self.before)
        lines[self.line - 1] = text[: self.column] + self.after + text[self.column + len(self.before) :]
        return "".join(lines)

    @property
    def compiles(self) -> bool:
        """Whether Python takes it."""
        try:
            with warnings.catch_warnings(action="ignore"):
                compile(self.made(ROOT), self.file, "exec")
        except SyntaxError:
            return False
        return True


def changes_of(path: Path) -> list[Change]:
    """Every change that one file may have, some of which do not compile; none in types, imports, texts and comments."""
    text, found, in_signature = path.read_text(encoding="utf-8"), [], False
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NEWLINE:
            in_signature = False
        elif token.type == tokenize.NAME and token.string in ("def", "import", "from", "class", "assert"):
            in_signature = True
        if in_signature or "TYPE_CHECKING" in token.line or token.line.lstrip().startswith("@"):
            continue
        after = _SWAPS.get(token.string)
        if token.type == tokenize.NUMBER and token.string.isdecimal():
            after = str(int(token.string) + 1)
        if after is not None and token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER):
            found.append(Change(str(path.relative_to(ROOT)), *token.start, token.string, after))
    return found


def chosen(count: int, seed: int) -> list[Change]:
    """So many changes, each line as likely as every other."""
    by_line = collections.defaultdict(list)
    for path in sorted((ROOT / "src").rglob("*.py")):
        for change in changes_of(path):
            by_line[change.file, change.line].append(change)
    draw, found = random.Random(seed), list[Change]()  # noqa: S311
    for place in draw.sample(sorted(by_line), len(by_line)):
        if len(found) == count:
            break
        change = draw.choice(by_line[place])
        found += [change] if change.compiles else []
    return found


class Copy:
    """A copy of the commit in which changes are tried, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.exists():
            subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
            subprocess.run(["make", ".venv"], cwd=folder, check=True, capture_output=True)

    def test(self, *arguments: str, seconds: float = _SECONDS) -> str:
        """Whether they passed: "passed", "failed" or "endless"."""
        command = [".venv/bin/python", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", QUICK, *arguments]
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        with subprocess.Popen(command, cwd=self.folder, env=environ, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL, start_new_session=True) as process:  # fmt: skip
            try:
                return "passed" if process.wait(seconds) in (0, 5) else "failed"
            except subprocess.TimeoutExpired:
                return "endless"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def contexts(self) -> Path:
        """The lines that each test has run, by a run of all."""
        file = self.folder / ".coverage"
        if not file.exists():
            settings = (self.folder / "pyproject.toml").read_text(encoding="utf-8")
            rc = self.folder / "coverage.toml"
            marked = '[tool.coverage.run]\ndynamic_context = "test_function"\n'
            rc.write_text(settings.replace("[tool.coverage.run]\n", marked), encoding="utf-8")
            command = [".venv/bin/coverage", "run", f"--rcfile={rc}", "-m", "pytest", "-q", "-m", QUICK, *_TWO]
            subprocess.run(command, cwd=self.folder, check=True, env={**os.environ, "COVERAGE_RCFILE": str(rc)})
            subprocess.run([".venv/bin/coverage", "combine", f"--rcfile={rc}", "--quiet"], cwd=self.folder, check=True)
        return file


class Lines:
    """Which tests have run a line."""

    def __init__(self, file: Path, root: Path) -> None:
        self._data, self._root = coverage.CoverageData(str(file)), root
        self._data.read()
        self._modules = {path.stem: path.relative_to(root) for path in (root / "tests").rglob("test_*.py")}

    def tests(self, change: Change) -> list[str]:
        """Those of one line, by their ids."""
        lines = self._data.contexts_by_lineno(str(self._root / change.file))
        names = [name.split(".") for name in lines.get(change.line, []) if name]
        found = [f"{self._modules[name[0]]}::{'::'.join(name[1:])}" for name in names if name[0] in self._modules]
        return sorted(set(found))[:_MOST_TESTS]


def outcome(change: Change, copy: Copy, lines: Lines) -> str:
    """What noticed it: the tests that ran its line, those of its package, all; or nothing."""
    subprocess.run(["git", "checkout", "--quiet", "--", "src"], cwd=copy.folder, check=True)
    (copy.folder / change.file).write_text(change.made(copy.folder), encoding="utf-8")
    shutil.rmtree(copy.folder / ".pytest_cache", ignore_errors=True)
    package = copy.folder / "tests" / change.package
    steps = {"line": lines.tests(change), "package": [f"tests/{change.package}"] if package.is_dir() else [],
             "all": ["tests"]}  # fmt: skip
    for name, arguments in steps.items():
        if arguments and (result := copy.test(*arguments)) != "passed":
            return f"{name}: {result}"
    return "nothing"


@click.command()
@click.option("--changes", default=300, show_default=True, help="How many places are changed.")
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--work", default=Path(tempfile.gettempdir()) / "samebits-mutations", help="Folder for copies and results."
)
@click.option("--copies", default=2, show_default=True, help="How many are tried at a time.")
def main(changes: int, seed: int, work: Path, copies: int) -> None:
    """Try them, and print what was noticed."""
    folder = Path(work)
    folder.mkdir(parents=True, exist_ok=True)
    results_file = folder / f"results-{seed}.json"
    results: dict[str, str] = json.loads(results_file.read_text()) if results_file.exists() else {}
    places = chosen(changes, seed)
    trees = [Copy(folder / f"copy{number}") for number in range(copies)]
    lines = Lines(trees[0].contexts(), trees[0].folder)
    lock, free = threading.Lock(), list(trees)

    def attempt(change: Change) -> None:
        key = json.dumps(asdict(change))
        if key in results:
            return
        with lock:
            tree = free.pop()
        result = outcome(change, tree, lines)
        with lock:
            free.append(tree)
            results[key] = result
            results_file.write_text(json.dumps(results, indent=1))
            click.echo(
                f"{len(results)}: {change.file}:{change.line} {change.before} -> {change.after}: {result}", err=True
            )

    with ThreadPoolExecutor(copies) as pool:
        list(pool.map(attempt, places))
    report(places, results)


def report(places: list[Change], results: dict[str, str]) -> None:
    """A table by package, and the changes that nothing noticed."""
    told = {change: results[json.dumps(asdict(change))] for change in places}
    click.echo("| package | changes | noticed |\n| --- | --- | --- |")
    for package in sorted({change.package for change in places}):
        those = [result for change, result in told.items() if change.package == package]
        click.echo(f"| {package} | {len(those)} | {len(those) - those.count('nothing')} |")
    unseen = [change for change, result in told.items() if result == "nothing"]
    click.echo(f"| all | {len(places)} | {len(places) - len(unseen)} |\n")
    for change in unseen:
        click.echo(change)


if __name__ == "__main__":
    sys.exit(main())
