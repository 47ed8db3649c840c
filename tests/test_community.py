"""What a newcomer looks for beside the code: licence, changelog, citation, workflows, hooks."""

import hashlib
import itertools
import re
import tomllib

import pytest
from flit_core.config import read_flit_config
from ruamel.yaml import YAML

from conftest import FIRST, ROOT
from run_tests import GROUPS
from samebits import __version__

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
APACHE_2_TEXT = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"


def read(name):
    return YAML(typ="safe").load(ROOT / name)


def test_the_licence_is_whole_and_goes_with_the_package():
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE_2_TEXT
    built = read_flit_config(ROOT / "pyproject.toml").metadata
    assert (built["license_expression"], built["license_files"]) == ("Apache-2.0", ["LICENSE"])


def test_all_say_the_same_of_version_and_licence():
    citation = read("CITATION.cff")
    newest = re.search(r"\b\d+\.\d+\.\d+\b", (ROOT / "CHANGELOG.md").read_text().split("## [Unreleased]")[1])[0]
    assert {__version__, PROJECT["version"], citation["version"], newest} == {__version__}
    assert PROJECT["license"] == citation["license"]
    assert PROJECT["authors"] == citation["authors"]


def commands(workflow):
    """Every line that a workflow runs, for each row of its matrix."""
    for job in read(workflow)["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for values in itertools.product(*matrix.values()):
            row = dict(zip(matrix, values, strict=True))
            for step in job["steps"]:
                line = re.sub(r"\$\{\{ matrix\.(\w+) \}\}", lambda found, row=row: row[found[1]], step.get("run", ""))
                yield from filter(None, line.splitlines())


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda workflow: workflow.name)
def test_workflows_run_what_a_developer_runs(workflow):
    targets = set(re.findall(r"^(\.?[a-z-]+):", MAKEFILE, flags=re.MULTILINE)) - {".PHONY"}
    targets |= {f"test-{group}" for group in GROUPS}
    run = list(commands(workflow))
    assert run
    for line in run:
        if (ROOT / line).is_file():  # the gate, which a developer runs too
            continue
        assert set(line.partition("make ")[2].split()) <= targets, line
        assert "make " in line, line


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda workflow: workflow.name)
def test_workflows_may_only_read_and_name_their_actions_by_commit(workflow):
    assert read(workflow)["permissions"] == {"contents": "read"}
    used = re.findall(r"uses: (\S+)", workflow.read_text())
    assert used
    assert [action for action in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action)] == []


def test_all_versions_of_python_are_tested():
    matrix = read(".github/workflows/ci.yml")["jobs"]["gate"]["strategy"]["matrix"]
    tested = set(matrix["python"])
    named = {found[1] for line in PROJECT["classifiers"] if (found := re.search(r":: (3\.\d+)$", line))}
    first, beyond = (int(minor) for minor in re.findall(r"3\.(\d+)", PROJECT["requires-python"]))
    assert tested == named == {f"3.{minor}" for minor in range(first, beyond)}


def test_the_hooks_are_those_of_make_lint():
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", MAKEFILE, flags=re.MULTILINE)[1]
    linted = re.findall(r"^\t@\$\(RUN\) (.+)$", recipe, flags=re.MULTILINE)
    (local,) = read(".pre-commit-config.yaml")["repos"]
    assert [hook["entry"] for hook in local["hooks"]] == [f".venv/bin/{command}" for command in linted]
    assert {hook["language"] for hook in local["hooks"]} == {"system"}


def test_the_modules_that_begin_first_are_there():
    assert [name for name in FIRST if not (ROOT / "tests" / name).exists()] == []
