"""The campaign's own tools."""

import json

import pytest
from ruamel.yaml import YAML

from conftest import ROOT
from faults import inputs, subject, writes
from faults.area import Case, Missed
from faults.campaign import AREAS, Result, attempt, too_few
from faults.inputs_bench import Bench
from faults.inputs_records import _signed
from faults.kills import STEPS, _is_told, one_of
from faults.subject import Broken, Sandbox
from samebits.records.log import EndEvent, LossesEvent, line_of, parse_event


@pytest.mark.parametrize(
    "event",
    [
        EndEvent(time_ms=3, status="FINISHED"),
        LossesEvent(time_ms=1, first_step=1, losses=[0.1, 1e-7], learning_rates=[0.5, 0.25]),
    ],
)
def test_a_line_that_was_changed_and_signed_is_read_again(event, tmp_path):
    """Else a campaign that changes what a line says would test the checksum alone."""
    tree = json.loads(line_of(event))
    changed = _signed(json.dumps(tree | {"time_ms": 7}).encode())
    assert parse_event(changed + b"\n", tmp_path) == event.model_copy(update={"time_ms": 7})
    assert parse_event(_signed(line_of(event)) + b"\n", tmp_path) == event


@pytest.mark.parametrize("line", [b"[" * 100_000, b"{", b"\xff", b""])
def test_a_line_that_is_no_json_is_signed_as_it_is(line):
    assert _signed(line).startswith(line[:-1] + b',"crc32":"')


@pytest.mark.parametrize(
    ("raised", "counts"),
    [(None, (2, 2, 0, 0)), (Missed(), (0, 0, 2, 0)), (Broken("bits"), (2, 0, 0, 1)), (OSError("full"), (2, 0, 0, 1))],
)
def test_a_fault_that_came_too_late_is_not_counted(raised, counts):
    def run():
        if raised:
            raise raised

    result = Result("kills")
    attempt(result, Case("a kill", run, faults=2), "kills/1", "ONLY=kills/1")
    assert (result.tried, result.held, result.missed, len(result.failures)) == counts


@pytest.mark.parametrize(
    ("told", "is_told"),
    [
        ("", False),
        ("the worker of rank 1 was ended by SIGKILL. hint: run with --debug", False),
        ("the worker of rank 0 was ended by SIGKILL at step 5", False),
        ("the worker of rank 1 was ended by SIGKILL at step 5. hint: ", True),
        (f"the worker of rank 1 was ended by SIGKILL at step {STEPS + 1}", False),
        ("the worker of rank 1 was ended by SIGKILL while it prepared. hint: ", True),
        ("the worker of rank 1 was ended by SIGKILL after its work", True),
    ],
)
def test_a_killed_rank_has_to_be_named_with_its_place(told, is_told):
    assert _is_told("the worker of rank 1 was ended by SIGKILL", told) is is_told
    assert _is_told("", told)


@pytest.mark.parametrize(
    ("position", "living", "ranks", "named"),
    [(1, 4, 4, {1}), (1, 3, 4, {1, 2}), (0, 1, 4, {0, 1, 2, 3}), (2, 3, 4, {2, 3}), (0, 1, 1, {0}), (1, 5, 4, {1})],
)
def test_a_killed_worker_is_any_that_may_stand_there(position, living, ranks, named):
    pattern = f"the worker of rank {one_of(position, living, ranks)} was ended by SIGKILL"
    told = {rank for rank in range(8) if _is_told(pattern, f"the worker of rank {rank} was ended by SIGKILL at step 1")}
    assert told == named


def test_a_campaign_of_an_hour_that_tries_too_little_has_failed():
    enough = {name: Result(area.UNIT, tried=area.IN_AN_HOUR) for name, area in AREAS.items()}
    assert too_few(enough) == []
    assert too_few(enough | {"kills": Result("kills", tried=199)}) == ["kills: 199 kills tried, expected at least 200"]


def test_code_that_bad_input_runs_is_seen(tmp_path):
    """A command that it runs works in the repository, a pickle makes a file beside it."""
    for touched in ("repository/canary", "repository/data/canary", "canary"):
        bench = Bench(tmp_path / touched.replace("/", "-"), {})
        bench.check_around()
        file = bench.outside.parent / touched
        file.parent.mkdir(exist_ok=True)
        file.touch()
        with pytest.raises(Broken, match="code in a file was executed"):
            bench.check_around()


def test_a_file_that_a_sender_removes_is_no_leftover(tmp_path, monkeypatch):
    box = Sandbox(tmp_path)
    left, removed = box.folder / "left.samebits.tmp", box.folder / "removed.samebits.tmp"
    left.touch()
    removed.touch()
    monkeypatch.setattr(subject.time, "sleep", lambda _: removed.unlink(missing_ok=True))
    assert box.leftovers() == [str(left)]


def test_every_stage_gets_bad_input_and_has_writes_that_fail():
    stages = YAML(typ="safe").load((ROOT / "dvc.yaml").read_text())["stages"].keys()
    assert {name for name, *_ in inputs.STAGES} == stages
    assert {stage.name for stage in writes.STAGES} == stages
