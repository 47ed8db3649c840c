"""Benchmarks and tools, which nothing else runs, use names that the library still has."""

import re
import subprocess
import sys

import pytest

from conftest import ROOT, smoke

SCRIPTS = [file for folder in ("benchmarks", "tools") for file in sorted((ROOT / folder).glob("*.py"))]


@pytest.fixture(scope="module")
def trouble():
    """What importing each script prints; one process for all, because most import torch."""
    code = """
import importlib.util, os, sys
tests, *files = sys.argv[1:]
usual = list(sys.path)
for file in files:
    sys.path[:] = [os.path.dirname(file), *usual]  # as a command has it
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(tests):
            del sys.modules[name]  # that the script before has found
    spec = importlib.util.spec_from_file_location("script", file)
    module = sys.modules["script"] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        print(file, type(error).__name__, error)
"""
    command = [sys.executable, "-c", code, str(ROOT / "tests"), *map(str, SCRIPTS)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_a_script_can_be_imported(script, trouble):
    assert str(script) not in trouble, trouble


BENCHMARKS = [file.stem for file in sorted((ROOT / "benchmarks").glob("*.py")) if "__main__" in file.read_text()]
ELSEWHERE = {"container", "nodes", "scale"}  # beside the tests that need an engine, or machines, too


def test_all_of_them_are_measured():
    """Those that others start as a script of their own take no options that are the benchmark's."""
    (line,) = re.findall(r"^BENCHMARKS := ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert set(line.replace("\\", "").split()) == {*BENCHMARKS} - {"script"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name not in {*ELSEWHERE, "script"}])
def test_it_still_works(name):
    smoke(name)
