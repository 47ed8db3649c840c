"""What the table of ``make test-all`` counts."""

import json

import pytest

from run_tests import GROUPS, read_outcome

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
        (("skipped", "skipped"), 0, (0, 1, {"no GPU": 2})),  # nothing ran, which is no success
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
    ("areas", "code", "expected"), [([(5, 5), (3, 2)], 1, (7, 1)), ([(5, 5)], 0, (5, 0)), (None, 124, (0, 1))]
)
def test_the_campaign_of_faults(areas, code, expected, tmp_path):
    report = tmp_path / "faults"
    if areas is not None:
        counts = {f"area{number}": {"tried": tried, "held": held} for number, (tried, held) in enumerate(areas)}
        report.write_text(json.dumps({"areas": counts}))
    outcome = read_outcome("faults", report, code, 1.0)
    assert (outcome.passed, outcome.failed) == expected


def test_a_host_whose_gpus_are_shown_runs_what_make_test_runs():
    assert GROUPS["four-gpus"].select == GROUPS["quick"].select
