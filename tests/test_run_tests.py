"""What the table of ``make test-all`` counts."""

import json
import re
import shlex
from collections import Counter

import pytest
from click.testing import CliRunner

import run_tests
from conftest import ROOT
from run_tests import GROUPS, Outcome, main, read_outcome

CASES = {
    "passed": "<testcase/>",
    "failed": "<testcase><failure/></testcase>",
    "error": "<testcase><error/></testcase>",
    "skipped": '<testcase><skipped message="no GPU"/></testcase>',
}


@pytest.mark.parametrize(
    ("cases", "code", "expected"),
    [
        (("passed", "passed", "skipped"), 0, (2, 0, {"no GPU": 1})),
        (("passed", "failed", "error"), 1, (1, 2, {})),
        (("passed",), 3, (1, 1, {})),  # pytest's own end was bad
        (("skipped", "skipped"), 0, (0, 0, {"no GPU": 2})),
        ((), 0, (0, 1, {})),
        (None, 0, (0, 1, {})),  # no report
    ],
)
def test_a_group_of_tests(cases, code, expected, tmp_path):
    report = tmp_path / "quick"
    if cases is not None:
        report.write_text(f"<testsuite>{''.join(map(CASES.get, cases))}</testsuite>")
    outcome = read_outcome("quick", report, code, 1.0)
    assert (outcome.passed, outcome.failed, dict(outcome.skipped)) == expected


@pytest.mark.parametrize(
    ("areas", "code", "expected"),
    [
        ([(5, 5), (3, 2)], 1, (7, 1)),
        ([(5, 5)], 0, (5, 0)),
        (None, 124, (0, 1)),
        (None, 0, (0, 1)),
        ([(0, 0)], 0, (0, 1)),
    ],
)
def test_the_campaign_of_faults(areas, code, expected, tmp_path):
    report = tmp_path / "faults"
    if areas is not None:
        counts = {f"area{number}": {"tried": tried, "held": held} for number, (tried, held) in enumerate(areas)}
        report.write_text(json.dumps({"areas": counts}))
    outcome = read_outcome("faults", report, code, 1.0)
    assert (outcome.passed, outcome.failed) == expected


def test_the_quick_group_and_a_host_whose_gpus_are_shown_run_what_make_test_runs():
    text = (ROOT / "Makefile").read_text()
    two = re.search(r"^TWO := (.*)$", text, re.MULTILINE)[1]
    command = re.search(r"^test: .*\n.* -m pytest (.*)$", text, re.MULTILINE)[1].replace("$(TWO)", two)
    search = "--hypothesis-profile=searching"
    assert (*shlex.split(command), search) == GROUPS["quick"].select == GROUPS["four-gpus"].select


@pytest.mark.parametrize(
    ("named", "ran", "code", "said"),
    [
        (True, {"nodes": (0, 0)}, 1, "nothing of nodes could run here"),
        (True, {"nodes": (1, 0)}, 0, ""),
        (True, {"nodes": (1, 0), "browser": (0, 0)}, 1, "nothing of browser could run here"),
        (False, {"nodes": (0, 0)}, 0, "nothing of nodes could run here"),
        (False, {"nodes": (0, 0), "exact": (1, 1)}, 1, "nothing of nodes could run here"),
    ],
)
def test_a_group_that_was_asked_for_by_name_has_to_run(named, ran, code, said, monkeypatch):
    def run(name, folder, *, coverage):
        passed, failed = ran.get(name, (1, 0))
        return Outcome(group=name, passed=passed, failed=failed, skipped=Counter(["needs root"]), seconds=1.0)

    monkeypatch.setattr(run_tests, "run", run)
    done = CliRunner().invoke(main, list(ran) if named else [])
    assert done.exit_code == code
    assert ("could run here" in done.output) == bool(said)
    assert said in done.output


def test_a_stand_in_of_gpus_takes_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    outcome = run_tests.run("four-gpus", tmp_path)
    assert not outcome.ran
    assert dict(outcome.skipped) == {"needs a C compiler that is called cc": 1}
