"""The table of attempts to do harm."""

import sys

from conftest import ROOT

sys.path.append(str(ROOT / "tools"))
import attacks

HELD, WARNED = (f'<property name="outcome" value="{outcome}"/></properties>' for outcome in ("held", "warned"))
REPORT = f"""<testsuites><testsuite>
<testcase name="test_a_b[x|y]"><properties><property name="attacker" value="a server"/>{WARNED}</testcase>
<testcase name="test_c"><properties><property name="attacker" value="a patch"/>{HELD}<failure/></testcase>
<testcase name="test_d"><properties><property name="attacker" value="a patch"/>{HELD}<skipped/></testcase>
<testcase name="test_e"><properties><property name="attacker" value="a patch"/>{HELD}</testcase>
<testcase name="test_of_another_kind"></testcase>
</testsuite></testsuites>"""


def test_the_table_says_of_each_attempt_whether_it_was_held(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    found = attacks.attempts(tmp_path / "report.xml")
    assert found == [
        ("a patch", "c", "NOT HELD"),
        ("a patch", "d", "not tried"),
        ("a patch", "e", "held"),
        ("a server", "a b (x|y)", "warned"),
    ]
    lines = attacks.table(found).splitlines()
    assert lines[-3] == "| a server | a b (x\\|y) | warned |"
    assert lines[-1] == "4 attempts: 1 NOT HELD, 1 not tried, 1 held, 1 warned"
