"""The local log on disks that take not all of it."""

import os
from itertools import chain, repeat

import pytest

from samebits.records.log import EndEvent, RunLog, parse_event
from standins import raising


def statuses(log):
    """Those of a log's events, each of which ends a training."""
    return [parse_event(line, log.path).status for line in log.path.read_bytes().splitlines(keepends=True)]


@pytest.mark.parametrize("taken", [None, 0, 1, 10])
def test_an_event_that_the_disk_refuses_is_written_with_the_next(taken, tmp_path, monkeypatch, capsys):
    """None: the write fails; else so many bytes of it are taken, as of a disk that is nearly full."""
    log, write = RunLog(tmp_path / "run.jsonl"), os.write
    log.append(EndEvent(status="FINISHED"))

    def full(fd, content):
        if taken is None:
            raise OSError(28, "No space left on device")
        return write(fd, content[:taken])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        log.append(EndEvent(status="FAILED"))
        log.append(EndEvent(status="KILLED"))
    assert statuses(log) == ["FINISHED"]
    log.append(EndEvent(status="FINISHED"))
    assert statuses(log) == ["FINISHED", "FAILED", "KILLED", "FINISHED"]
    said = capsys.readouterr().err
    assert said == f"{log.path}: the training goes on without its log for now: No space left on device\n"


def test_a_log_that_cannot_be_flushed_says_so_after_a_while(tmp_path, monkeypatch):
    log, write = RunLog(tmp_path / "run.jsonl"), os.write
    writes = chain([raising(OSError(28, "No space left on device"))] * 3, repeat(write))
    monkeypatch.setattr(os, "write", lambda *call: next(writes)(*call))
    log.append(EndEvent(status="FINISHED"))
    with pytest.raises(OSError, match="No space left"):
        log.flush(0)
    log.flush(5)
    assert statuses(log) == ["FINISHED"]


def test_a_new_log_removes_what_a_killed_sender_left_beside_it(tmp_path):
    unfinished = tmp_path / ".old.state.json.abcdefgh.samebits.tmp"
    unfinished.mkdir()
    (unfinished / "old.state.json").write_text("half")
    (unfinished / ".samebits.lock").touch()
    (tmp_path / ".others.tmp").mkdir()
    RunLog(tmp_path / "run.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".others.tmp", "run.jsonl"]
