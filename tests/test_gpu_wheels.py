"""What a check needs on a host that has PyTorch alone, and the pins of it."""

import ast
import re
import sys
from importlib.metadata import packages_distributions

import gpu_wheels
from conftest import ROOT

FOLDERS = [ROOT / name for name in ("src", "tools", "tests", "tests/numerics", "benchmarks")]
NOT_NEEDED = {"torch", "mlflow", "sqlalchemy", "docker", "requests"}
"""Beside PyTorch, what tracking and containers alone import, and no stage without them."""


def file_of(module):
    for folder in FOLDERS:
        for file in (folder / f"{module.replace('.', '/')}.py", folder / module.replace(".", "/") / "__init__.py"):
            if file.is_file():
                return file
    return None


def foreign():
    """Packages of others that the check, the stages and the tests of GPUs import anywhere."""
    todo = [ROOT / "tools/gpu_check.py", ROOT / "tests/conftest.py", ROOT / "benchmarks/exact.py",
            *(ROOT / "pipeline").glob("*.py"), *(ROOT / "tests/gpu").glob("*.py")]  # fmt: skip
    seen, found = set(), set()
    while todo:
        file = todo.pop()
        if file in seen:
            continue
        seen.add(file)
        for node in ast.walk(ast.parse(file.read_text())):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
            own = [here for name in names if (here := file_of(name))]
            todo += own
            tops = {name.partition(".")[0] for name in names}
            found |= {top for top in tops if top not in sys.stdlib_module_names and not file_of(top)}
    return found


def test_all_that_the_check_imports_is_gathered():
    distributions, gathered = packages_distributions(), {*gpu_wheels.closure()}
    of = {top: {re.sub(r"[-_.]+", "-", name).lower() for name in distributions[top]} for top in foreign() - NOT_NEEDED}
    assert {top for top, names in of.items() if not names & gathered} == set()
    named = {name.replace(".", "-") for name in gpu_wheels.NEEDED}
    assert named - set().union(*of.values()) == {"expecttest", "pytest-timeout"}  # torch.testing's, and our settings'


def test_pins_are_those_of_the_lock_for_that_python():
    lock = (ROOT / "requirements.gpu.lock").read_text()
    names = gpu_wheels.closure()
    pins = {python: gpu_wheels.pins(names, lock, python) for python in ("3.11", "3.13")}
    for text in pins.values():
        lines = [line for line in text.splitlines() if "==" in line]
        assert [line.partition("==")[0] for line in lines] == sorted(names)
        assert all(line in lock for line in text.splitlines() if "--hash" in line)
        assert "python_full_version" not in text
        assert text.count("--hash") >= len(names)
    assert pins["3.11"] != pins["3.13"]  # of NumPy there are two
