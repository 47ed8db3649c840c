"""Delivery of local logs to a real MLflow store."""

import base64
import errno
import io
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
import tracemalloc
import zlib
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from click.testing import CliRunner
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE, TEMPORARILY_UNAVAILABLE
from tracking_fixtures import (  # noqa: F401 - two fixtures
    Server,
    finish,
    keys,
    make_migrated_store,
    make_repository,
    record_compared,
    recorded_from_files,
    result,
    runs,
    setup,
    start,
    write_files,
)

from conftest import ROOT, small, wait_for
from patience import patient
from ports import free_port
from samebits.cli.commands import main
from samebits.errors import HostError, UserError
from samebits.files import write_json
from samebits.host import counters, host_facts
from samebits.params import parse_params, read_yaml
from samebits.params.schema import Tracking
from samebits.records import log as events_of_a_log
from samebits.records.log import LOGS, EndEvent, LossesEvent, _brought, all_logs, line_of
from samebits.records.provenance import GitState, Provenance, provenance_of
from samebits.records.run import FILES, TRACE, read_run
from samebits.results.remarks import SpokenRemark
from samebits.results.verdict import compare_runs
from samebits.tracking import comparison as comparing
from samebits.tracking import delivery, download, recorder, reproduce, sender, store, ui
from samebits.tracking.comparison import NOTE_TAG, PARENT_TAG, comparison_key
from samebits.tracking.delivery import Delivery, deliver, sync
from samebits.tracking.download import find_run_files
from samebits.tracking.recorder import events, log_params, record_all
from samebits.tracking.reproduce import Recorded, Reproduction, log_reproduction
from samebits.tracking.settings import settings_changed, values_of
from samebits.tracking.store import RUN_TAG, connect, tracking_uri
from samebits.tracking.ui import link
from samples import card, comparison, explanation, host, placed, ratio, row, run_files, run_record
from standins import Handler, commit_all, git, raising, serving


def provenance(commit, **changes):
    packages = {"torch": "2.13.0"}
    git = GitState(commit=commit, dirty=bool(changes))
    facts = {"patch": None, "patch_problem": None, "patch_omits": (), "packages": packages, "environment": {}}
    return Provenance(git=git, **{**facts, **changes})


def losses_of(client, run):
    return [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "loss")]


def test_a_run_is_delivered_whole(repository):
    log = start("one")
    setup(log, str(repository / "data"))
    losses = [1.0 / step for step in range(1, 1502)]  # more than MLflow takes in one call
    log.losses(1, losses[:700], [0.1] * 700)
    log.losses(701, losses[700:], [0.1] * 801)
    write_files(repository, "one")
    result(log, repository)
    assert deliver(finish(log))
    client, (run,) = runs()
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "ddp-fast x1 b4096 mlp"
    assert run.data.params["train.optimizer.lr"] == "0.5"
    assert run.data.params["data.kwargs.features"] == "32"
    tags = {"strategy": "ddp", "labels": "one_device", "weights_sha256": "abc", "data_sha256": card().sha256}
    assert {name: run.data.tags[name] for name in tags} == tags
    assert undocumented(run) <= {"peak_memory_gib.device1"}
    figures = {"peak_memory_gib": 3.0, "peak_memory_gib.device0": 1.0, "speedup": 1.5, "training_seconds": 2.0}
    assert {name: run.data.metrics[name] for name in figures} == figures
    assert losses_of(client, run) == list(enumerate(losses, start=1))
    names = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert names == {*FILES, "params.yaml"}
    dataset = run.inputs.dataset_inputs[0].dataset
    assert (dataset.name, dataset.digest) == ("vectors", card().sha256[:36])
    assert (repository / "mlartifacts").is_dir()


def test_losses_arrive_while_training_goes_on(repository):
    log = start("alive")
    assert not deliver(log.path)
    log.losses(1, [2.0, 1.0], [0.1, 0.1])
    line = line_of(LossesEvent(first_step=3, losses=(0.5,), learning_rates=(0.1,)))
    os.write(log._fd, line[:30])  # a line that is being written
    assert not deliver(log.path)
    assert sync() == (0, {})  # it is left to its own sender
    _, (run,) = runs()
    assert (run.info.status, run.data.metrics["loss"]) == ("RUNNING", 1.0)
    os.write(log._fd, line[30:])
    deliver(log.path)
    log.close()
    _, (run,) = runs()
    assert run.data.metrics["loss"] == 0.5


def test_a_training_that_is_refused_says_why(stage, data_dir, repository):
    layers = "nn.Linear(128, 10), nn.RReLU(inplace=True)"
    model = f"from torch import nn\n\ndef make():\n    return nn.Sequential({layers})\n"
    (stage.folder / "mine.py").write_text(model)
    params = stage.write_params(small(model={"name": "mine:make"}, numerics=["exact"]))
    done = stage("train", "--strategy", "single", "--numerics", "exact", "--data-dir", str(data_dir(params)))
    assert done.returncode == 2
    _, (run,) = finished(stage.folder)
    assert run.info.status == "FAILED"
    assert run.data.tags["error"].startswith("exact: model.1 (RReLU): rrelu_with_noise_: ")


@pytest.mark.parametrize(("last", "status"), [("KILLED", "KILLED"), (None, "FAILED")])  # its writer is gone
@pytest.mark.parametrize("lost", [None, delivery.State()])
def test_delivering_again_changes_nothing(last, status, lost, repository):
    log = start("again")
    log.losses(1, [2.0, 1.0], [0.1, 0.1])
    path = finish(log, last)
    assert deliver(path)
    if lost:  # as if the sender had died before it could write down how far it was
        lost.write(path.with_suffix(".state.json"))
    assert deliver(path)
    client, (run,) = runs()
    assert run.info.status == status
    assert losses_of(client, run) == [(1, 2.0), (2, 1.0)]


def test_what_was_refused_is_tried_again_by_hand(repository, monkeypatch):
    path = finish(start("refused"))
    with monkeypatch.context() as patch:
        patch.setattr(delivery.Recorder, "record", raising(MlflowException("no such thing", INVALID_PARAMETER_VALUE)))
        assert sync() == (0, {path: "no such thing"})
        assert Delivery(path).done  # for the sender, which would try for ever
        assert sync() == (0, {path: "no such thing"})
    assert sync() == (1, {})
    assert sync() == (0, {})


@pytest.mark.parametrize(
    ("refusal", "told"),
    [
        (MlflowException("no such run", INVALID_PARAMETER_VALUE), "no such thing"),
        (MlflowException("it is away", TEMPORARILY_UNAVAILABLE), None),
    ],
)
def test_the_end_of_a_run_that_was_refused_may_be_refused_too(refusal, told, repository, monkeypatch):
    """Then that is all; where the store is away meanwhile it is tried again later."""
    log = start("refused")
    path = LOGS / "refused.jsonl"
    deliver(path)
    log.losses(1, [2.0], [0.1])
    finish(log)

    def refuse(self, event, *rest):
        raise refusal if isinstance(event, EndEvent) else MlflowException("no such thing", INVALID_PARAMETER_VALUE)

    monkeypatch.setattr(delivery.Recorder, "record", refuse)
    with nullcontext() if told else pytest.raises(MlflowException, match="it is away"):
        deliver(path)
    assert Delivery(path).state.refused == told


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"event":"start","time_ms":1,"run":"old","crc32":"1fc800a6"}', "version cannot read: Field required"),
        (b'{"event":"unheard of","crc32":"bf87f38c"}', "does not match any of the expected tags"),
        (b'{"event":"start","time_ms":1,"run":"old"}', "a damaged line, or another version's"),
        (b"nonsense", "a damaged line, or another version's"),
    ],
)
def test_a_log_of_another_version_is_reported_and_does_not_block_others(line, why, repository, serve):
    old = LOGS / "1-old.jsonl"
    LOGS.mkdir(parents=True)
    old.write_bytes(line + b"\n")
    finish(start("2-new"))
    serve()
    assert keys() == ["2-new"]
    assert why in Delivery(old).state.refused
    assert Delivery(old).done


def test_a_lost_state_doubles_no_point(repository):
    """Each keeps the time of its own line, however many lines are sent together."""
    log = start("lost")
    for step in (1, 2, 3):
        log.append(LossesEvent(time_ms=1000 * step, first_step=step, losses=(1.0 / step,), learning_rates=(0.1,)))
        deliver(log.path)
    path = finish(log)
    path.with_suffix(".state.json").unlink()
    assert deliver(path)
    client, (run,) = runs()
    assert losses_of(client, run) == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    rates = client.get_metric_history(run.info.run_id, "learning_rate")
    assert [(rate.step, rate.timestamp) for rate in rates] == [(1, 1000), (2, 2000), (3, 3000)]


def test_a_damaged_line_ends_the_run_with_all_lines_before_it(repository):
    log = start("damaged")
    log.losses(1, [2.0, 1.0], [0.1, 0.1])
    os.write(log._fd, b"nonsense\n")
    path = finish(log)
    ((told, why),) = sync()[1].items()
    assert (told, "a damaged line" in why) == (path, True)
    client, (run,) = runs()
    assert run.info.status == "FAILED"
    assert losses_of(client, run) == [(1, 2.0), (2, 1.0)]


@pytest.mark.attack("another user of the host")
def test_a_missing_or_unreadable_log_does_not_block_others(repository, serve, monkeypatch):
    gone, secret = LOGS / "0-gone.jsonl", finish(start("1-secret"))
    finish(start("2-sound"))
    allowed = os.access
    monkeypatch.setattr(events_of_a_log.os, "access", lambda path, mode: path != secret and allowed(path, mode))
    assert Delivery(gone).done
    assert (events_of_a_log.start_of(gone), events_of_a_log.writer_gone(gone)) == (None, True)
    with monkeypatch.context() as patch:  # it was there when the logs were listed
        patch.setattr(sender, "all_logs", lambda but=(): [gone, LOGS / "2-sound.jsonl"])
        serve()
    assert keys() == ["2-sound"]
    assert sync() == (0, {})


def test_a_log_that_fails_alone_does_not_block_the_next_ones(repository, monkeypatch):
    """As of an artifact that a proxy does not let through: the store itself answers."""
    first, second = finish(start("1-troubled")), finish(start("2-sound"))
    record = delivery.Recorder.record

    def trouble(self, *events):
        if getattr(events[0], "run", None) == "1-troubled":
            raise OSError("413: too large")
        return record(self, *events)

    monkeypatch.setattr(delivery.Recorder, "record", trouble)
    sending = sender.Sender()
    assert sending._deliver([first, second]) is False
    assert (Delivery(first).done, Delivery(second).done) == (False, True)


@pytest.mark.parametrize("niceness", [0, 15])
def test_a_senders_niceness_is_at_least_that_of_its_training(niceness, monkeypatch):
    """And a user who may not lower a niceness has the sender as it is."""
    asked = []

    def refuse(kind, process, priority):
        asked.append(priority)
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    monkeypatch.setattr(os, "getpriority", lambda kind, process: niceness)
    sender._lower_priority(2**30)
    assert asked == [max(10, niceness)]


@pytest.mark.attack("a malicious server")
def test_a_servers_login_goes_to_that_server_alone(monkeypatch):
    names = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:s3cr%40t@new.example:5000")
    monkeypatch.setenv(names[0], "mine")
    monkeypatch.delenv(names[1], raising=False)
    client = connect("http://me:***@new.example:5000")
    assert client.tracking_uri == "http://new.example:5000"
    assert [os.environ.get(name) for name in names] == ["me", "s3cr@t"]
    connect("http://old.example:5000")
    assert [os.environ.get(name) for name in names] == [None, None]
    assert connect("http://me:***@new.example:5000") is client
    assert [os.environ.get(name) for name in names] == ["me", "s3cr@t"]
    connect("http://old.example:5000")


def test_a_request_whose_answer_is_lost_is_not_made_again(monkeypatch):
    """The run may have been made all the same; the sender looks for it before it makes another."""
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    asked = []

    class Silent(Handler):
        def do_POST(self):
            asked.append(self.path)
            self.connection.close()

    with serving(Silent) as server, pytest.raises(MlflowException):
        connect(server.url).create_run("1")
    assert asked == ["/api/2.0/mlflow/runs/create"]


def test_mlflows_logger_is_silent(repository):
    """Its own logger prints tracebacks of a full disk; its import sets the logger's level."""
    code = (
        "import logging; from samebits.tracking.store import connect, tracking_uri; connect(tracking_uri());"
        "print(logging.getLogger('mlflow.store').getEffectiveLevel() == logging.CRITICAL)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_an_invalid_address_is_named(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://[")
    with pytest.raises(UserError, match=r"MLFLOW_TRACKING_URI: http://\[: Invalid IPv6 URL. hint: as in https://"):
        connect(tracking_uri())


def test_a_state_of_another_version_is_left_alone(repository, serve):
    path = finish(start("old"))
    path.with_suffix(".state.json").write_text('{"uri": null, "offset": 0}')
    serve()
    assert runs()[1] == []
    assert "no schema" in Delivery(path).state.refused
    assert path.with_suffix(".state.json").read_text() == '{"uri": null, "offset": 0}'


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to(path)])
def test_a_log_that_is_not_a_file_does_not_block_others(make, repository, serve):
    """Nor does a pipe beside a log, which is replaced and not read."""
    LOGS.mkdir(parents=True)
    make(LOGS / "1-strange.jsonl")
    finish(start("2-sound"))
    for name in ("lock", "state.json"):
        os.mkfifo(LOGS / f"2-sound.{name}")
    serve()
    assert keys() == ["2-sound"]
    assert sync() == (0, {})


@pytest.fixture
def serve(monkeypatch):
    """Run a sender in this process until it finds nothing more to do."""
    for name in ("POLL_SECONDS", "RETRY_SECONDS", "LINGER_SECONDS", "GIVE_UP_SECONDS"):
        monkeypatch.setattr(sender, name, 0.0)
    return lambda: sender.Sender().serve()


def test_a_store_that_is_away_does_not_block_another(repository, monkeypatch, serve, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    logs = [finish(start(name)) for name in ("first", "second")]
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    for name in ("third", "fourth"):
        finish(start(name))
    serve()
    said = capsys.readouterr().err
    assert "first.jsonl" in said
    assert "second.jsonl" not in said  # the store was asked once, for both of its logs
    assert {*keys()} == {"third", "fourth"}
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert list(sync()[1]) == logs
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert sync() == (2, {})  # to the store that is in use now
    assert sync() == (0, {})
    _, found = runs()
    statuses = {run.data.tags[RUN_TAG]: run.info.status for run in found}
    assert statuses == dict.fromkeys(("first", "second", "third", "fourth"), "FINISHED")


def test_logs_delivered_a_month_ago_are_removed(repository, monkeypatch):
    old, young, more, refused = (finish(start(name)) for name in ("old", "young", "old.and-more", "refused"))
    assert sync()[0] == 4
    waiting = finish(start("waiting"))
    state = Delivery(refused)
    state._set(refused="why")
    state._save()
    for log in (old, refused, waiting):
        os.utime(log, (0, 0))
    provenance_of(old).touch()
    sender.remove_old_logs()
    assert young.exists()
    assert more.exists()
    more.unlink()
    names = {path.name.partition(".")[0] for path in events_of_a_log.LOGS.iterdir() if "and-more" not in path.name}
    assert names == {"young", "refused", "waiting"}


def test_a_log_is_delivered_line_by_line(repository, monkeypatch):
    """Whatever it has of them, since it may be larger than memory."""
    log = start("long")
    for step in range(1, 200):
        log.losses(step, [0.5] * 50, [0.1] * 50)
    size = log.path.stat().st_size
    finish(log)
    tracemalloc.start()
    assert sum(1 for _ in Delivery(log.path)._lines_from(0)) == 201
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < size / 2


@pytest.fixture
def clock(monkeypatch):
    """The time of a sender in this process, which passes while it pauses, and its pauses."""
    made = SimpleNamespace(now=0.0, pauses=[])

    def sleep(seconds):
        made.pauses.append(seconds)
        made.now += seconds

    told = SimpleNamespace(sleep=sleep, monotonic=lambda: made.now, strftime=time.strftime)
    monkeypatch.setattr(sender, "time", told)
    return made


def log_comparison(repository):
    COMPARISON.write(repository / "reports/comparison.json")
    return comparing.log_comparison(COMPARISON, reports=repository / "reports", runs=repository / "runs")


def test_a_sender_lingers_until_a_comparison_is_delivered(repository, clock):
    finish(start("20260101-101500-single-fast"))
    sender.Sender().serve()
    assert clock.now > sender.LINGER_SECONDS
    clock.pauses.clear()
    log_comparison(repository)
    sender.Sender().serve()
    assert clock.pauses == [sender.POLL_SECONDS]  # before which no time had passed


def test_a_sender_stays_while_a_writer_says_nothing_for_long(repository, clock, monkeypatch):
    log, gone, hour = start("20260101-101500-single-fast"), sender.writer_gone, 3600.0
    monkeypatch.setattr(sender, "writer_gone", lambda path: clock.now > hour or gone(path))
    monkeypatch.setattr(sender, "POLL_SECONDS", sender.GIVE_UP_SECONDS)
    sender.Sender().serve()
    log.close()
    assert hour < clock.now < hour + 3 * sender.GIVE_UP_SECONDS


def test_a_store_that_is_away_is_tried_for_a_minute_after_a_comparison_too(repository, clock, monkeypatch):
    monkeypatch.setattr(sender, "deliver", raising(OSError("away")))
    assert not Delivery(log_comparison(repository)).done
    sender.Sender().serve()
    assert {*clock.pauses} == {sender.RETRY_SECONDS}
    assert clock.now > sender.GIVE_UP_SECONDS


@pytest.mark.parametrize(("took", "pause"), [(0.001, sender.POLL_SECONDS), (1.0, 20.0)])
def test_slow_polls_are_made_rarely(took, pause, repository, clock, monkeypatch):
    """Of very many logs; a training wants the core."""

    def look(_):
        clock.now += took
        return []

    monkeypatch.setattr(sender.Sender, "_undelivered", look)
    finish(start("20260101-101500-single-fast"))
    sender.Sender().serve()
    assert {*clock.pauses} == {pause}


def senders(folder, log=None):
    """The processes that deliver logs of a folder, started for ``log`` if it is given."""
    command = b"\0".join([b"-m", b"samebits.tracking.sender", bytes(log) if log else b""])
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            if command in (process / "cmdline").read_bytes() and (process / "cwd").samefile(folder):
                found.append(int(process.name))
    return found


def test_a_sender_has_a_low_priority(repository):
    log = start("alive")
    sender.start_sender(log.path)

    (process,) = wait_for(lambda: senders(repository, log.path))
    expected = max(sender.NICENESS, os.getpriority(os.PRIO_PROCESS, 0))
    wait_for(lambda: os.getpriority(os.PRIO_PROCESS, process) == expected)
    group = Path(f"/proc/{process}/autogroup")
    if group.exists():  # else this kernel shares cores out among processes alone
        wait_for(lambda: group.read_text().endswith(f" nice {sender.NICENESS}\n"))
    finish(log)
    wait_for(lambda: Delivery(log.path).done, seconds=900)


@pytest.mark.parametrize("key", ["later", None])
def test_files_that_are_gone_or_a_later_runs_are_not_uploaded(key, repository):
    log = start("replaced")
    if key:
        write_files(repository, key)
    result(log, repository)
    deliver(finish(log))
    client, (run,) = runs()
    assert run.data.tags["artifacts"].startswith("unavailable: the files were gone, or were a later run's")
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"params.yaml"}


def test_commit_packages_and_patch_are_recorded(repository):
    log = start("one")
    provenance("c0ffee", patch="one.patch").write(provenance_of(log.path))
    log.path.with_suffix(".patch").write_text("changes")
    deliver(log.path)
    client, (run,) = runs()
    assert (run.data.tags["git_commit"], run.data.tags["version.torch"]) == ("c0ffee", "2.13.0")
    files = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert files == {"params.yaml", "provenance.json", "one.patch"}


# -- comparisons -----------------------------------------------------------------------------------------------

ROW = row(
    "ddp",
    devices=2,
    run="20261121-101500-ddp-fast-abc123",
    device_type="cpu",
    accuracy=None,
    scaling_efficiency=0.75,
    above_floor=0.1,
    speedup=ratio(1.5, 1.4, 1.6),
    bound=ratio(1.6),
    slice_step_ms={"strategy": 4.0, "single": 6.0, "share": 3.75},
    labels=[SpokenRemark(kind="noisy", text="it was")],
    weights_sha256="abc",
    explanation=explanation(forward=1.0, backward=2.0),
)
COMPARISON = comparison(ROW, host=host())


def undocumented(run):
    """Metrics and tags of a run that the reference does not name; MLflow's own aside, and parts of a step but one."""
    page = (ROOT / "docs/reference/mlflow.md").read_text()
    names = {*run.data.metrics, *(name for name in run.data.tags if not name.startswith("mlflow."))}
    return {name for name in names if f"`{re.sub(r'^part[.](?!step)[a-z_]+_ms', 'part.forward_ms', name)}`" not in page}


def by_this_process(compared, **folders):
    assert deliver(comparing.log_comparison(compared, **folders))


def by_a_sender(compared, **folders):
    assert sender.hand_over(compared, **folders, wait_seconds=patient(900)) is None


def compare(repository, compared=COMPARISON, send=by_this_process):
    """The client, and the runs by their keys in the default experiment, after a comparison was delivered."""
    reports = repository / "reports"
    compared.write(reports / "comparison.json")
    send(compared, reports=reports, runs=repository / "runs")
    client, found = runs()
    return client, {run.data.tags[RUN_TAG]: run for run in found}


@pytest.mark.parametrize("why", ["Read-only file system", "No space left on device", "Not a directory"])
def test_a_comparison_that_cannot_be_logged_stays_untracked(why, repository, monkeypatch):
    refuse = raising(OSError(errno.ENOSPC if "space" in why else errno.EROFS, why))
    if why == "Not a directory":
        (repository / ".samebits").write_text("somebody's")
    elif "space" in why:
        monkeypatch.setattr(events_of_a_log.RunLog, "_write", refuse)
    else:
        monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(sender, "start_sender", refuse)
    said = sender.hand_over(COMPARISON, reports=repository, runs=repository, wait_seconds=patient(900))
    assert re.match(f"the comparison stays untracked: .*{why}", said), said


def test_a_queued_experiment_waits_for_its_sender(repository, monkeypatch):
    """DVC removes its folder with the logs in it. A sender that gives up is told with the way out."""
    folder = repository / ".dvc/tmp/exps/standalone/tmp1"
    folder.mkdir(parents=True)
    here = {"reports": repository, "runs": repository, "wait_seconds": 0}
    ended = []

    def give_up(log):
        ended.append(os.posix_spawnp("sleep", ["sleep", "0.5"], os.environ))
        return ended[-1]

    monkeypatch.setattr(sender, "start_sender", give_up)
    assert sender.hand_over(COMPARISON, **here).startswith("MLflow has not answered yet")
    os.waitpid(ended[0], 0)
    monkeypatch.chdir(folder)
    said = sender.hand_over(COMPARISON, **here)
    assert "whose folder DVC removes now: `dvc exp apply` it, then `samebits stage compare`" in said
    assert not Path(f"/proc/{ended[1]}").exists()


def test_a_comparison_is_the_parent_of_the_runs_it_compares(repository):
    deliver(finish(start(ROW.run)))
    for send in (by_a_sender, by_this_process):  # the second time changes nothing
        client, found = compare(repository, send=send)
        parent = found[comparison_key(COMPARISON)]
        child = found[ROW.run]
        assert len(found) == 2
        assert child.data.tags[PARENT_TAG] == parent.info.run_id
        assert child.data.tags["labels"] == "noisy"
        assert "1.50 times the speed of single" in child.data.tags[NOTE_TAG]
        explained = {name for name in child.data.metrics if name.startswith(("part.", "limit."))}
        assert sum(child.data.metrics[name] for name in explained if name.startswith("part.")) == 2 * 3.0  # and the sum
        measured = {name: child.data.metrics[name] for name in child.data.metrics.keys() - explained}
        assert measured == {"speedup": 1.5, "bound": 1.6, "eval_loss": 2.0, "scaling_efficiency": 0.75,
                            "loss_floor": 1.9, "loss_above_floor": 0.1}  # fmt: skip
        assert undocumented(child) == set()
        assert len(client.get_metric_history(child.info.run_id, "speedup")) == 1
        assert parent.data.metrics == {"speedup.ddp-fast": 1.5}
        assert "| ddp-fast |" in parent.data.tags[NOTE_TAG]
        assert parent.info.status == "FINISHED"
        assert [file.path for file in client.list_artifacts(parent.info.run_id, "report")] == ["report/comparison.json"]
        tags = client.get_experiment(parent.info.experiment_id).tags
        assert tags["mlflow.experimentKind"] == "custom_model_development"
        packed = json.loads(tags["mlflow.sharedViewState.samebits"])["state"].removeprefix("deflate;")
        view = json.loads(zlib.decompress(base64.b64decode(packed)))
        assert view["selectedColumns"][:2] == ["tags.`speed`", "tags.`same_model`"]
        assert [chart["type"] for chart in view["compareRunCharts"]] == [
            "BAR", "BAR", "SCATTER", "IMAGE", "DIFFERENCE", "LINE", "LINE",
        ]  # fmt: skip
        assert view["compareRunCharts"][4]["showChangeFromBaseline"]  # as its name says
        assert child.data.tags["speed"] == "1.50× (1.40–1.60)"
        assert (repository / ".samebits/view.txt").read_text() == link(parent.info.experiment_id)


def test_another_experiment_leaves_the_points_of_the_first_alone(repository):
    """No stage but compare depends on it, so that runs stand in the one and the comparison in the other."""
    write_files(repository / "runs" / "ddp-fast", ROW.run)
    log = start(ROW.run)
    log.append(LossesEvent(first_step=1, losses=(2.0, 1.5), learning_rates=()))
    deliver(finish(log))
    client, (run,) = runs()
    params = COMPARISON.params.model_copy(update={"tracking": Tracking(experiment="sweep")})
    moved = COMPARISON.model_copy(update={"params": params})
    compare(repository, moved)
    assert client.get_run(run.info.run_id).data.to_dictionary() == run.data.to_dictionary()
    assert len(client.get_metric_history(run.info.run_id, "loss")) == 2
    sweep = client.get_experiment_by_name("sweep").experiment_id
    again = {one.data.tags[RUN_TAG]: one for one in client.search_runs([sweep])}
    assert {*again} == {comparison_key(moved), ROW.run}
    assert again[ROW.run].data.tags[PARENT_TAG] == again[comparison_key(moved)].info.run_id


def test_a_comparison_under_other_params_is_another_one(repository):
    """As of how often to keep a checkpoint, which trains nothing again; MLflow lets nobody change a run's params."""
    deliver(finish(start(ROW.run)))
    compare(repository)
    train = COMPARISON.params.train.model_copy(update={"checkpoint_every_steps": 77})
    changed = COMPARISON.model_copy(update={"params": COMPARISON.params.model_copy(update={"train": train})})
    _, found = compare(repository, changed)
    assert {*found} == {ROW.run, comparison_key(COMPARISON), comparison_key(changed)}
    assert found[ROW.run].data.tags[PARENT_TAG] == found[comparison_key(changed)].info.run_id


def test_only_the_report_is_uploaded_of_a_folder_with_other_files(repository):
    """As of ``--out-dir .``."""
    for name in (".env", "plots/loss.svg", "plots.txt"):
        (repository / "reports" / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / "reports" / name).write_text("x")
    client, found = compare(repository)
    parent = found[comparison_key(COMPARISON)].info.run_id
    assert [file.path for file in client.list_artifacts(parent, "report")] == ["report/comparison.json", "report/plots"]
    assert [file.path for file in client.list_artifacts(parent, "report/plots")] == ["report/plots/loss.svg"]


def test_an_experiment_that_another_host_creates_meanwhile_is_used(repository):
    client = connect(tracking_uri())

    class Late:
        """Does not see the experiment before it has tried to make it."""

        tracking_uri, tried = client.tracking_uri, False

        def get_experiment_by_name(self, name):
            return client.get_experiment_by_name(name) if self.tried else None

        def create_experiment(self, name, **options):
            self.tried = True
            return client.create_experiment(name, **options)

    made = client.create_experiment("shared")
    assert store.experiment_id(Late(), "shared") == made


def test_artifacts_lie_beside_the_store_wherever_a_command_runs(repository, tmp_path_factory, monkeypatch):
    """Else those of an experiment in DVC's queue would go with its folder."""
    shared = tmp_path_factory.mktemp("shared")
    client = connect(f"sqlite:///{shared}/mlflow.db")
    experiment = client.get_experiment(store.experiment_id(client, "sweep"))
    assert experiment.artifact_location == (shared / "mlartifacts").as_uri()


def test_a_run_that_mlflow_does_not_know_is_recorded_again(repository):
    write_files(repository / "runs" / "ddp-fast", ROW.run)
    client, found = compare(repository)
    run = found[ROW.run]
    assert run.data.tags["restored"] == "recorded again from the run's files"
    assert run.data.tags["git_commit"].startswith("unavailable: ")
    assert losses_of(client, run) == [(1, 2.0), (2, 1.5)]
    assert run.info.start_time == 1795256100000  # from the run's name: 2026-11-21 10:15:00 UTC
    assert run.info.status == "FINISHED"
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {*FILES, "params.yaml"}


def test_a_run_without_files_is_left_out_of_the_comparison(repository, capsys):
    record_compared(repository, COMPARISON)
    assert keys() == [comparison_key(COMPARISON)]
    assert capsys.readouterr().err.startswith(f"{repository}/ddp-fast/run.json: no such file")


def test_a_comparison_that_was_replaced_is_left_to_the_later_one(repository, capsys):
    record_compared(repository, COMPARISON, key="another")
    assert keys() == []
    assert "holds a later comparison" in capsys.readouterr().err


def test_an_interrupted_recording_from_files_is_completed(repository, monkeypatch):
    write_files(repository / "runs" / "ddp-fast", ROW.run)
    client = connect(tracking_uri())
    record = partial(
        comparing._child, client, store.experiment_id(client, "samebits"), ROW, Path("runs"), COMPARISON.params.tracking
    )
    with monkeypatch.context() as patch:
        patch.setattr(recorder.Recorder, "_losses", raising(OSError("the store went away")))
        with pytest.raises(OSError, match="went away"):
            record()
    (run,) = runs()[1]
    assert run.info.status == "RUNNING"
    assert record() == run.info.run_id
    (run,) = runs()[1]
    assert run.info.status == "FINISHED"
    assert losses_of(client, run) == [(1, 2.0), (2, 1.5)]


def test_the_start_of_a_run_is_its_files_time_if_its_key_has_none(repository):
    write_files(repository, "odd")
    os.utime(repository / "run.json", (1000, 1000))
    assert next(events(read_run(repository))).time_ms == 1_000_000


def test_recording_from_files_twice_changes_nothing(repository):
    first, second = (recorded_from_files(repository, ROW.run) for _ in range(2))
    assert first == second
    client, (run,) = runs()
    assert losses_of(client, run) == [(1, 2.0), (2, 1.5)]


def test_a_run_is_found_by_its_folder_and_by_its_id(repository, tmp_path_factory):
    run_id = recorded_from_files(repository / "here")
    first = find_run_files("here", tmp_path_factory.mktemp("a"))
    second = find_run_files(run_id, tmp_path_factory.mktemp("b"))
    assert first.folder != second.folder
    assert (first.record, first.timing, first.losses) == (second.record, second.timing, second.losses)
    weights = [(found.folder / "model.safetensors").read_bytes() for found in (first, second)]
    assert weights[0] == weights[1]


def test_outside_of_a_repository_no_store_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"has no params\.yaml"):
        find_run_files("0" * 32, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("0" * 32, f"MLflow has no run {'0' * 32}. hint: is MLFLOW_TRACKING_URI the right one"),
        ("x" * 5000, "xxx: no such folder, and not a run id"),  # too long for a folder
        (None, r"has no model\.safetensors\. hint: choose a training that has ended"),
    ],
    ids=["another store's", "long", "without files"],
)
def test_a_run_that_cannot_be_fetched_is_named(name, message, repository, tmp_path):
    deliver(finish(start("empty")))
    with pytest.raises(UserError, match=message):
        find_run_files(name or runs()[1][0].info.run_id, tmp_path)


@pytest.mark.parametrize("target", ["nowhere", "run.json"])
def test_artifacts_that_cannot_be_read_are_the_hosts_fault(target, repository, tmp_path_factory):
    """Links that lead nowhere or to themselves."""
    run_id = recorded_from_files(repository / "here")
    (file,) = (repository / "mlartifacts").rglob("run.json")
    file.unlink()
    file.symlink_to(target)
    with pytest.raises(HostError, match=r"^MLflow cannot be reached: .*run\.json"):
        find_run_files(run_id, tmp_path_factory.mktemp("a"))


def test_a_database_that_cannot_be_opened_is_the_hosts_fault(repository, monkeypatch, tmp_path):
    (repository / "text.db").write_text("no database, and long enough to be read as one " * 100)
    for uri in ("sqlite:////proc/nowhere/x.db", f"sqlite:///{repository}/text.db"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        with pytest.raises(HostError, match=r"^MLflow cannot be reached: "):
            find_run_files("0" * 32, tmp_path)
        with pytest.raises(HostError, match=r"^MLflow cannot be reached: "):
            log_reproduction(None)


# -- telemetry -------------------------------------------------------------------------------------------------


def test_telemetry_samples_the_host_and_the_gpus_in_use(repository, monkeypatch):
    asked = []

    def gpu_counters(devices, environ):
        asked.append(list(devices))
        return {"gpu_1_utilization_percentage": 50.0}

    monkeypatch.setattr(counters, "gpu_counters", gpu_counters)
    log = start("watched", device_type="cuda", devices=(1,))
    watching = sender.Telemetry([1], seconds=0.05)
    watching.start()
    wait_for(lambda: len(asked) >= 3)
    watching.stop()
    watching.join()
    deliver(log.path, watching)
    _, (run,) = runs()
    assert asked[0] == [1]
    assert run.data.metrics["system/gpu_1_utilization_percentage"] == 50.0
    assert run.data.metrics["system/cpu_utilization_percentage"] >= 0
    assert watching.points == []
    log.close()


@pytest.mark.parametrize("visible", ["2,3", None])
def test_telemetry_is_of_the_gpus_that_the_training_sees(visible, repository, monkeypatch):
    asked = []
    monkeypatch.setattr(counters, "gpu_counters", lambda devices, environ: asked.append((devices, dict(environ))) or {})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # of the first training
    log = start("second", device_type="cuda", devices=(0, 1))
    seen = {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
    provenance("c0ffee", environment=seen).write(provenance_of(log.path))
    watching = sender.Sender()
    watching._watch([log.path])
    watching._telemetry[log.path].sample()
    finish(log)
    watching._watch([])
    assert asked == [((0, 1), seen)]


def test_samples_are_kept_until_the_store_is_back(repository, monkeypatch):
    log = start("away")
    watching = sender.Sender()
    watching._watch([log.path])
    watching._telemetry[log.path].sample()
    finish(log)
    watching._watch([])
    with monkeypatch.context() as patch:
        patch.setattr(sender, "deliver", raising(OSError("away")))
        assert watching._deliver([log.path]) is False
    watching._watch([])
    assert watching._deliver([log.path])
    _, (run,) = runs()
    assert run.data.metrics["system/cpu_utilization_percentage"] >= 0
    assert watching._undelivered() == []
    watching._watch([])
    assert watching._telemetry == {}


def test_the_last_samples_are_kept_if_their_delivery_fails(repository, monkeypatch):
    log = start("last")
    deliver(log.path)  # it has begun in MLflow
    watching = sender.Sender()
    watching._watch([log.path])
    watching._telemetry[log.path].sample()
    finish(log)
    with monkeypatch.context() as patch:
        patch.setattr(delivery, "send", raising(OSError("away")))
        assert watching._deliver([log.path]) is False
    watching._watch(watching._undelivered())
    assert watching._deliver([log.path])
    assert "system/cpu_utilization_percentage" in runs()[1][0].data.metrics


# -- whole trainings -------------------------------------------------------------------------------------------

MODEL = """
import sys
from torch import nn

class Net(nn.Linear):
    def forward(self, x):
        assert not {"mlflow", "dvc", "docker", "pynvml.smi"} & set(sys.modules)
        return super().forward(x)

def make():
    return Net(128, 10)
"""


def finished(folder):
    """Wait until the sender of every log has ended its run, and return the runs."""

    def ended():
        found = states(folder)
        return found and all(state["ended"] for state in found)

    wait_for(ended, seconds=900)  # a sender has a low priority
    return runs()


def test_a_training_is_tracked_by_a_process_of_its_own(stage, data_dir, repository):
    (stage.folder / "mine.py").write_text(MODEL)
    params = stage.write_params(small(model={"name": "mine:make", "source": "mine.py"}))
    done = stage("train", "--strategy", "ddp", "--data-dir", str(data_dir(params)), "--trace")
    assert done.returncode == 0, done.stderr
    client, (run,) = finished(stage.folder)
    assert run.info.status == "FINISHED"
    assert len(client.get_metric_history(run.info.run_id, "loss")) == 8
    assert {"host_fingerprint", "data_sha256", "git_commit"} <= set(run.data.tags)
    assert TRACE in {file.path for file in client.list_artifacts(run.info.run_id)}


@pytest.mark.parametrize(
    ("signum", "status"),
    [(signal.SIGKILL, "FAILED"), pytest.param(signal.SIGTERM, "KILLED", marks=pytest.mark.slow)],
)
def test_a_training_that_a_signal_ends(signum, status, stage, data_dir, repository):
    params = stage.write_params(small(epochs=100_000))
    command = [sys.executable, stage.script("train"), "--strategy", "single", "--data-dir", str(data_dir(params))]
    with subprocess.Popen(command, cwd=stage.folder, stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: any('"losses"' in file.read_text() for file in (stage.folder / LOGS).glob("*.jsonl")))
        process.send_signal(signum)
    client, (run,) = finished(stage.folder)
    assert run.info.status == status
    assert run.data.metrics["loss"] > 0
    assert "model.safetensors" not in [file.path for file in client.list_artifacts(run.info.run_id)]


def states(folder):
    return [json.loads(file.read_text()) for file in (folder / LOGS).glob("*.state.json")]


@pytest.mark.slow
def test_a_server_that_is_away_for_a_while_gets_every_loss_once(stage, data_dir, repository, tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("server"), repository / "mlflow.db")
    environ = {"MLFLOW_TRACKING_URI": server.uri}
    params = stage.write_params(small(epochs=100_000, model={"name": "wide_mlp"}))
    command = [sys.executable, stage.script("train"), "--strategy", "single", "--data-dir", str(data_dir(params))]
    server.start()
    try:
        with subprocess.Popen(
            command, cwd=stage.folder, stderr=subprocess.DEVNULL, env={**os.environ, **environ}
        ) as process:
            wait_for(lambda: any(state["offset"] > 3_000 for state in states(stage.folder)), seconds=900)
            server.kill()
            (log,) = (stage.folder / LOGS).glob("*.jsonl")
            size = log.stat().st_size
            wait_for(lambda: log.stat().st_size > size + 500)  # the training does not care
            assert process.poll() is None
            server.start()
            away = states(stage.folder)[0]["offset"]
            wait_for(lambda: states(stage.folder)[0]["offset"] > away, seconds=900)
            process.send_signal(signal.SIGTERM)
        wait_for(lambda: states(stage.folder)[0]["ended"], seconds=900)
    finally:
        server.kill()
    logged = [json.loads(line) for line in log.read_text().splitlines()]
    expected = [loss for event in logged if event["event"] == "losses" for loss in event["losses"]]
    client, (run,) = runs()
    assert run.info.status == "KILLED"
    assert losses_of(client, run) == list(enumerate(expected, start=1))


@pytest.mark.attack("another user of the host")
def test_a_password_in_a_stores_message_is_not_shown(repository, serve, monkeypatch, capsys):
    finish(start("one"))
    monkeypatch.setattr(sender, "deliver", raising(OSError("cannot reach\npostgresql://me:S3CRET@db/mlflow")))
    serve()
    said = capsys.readouterr().err
    assert "cannot reach postgresql://me:***@db/mlflow" in said
    assert "S3CRET" not in said


SECRET = "S3NTINEL" * 4
SECRET_VARIABLES = ["AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN", "HF_TOKEN", "MLFLOW_TRACKING_TOKEN_OF_MINE", "PGPASSWORD"]


def with_secrets(uri):
    """Variables of which each holds a secret, also the address of a server."""
    return {
        **dict.fromkeys(SECRET_VARIABLES, SECRET),
        "MLFLOW_TRACKING_URI": uri.replace("://", f"://somebody:{SECRET}@"),
    }


def begin_pipeline(stage, data_dir):
    """What the first two stages write, for a training under ``single``."""
    shutil.copytree(data_dir(stage.write_params(small(strategies=["single"]))), stage.folder / "data")
    write_json(stage.folder / "host.json", host_facts().model_dump(mode="json"))


def files_with(text, *folders):
    """Files in which a text stands, of the many in these folders."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 20
    return [path for path in files if text.encode() in path.read_bytes()]


@pytest.mark.slow
@pytest.mark.attack("another user of the host")
def test_no_secret_of_the_environment_is_written_anywhere(stage, data_dir, repository, tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("server"), tmp_path_factory.mktemp("store") / "mlflow.db")
    environ = with_secrets(server.uri)
    begin_pipeline(stage, data_dir)
    server.start()
    try:
        for command, *arguments in (["train", "--strategy", "single"], ["evaluate"], ["compare"]):
            done = stage(command, *arguments, **environ)
            assert done.returncode == 0, done.stderr
            assert SECRET not in done.stdout + done.stderr
        wait_for(lambda: all(state["ended"] for state in states(stage.folder)), seconds=900)
        assert len(runs(server.uri)[1]) >= 2
    finally:
        server.kill()
    assert files_with(SECRET, stage.folder, stage.output, server.folder, server.store.parent) == []


@contextmanager
def answering(status):
    """The port of a server that refuses everything, and repeats what it was sent; 9 for one that is away."""
    if status is None:
        yield 9
        return

    class Refusing(Handler):
        def _refuse(self):
            self.read_body()
            said = f"{self.headers.get('Authorization')} of http://somebody:{SECRET}@127.0.0.1{self.path}"
            self.answer(json.dumps({"error_code": "UNAUTHENTICATED", "message": said}).encode(), status)

        do_GET = do_POST = do_PUT = do_PATCH = _refuse  # noqa: N815

    with serving(Refusing) as server:
        yield server.server_port


ASKED_OF_A_STORE = [
    ("track", "sync"),
    ("--debug", "track", "sync"),
    ("reproduce", "a" * 32, "--yes"),
    ("--debug", "reproduce", "a" * 32, "--yes"),
    ("--debug", "compare", "runs/single-fast", "a" * 32),
    ("doctor",),
]


@pytest.mark.slow
@pytest.mark.parametrize("status", [None, 401, 500])
@pytest.mark.attack("another user of the host")
def test_no_secret_is_shown_if_a_server_is_away_or_refuses(status, stage, data_dir):
    begin_pipeline(stage, data_dir)
    with answering(status) as port:
        secrets = with_secrets(f"http://127.0.0.1:{port}")
        environ = {**os.environ, **secrets, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
        codes, said = [], ""
        stages = [("train", "--strategy", "single"), ("evaluate",), ("compare",)]
        commands = [[sys.executable, stage.script(name), "--debug", *more] for name, *more in stages]
        commands += [[str(Path(sys.executable).with_name("samebits")), *asked] for asked in ASKED_OF_A_STORE]
        for command in commands:
            done = subprocess.run(
                command, cwd=stage.folder, env=environ, capture_output=True, text=True, timeout=patient(240)
            )
            codes.append(done.returncode)
            said += f"$ {command[1:]}\n{done.stdout}{done.stderr}"
        assert codes[:3] == [0, 0, 0], said
        assert 0 not in codes[3:-1], said
        for process in senders(stage.folder):
            os.kill(process, signal.SIGTERM)
        wait_for(lambda: not senders(stage.folder), seconds=900)
    assert f"127.0.0.1:{port}" in said
    assert ("somebody:***@127.0.0.1" in said) is (status == 401)  # whose words are passed on
    for hidden in (SECRET, base64.b64encode(f"somebody:{SECRET}".encode()).decode()):
        assert [line for line in said.splitlines() if hidden in line] == []
        assert files_with(hidden, stage.folder) == []


@pytest.mark.parametrize(
    ("count", "problems", "said", "told"),
    [
        (0, {}, "nothing is left to deliver\n", ""),
        (1, {}, "1 log delivered\n", ""),
        (2, {"a.jsonl": "no such thing"}, "2 logs delivered\n", "a.jsonl: no such thing\n"),
        (0, {"a.jsonl": "no such thing"}, "", "a.jsonl: no such thing\n"),
    ],
)
def test_a_delivery_by_hand_says_how_many_logs_it_has_delivered(count, problems, said, told, repository, monkeypatch):
    monkeypatch.setattr(delivery, "sync", lambda: (count, problems))
    done = CliRunner().invoke(main, ["track", "sync"])
    assert (done.stdout, done.stderr.startswith(told), bool(done.exit_code)) == (said, True, bool(problems))


def test_logs_of_other_users_are_not_called_delivered(repository, monkeypatch):
    (repository / "params.yaml").touch()
    LOGS.mkdir(parents=True)
    (LOGS / "theirs.jsonl").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read everything
    done = CliRunner().invoke(main, ["track", "sync"])
    assert done.stderr == "1 log of other users cannot be read: they deliver their own\n"
    assert (done.exit_code, done.stdout) == (0, "")


# -- runs that are made again ----------------------------------------------------------------------------------

OWN_PARAMS = (ROOT / "params.yaml").read_text()


def changed_params(made):
    return settings_changed(made._committed, values_of(made.params))


def recorded(folder, params=OWN_PARAMS, *, record=None, losses=(2.0, 1.5), **facts):
    """A run that left its files in a folder, as it is read from MLflow, with such ``params.yaml``."""
    run_files(folder, record or run_record(), losses=losses)
    if params is not None:
        (folder / "params.yaml").write_bytes(params.encode() if isinstance(params, str) else params)
    facts = {
        "commit": "HEAD",
        "patch": None,
        "packages": {},
        **facts,
        "params": reproduce.read_params("0" * 32, folder),
    }
    return Recorded(run_id="0" * 32, folder=folder, run=read_run(folder), **facts)


@pytest.mark.attack("a malicious repository or patch")
def test_the_question_before_recorded_code_runs_hides_no_line(tmp_path, monkeypatch):
    patch = tmp_path / "git.patch"
    names = [f"new: {number}.py" for number in range(600)]
    lines = [*names, "", "+    os.system('\x1b[2K\rharmless')\u202e\tx", *(f"+line {number}" for number in range(500))]
    patch.write_bytes("\n".join(lines).encode())
    monkeypatch.chdir(ROOT)
    commit, subject = git(ROOT, "log", "-1", "--format=%H %s").strip().split(" ", 1)
    params = OWN_PARAMS.replace("seed: 0", "seed: 9  # \u202e")
    made = recorded(tmp_path, params, commit=commit, patch=patch, packages={"torch": "1.0"})
    shown = made.describe(patch).splitlines()
    assert shown[0] == f"run {'0' * 32}: single-fast, 2 steps, of this commit:"
    assert shown[1].startswith(commit[:7])
    assert shown[1].endswith(subject)
    assert shown[3:603] == names
    assert shown[603:606] == ["", "+    os.system('\\x1b[2K\\rharmless')\\u202e     x", "+line 0"]
    assert f"... and 102 more lines, as long as you are asked in {patch}" in shown
    at = shown.index("with these params, which came from MLflow, in place of the commit's:")
    assert shown[at + 1] == "seed: 0 -> 9"
    assert "train.epochs" not in "".join(shown), "of what is the same"
    assert shown[-2].startswith("packages that differ here: torch 1.0 -> ")


@pytest.mark.attack("a malicious server")
def test_only_files_of_the_run_are_downloaded(tmp_path, monkeypatch):
    listed = [*FILES, "params.yaml", "provenance.json", "git.patch", "../secret", "/etc/passwd", "a/b", "..", ""]
    downloaded = []
    client = SimpleNamespace(
        list_artifacts=lambda run_id: [SimpleNamespace(path=name, file_size=1) for name in listed],
        download_artifacts=lambda run_id, name, folder: downloaded.append(name),
    )
    monkeypatch.setattr(download, "connect", lambda uri: client)
    download.download("0" * 32, tmp_path, download.Watch(tmp_path, 1.0), everything=True)
    assert {*downloaded} == {*FILES, "params.yaml", "provenance.json", "git.patch"}


@pytest.mark.parametrize("patch", ["/etc/passwd", "../secret.patch", "..", ".", "a/b.patch", ""])
@pytest.mark.attack("a malicious server")
def test_a_patch_is_a_file_beside_its_provenance(patch, tmp_path):
    file = tmp_path / "provenance.json"
    provenance("0" * 40).write(file)
    raw = json.loads(file.read_text())
    file.write_text(json.dumps(raw | {"patch": patch}))
    with pytest.raises(UserError, match="patch: String should match pattern"):
        reproduce.read_recorded("0" * 32, tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
@pytest.mark.attack("a malicious repository or patch")
def test_a_patch_that_is_not_a_file_is_missing(make, tmp_path):
    provenance(git(ROOT, "rev-parse", "HEAD").strip(), patch="a.patch").write(tmp_path / "provenance.json")
    make(tmp_path / "a.patch")
    with pytest.raises(UserError, match=r"whose patch is not there: a\.patch is not among its artifacts"):
        reproduce.read_recorded("0" * 32, tmp_path)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (GitState(commit=None, dirty=False, problem="no git here"), "has no commit: no git here. hint: "),
        *(
            (GitState(commit=name, dirty=False), f"its commit is '{name}', expected a hash. hint: ")
            for name in ("HEAD", "main", "deadbeef", "-x")
        ),
        (GitState(commit="1" * 40, dirty=False), "commit 1{40} is not in this repository. hint: git fetch, or"),
    ],
)
@pytest.mark.attack("a malicious repository or patch")
def test_a_run_without_its_commit_cannot_be_reproduced(state, message, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    provenance("0" * 40).model_copy(update={"git": state}).write(tmp_path / "provenance.json")
    with pytest.raises(UserError, match=message):
        reproduce.read_recorded("0" * 32, tmp_path)


@pytest.mark.parametrize(
    ("commit", "patch", "message"),
    [
        ("HEAD", "nonsense", "the patch does not apply: .*hint: compare it by hand"),
        ("nowhere", None, "git worktree failed: .*hint: see `git worktree list`"),
    ],
)
def test_a_worktree_that_cannot_be_made_leaves_nothing(commit, patch, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commit_all(tmp_path)
    if patch:
        Path("git.patch").write_text(patch)
    made = SimpleNamespace(commit=commit, patch=Path("git.patch") if patch else None)
    with pytest.raises(UserError, match=message), reproduce.worktree(made, tmp_path):
        raise AssertionError("there is a worktree")
    assert not (tmp_path / "worktree").exists()
    assert len(git(tmp_path, "worktree", "list").splitlines()) == 1


@pytest.fixture
def patched(tmp_path, monkeypatch):
    """Make a repository with some files, and a run whose patch gives files this content; a text is a link's target."""
    monkeypatch.chdir(tmp_path)

    def be(files, attributes="", submodule=None):
        Path("net.py").write_text("a = 1\n")
        Path("id.py").write_text('a = "$Id$"\n')
        Path("long.txt").write_bytes(LONG)
        Path("data.bin").write_bytes(b"\0\1")
        commit_all(tmp_path)
        for name, content in files.items():
            Path(name).parent.mkdir(exist_ok=True)
            if content is None:
                Path(name).unlink()
            elif isinstance(content, str):
                Path(name).unlink(missing_ok=True)
                Path(name).symlink_to(content)
            else:
                Path(name).write_bytes(content)
        Path(".git/info/attributes").write_text(attributes)
        git(tmp_path, "add", "--intent-to-add", ".")
        patch = tmp_path.parent / f"{tmp_path.name}.patch"
        git(tmp_path, "diff", "--binary", f"--output={patch}", "HEAD")
        Path(".git/info/attributes").unlink()
        git(tmp_path, "reset", "--hard", "--quiet")
        git(tmp_path, "clean", "-d", "--force", "--quiet")
        if submodule:
            link = f"160000,{'1' * 40},{submodule}"
            git(tmp_path, "update-index", "--add", "--cacheinfo", link)
            git(tmp_path, "commit", "--quiet", "--message=submodule")
        return SimpleNamespace(commit="HEAD", patch=patch)

    return be


def npy(array):
    """The bytes of a file of NumPy's."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


NUMBERS = npy(np.arange(3))
LONG = b"".join(b"line %d\n" % number for number in range(3000))


@pytest.mark.parametrize(
    ("files", "attributes", "lines"),
    [
        ({"net.py": b"a = 2\n", "new/more.py": b"b = 3\n", "data.npy": NUMBERS}, "",
         ["changed: net.py", "new: new/more.py", "new, binary data: data.npy", "-a = 1", "+a = 2", "+b = 3"]),
        ({"net.py": None}, "", ["removed: net.py", "-a = 1"]),
        ({"net.py": b"import os\n"}, "*.py binary", ["+import os"]),
        ({"other.py": b"import os\n"}, "*.py binary", ["+import os"]),
        ({"net.py": b"import os\n", ".gitattributes": b"*.py binary -diff"}, "", ["+import os"]),
        ({"net.py": b"a = 2\n", ".gitattributes": b"*.py working-tree-encoding=UTF-8"}, "", ["+a = 2"]),
        ({"net.py": b"a = 2\n", ".gitattributes": b"*.py filter=x"}, "", ["+a = 2"]),
        ({"net.py": b'a = "$Id: "; import os; "$"\n', ".gitattributes": b"*.py ident"}, "*.py -ident",
         ['+a = "$Id: "; import os; "$"']),
        ({"id.py": b'a = "$Id: "; import os; "$"\n', ".gitattributes": b"*.py ident"}, "*.py -ident",
         ["changed: id.py", '+a = "$Id: "; import os; "$"']),
        ({"long.txt": LONG.replace(b"line 7\n", b"b\n")}, "", ["from line 5:", " line 6", "-line 7", "+b", " line 8"]),
        ({"long.txt": LONG.replace(b"line", b"row")}, "", ["-line 2999", "+row 0"]),
    ],
    ids=["as it lies there", "a file is gone", "text in a part for binary files", "a new file in such a part",
         "declared as binary", "converted by an encoding", "converted by a filter", "between the marks of ident",
         "between such marks of the commit", "a line of many", "many lines"],
)  # fmt: skip
@pytest.mark.attack("a malicious repository or patch")
def test_what_a_patch_changes_is_shown(files, attributes, lines, patched, tmp_path):
    with reproduce.worktree(patched(files, attributes), tmp_path):
        shown = (tmp_path / "changes.diff").read_text().splitlines()
    assert {*lines} <= {*shown}
    assert len(shown) < 20 or lines[0] == "-line 2999"


@pytest.mark.parametrize("wrapped", [False, True], ids=["git", "a script that calls git"])
@pytest.mark.attack("a malicious repository or patch")
def test_a_small_patch_does_not_fill_the_disk(wrapped, patched, program, tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce, "_PATCHED_BYTES", 2**22)
    if wrapped:  # whose exit code tells of the signal that ends git
        program("git", f'{shutil.which("git")} "$@"; exit $?')
    made = patched({"ones.npy": npy(np.zeros(2**20, dtype="u1")), "more.npy": npy(np.zeros(2**22, dtype="u1"))})
    message = r"the patch writes a file of more than 2 MiB\. hint: whoever made the run has to commit it"
    with pytest.raises(UserError, match=message), reproduce.worktree(made, tmp_path):
        raise AssertionError("it is run")


@pytest.mark.attack("a malicious repository or patch")
def test_a_file_below_a_submodule_is_shown(patched, tmp_path):
    """Git looks for no changes there."""
    made = patched({"sub/code.py": b"import os\n"}, submodule="sub")
    with reproduce.worktree(made, tmp_path) as tree:
        assert (tree / "sub/code.py").read_text() == "import os\n"
        assert {"new: sub/code.py", "+import os"} <= {*(tmp_path / "changes.diff").read_text().splitlines()}


@pytest.mark.parametrize(
    ("name", "content", "attribute"),
    [
        ("net.py", b"PK\3\4\0", b""),  # Python runs a zip by the name of a script
        ("mine.so", b"\x7fELF\0", b""),
        ("data.bin", b"\0\2", b""),
        ("w.pt", b"PK\3\4\0", b""),
        ("tool", b"\x7fELF\0", b""),
        ("net.pyc", b"\0\2", b"*.pyc diff"),
        ("latin.py", b"# coding: latin-1\na = '\xe9'\n", b""),
        (os.fsdecode(b"\xff.pyc"), b"\0\2", b""),
        ("weights.npy", b"\x80\4\0", b""),  # a pickle
        ("objects.npy", npy(np.array([{}], dtype=object)), b""),
        ("numbers.npy", NUMBERS + b"\x80\4\0", b""),  # numbers, and what another reader takes for its beginning
        ("weights.safetensors", b"\x80\4NJ\0\0\0\0{}\0", b""),  # the same, as a header could begin
        ("clip.gif", b"GIF8\0\0\0\0\0", b""),  # bytes that a pickle may begin with
        ("more.npz", b"PK\3\4\0", b""),
    ],
)
@pytest.mark.attack("a malicious repository or patch")
def test_a_binary_file_that_may_be_code_is_refused(name, content, attribute, patched, tmp_path):
    made = patched({name: content, **({".gitattributes": attribute} if attribute else {})})
    shown = re.escape(name.replace("\udcff", "\\xff"))
    message = f"the patch changes {shown}, a binary file of which nobody sees what it runs"
    with pytest.raises(UserError, match=message), reproduce.worktree(made, tmp_path):
        raise AssertionError("it is run")
    assert not (tmp_path / "worktree").exists()


@pytest.mark.parametrize(
    "line",
    ["# coding: utf7", "# -*- coding: raw_unicode_escape -*-", "#!x\n# vim: coding=latin-1", "\r# coding: utf7",
     "\f\r# coding: utf7", " \r\n# coding: utf7"],
)  # fmt: skip
@pytest.mark.attack("a malicious repository or patch")
def test_a_text_that_python_reads_in_another_way_is_refused(line, patched, tmp_path):
    made = patched({"net.py": f"{line}\n# +AAo-import os\n".encode()})
    with (
        pytest.raises(UserError, match=r"the patch changes net\.py, whose text is \S+ to Python, which reads another"),
        reproduce.worktree(made, tmp_path),
    ):
        raise AssertionError("it is run")


@pytest.mark.attack("a malicious repository or patch")
def test_the_file_of_changes_holds_no_control_characters(patched, tmp_path):
    made = patched({"net.py": b"a = 1\nimport os\x1b[1A\x1b[2K\n", "ok.py": b"# coding: utf-8\n"})
    with reproduce.worktree(made, tmp_path):
        text = (tmp_path / "changes.diff").read_text()
    assert "+import os\\x1b[1A\\x1b[2K" in text
    assert all(line.isprintable() for line in text.split("\n"))


def test_a_patched_tree_that_cannot_be_read_is_said(patched, tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce, "describe_changes", lambda *_: Path("x" * 999).stat())
    message = "what the patch changes cannot be read: File name too long. hint: whoever"
    with pytest.raises(UserError, match=message), reproduce.worktree(patched({"net.py": b"a = 2\n"}), tmp_path):
        raise AssertionError("it is run")


@pytest.mark.attack("a malicious repository or patch")
def test_a_commit_that_none_of_the_clones_branches_has_is_said(patched, tmp_path):
    """Such as one that came with somebody's pull request."""
    patched({"net.py": b"a = 2\n"})
    commit = git(tmp_path, "rev-parse", "HEAD").strip()
    made = recorded(tmp_path / "run", commit=commit)
    text = "no branch or tag of this clone has that commit: look at it before you go on"
    assert text not in made.describe()
    branch = git(tmp_path, "branch", "--show-current").strip()
    git(tmp_path, "checkout", "--quiet", "--orphan", "other")
    commit_all(tmp_path)
    git(tmp_path, "branch", "--quiet", "-D", branch)
    assert text in made.describe().splitlines()


@pytest.mark.attack("a malicious repository or patch")
def test_no_line_of_the_question_is_long(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    made = recorded(tmp_path, omits=("x" * 10**6, *map(str, range(99))), packages={"torch": " " * 10**6})
    shown = made.describe().splitlines()
    assert max(map(len, shown)) < 500
    assert len(shown) < 20


@pytest.mark.attack("a malicious repository or patch")
def test_a_small_patch_does_not_fill_the_memory(patched, tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce, "_PATCH_MEMORY", 2**27)
    made = patched({"zeros.npy": npy(np.zeros(2**28, dtype="u1"))})
    with pytest.raises(UserError, match="the patch does not apply"), reproduce.worktree(made, tmp_path):
        raise AssertionError("it is run")


@pytest.mark.attack("a malicious repository or patch")
def test_a_long_line_does_not_push_the_question_away(tmp_path):
    lines = ["x" * 10**6, "short", *["y"] * 500]
    shown = reproduce._first_of(lines, tmp_path / "all")
    assert max(map(len, shown)) < 500
    assert shown[1] == "short"
    assert shown[-1] == (
        f"... and 102 more lines and the rest of lines that end in ..., as long as you are asked in {tmp_path / 'all'}"
    )


def test_a_folder_of_logs_that_cannot_be_listed_is_not_taken_for_an_empty_one(repository, monkeypatch):
    assert all_logs() == []
    for error, empty in ((PermissionError("no"), True), (OSError(errno.EIO, "broken"), False)):
        monkeypatch.setattr(os, "listdir", Mock(side_effect=error))
        with nullcontext() if empty else pytest.raises(HostError, match="cannot be listed: broken"):
            assert all_logs() == []


@pytest.mark.attack("a malicious repository or patch")
def test_a_log_that_git_has_brought_is_delivered_nowhere(repository):
    """It names the server that is to get the files of a run."""
    path = finish(start("one"))
    assert all_logs() == [path]
    git(repository, "init", "--quiet")
    git(repository, "add", "--force", str(path))
    _brought.cache_clear()
    assert (all_logs(), sync()) == ([], (0, {}))
    _brought.cache_clear()


@pytest.mark.attack("a malicious repository or patch")
def test_a_link_among_the_files_of_a_run_is_not_followed(repository, tmp_path_factory):
    private = tmp_path_factory.mktemp("home") / "id_rsa"
    private.write_text("a key")
    write_files(repository / "run", "one")
    run = read_run(repository / "run")
    (repository / "run/losses.csv").unlink()
    (repository / "run/losses.csv").symlink_to(private)
    with pytest.raises(UserError, match=r"run/losses\.csv: a link, whose file is not the run's"):
        record_all(connect(tracking_uri()), events(run))
    assert [*(repository / "mlartifacts").rglob("losses.csv")] == []


@pytest.mark.attack("a malicious repository or patch")
def test_a_link_among_the_files_of_a_report_is_not_followed(repository, tmp_path_factory):
    private = tmp_path_factory.mktemp("home") / "id_rsa"
    private.write_text("a key")
    (repository / "reports/curves").mkdir(parents=True)
    (repository / "reports/curves/x.csv").symlink_to(private)
    with pytest.raises(UserError, match=r"reports/curves/x\.csv: a link, whose file is not the run's"):
        record_compared(repository, COMPARISON)
    assert [*(repository / "mlartifacts").rglob("x.csv")] == []


def test_the_recorded_params_of_a_commit_do_not_differ_from_it(repository):
    """They have types and defaults that a file need not have."""
    text = "data: {kwargs: {}}\ntrain: {optimizer: {name: sgd, lr: 1}}\n"
    (repository / "params.yaml").write_text(text)
    commit_all(repository)
    client = connect(tracking_uri())
    run_id = client.create_run(client.create_experiment("x")).info.run_id
    log_params(client, run_id, parse_params(read_yaml(text)))
    file = client.download_artifacts(run_id, "params.yaml")
    made = recorded(repository / "run", Path(file).read_text())
    assert changed_params(made) == []


@pytest.mark.attack("a malicious repository or patch")
def test_logs_behind_a_link_that_git_has_brought_are_delivered_nowhere(repository):
    path = finish(start("one"))
    shutil.move(repository / ".samebits", repository / "notes")
    (repository / ".samebits").symlink_to("notes")
    assert all_logs() == [LOGS / path.name]  # one's own link
    git(repository, "init", "--quiet")
    git(repository, "add", "--force", ".samebits")
    _brought.cache_clear()
    assert (all_logs(), sync()) == ([], (0, {}))
    _brought.cache_clear()


@pytest.mark.attack("a malicious repository or patch")
def test_a_link_in_the_place_of_a_patch_is_not_followed(repository, tmp_path_factory):
    private = tmp_path_factory.mktemp("home") / "id_rsa"
    private.write_text("a key")
    path = finish(start("one"))
    path.with_suffix(".patch").symlink_to(private)
    count, problems = sync()
    assert (count, "a link, whose file is not the run's" in problems[path]) == (0, True)
    assert [*(repository / "mlartifacts").rglob("*.patch")] == []


KWARGS = "  kwargs: {act: {target: os.system}, act.target: torch.nn.ReLU, 1: 2, '1': 3, hooks: {}, on: true}\n"


@pytest.mark.attack("a malicious repository or patch")
def test_no_two_params_are_shown_as_one():
    plain = "model:\n  name: mymodel:make\n"
    assert settings_changed(values_of(plain + "  kwargs: {on: 1}\n"), values_of(plain + KWARGS)) == [
        "model.kwargs.act.target: (absent) -> os.system",
        "model.kwargs.'act.target': (absent) -> torch.nn.ReLU",
        "model.kwargs.1: (absent) -> 2",
        "model.kwargs.'1': (absent) -> 3",
        "model.kwargs.hooks: (absent) -> {}",
        "model.kwargs.on: 1 -> True",
    ]


@pytest.mark.parametrize(
    ("name", "refused"),
    [("torch:load", True), ("torch.hub:load", True), ("mine:make", False), ("pack.net:make", False), ("mlp", False),
     ("numpy:load", True), ("numpy.net:load", True), ("samebits.cli:reproduce", True), ("pack.other:make", True),
     ("nowhere:make", True), ("pipeline.train:main", True), ("decimal:Decimal", True)],
)  # fmt: skip
@pytest.mark.attack("a malicious repository or patch")
def test_a_factory_that_nobody_was_shown_is_refused(name, refused, tmp_path, monkeypatch):
    """Such as one that loads a pickle; the commit's own params may name any."""
    monkeypatch.chdir(ROOT)
    tree = tmp_path / "tree"
    for file in (
        "src/pack/net.py",
        "mine.py",
        "numpy/net.py",
        "numpy/__init__.py",
        "decimal.py",
        "src/samebits/cli/__init__.py",
        "pipeline/train.py",
    ):
        (tree / file).parent.mkdir(parents=True, exist_ok=True)
        (tree / file).touch()
    (tree / "src/samebits/__init__.py").touch()
    commit = git(ROOT, "rev-parse", "HEAD").strip()
    made = recorded(tmp_path / "run", f"model: {{name: '{name}'}}\n", commit=commit)
    if not refused:
        made.require_shown_factory(tree)
        return
    with pytest.raises(UserError, match=f"model.name: {name} came from MLflow, and is neither in the commit nor in"):
        made.require_shown_factory(tree)
    made.__dict__["_committed"] = {"model.name": name}
    made.require_shown_factory(tree)


@pytest.mark.attack("a malicious repository or patch")
def test_recorded_code_cannot_answer_a_question_of_its_own(tmp_path, monkeypatch):
    """A factory may be one of the kit's commands, under a name of the patch's."""
    for name, value in reproduce.WITHIN.items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(main, ["reproduce", "0" * 32, "--yes"])
    assert done.exit_code == 2
    assert done.stderr.startswith("error: a recorded run reproduces another one. hint: ")


@pytest.mark.parametrize("target", ["data.bin", "/tmp"])
@pytest.mark.parametrize("name", ["net.py", "runs"])
@pytest.mark.attack("a malicious repository or patch")
def test_a_link_out_of_a_patch_is_refused(target, name, patched, tmp_path):
    """What lies there is not shown, runs, or is written to."""
    message = f"the patch makes {name} a symbolic link, whose content is not part of it"
    with pytest.raises(UserError, match=message), reproduce.worktree(patched({name: target}), tmp_path):
        raise AssertionError("it is run")


@pytest.mark.attack("a malicious repository or patch")
def test_a_carriage_return_does_not_end_a_shown_line(patched, tmp_path):
    made = recorded(tmp_path / "run", patch=patched({"net.py": b"a = 1\nb = 2\r import os\n"}).patch)
    with reproduce.worktree(made, tmp_path):
        assert "+b = 2\\r import os" in made.describe(tmp_path / "changes.diff").splitlines()


@pytest.mark.attack("a malicious repository or patch")
def test_params_too_large_to_show_are_refused(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    with pytest.raises(UserError, match=r"params.yaml of run 0+ cannot be read: more than 100000 of them"):
        recorded(tmp_path, "\n".join(lines))


@pytest.mark.attack("a malicious repository or patch")
def test_what_a_patch_leaves_out_is_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    made = recorded(tmp_path, omits=("a.key", "big.py"))
    assert "without files that it was made beside, and that MLflow has not: a.key, big.py" in made.describe()


@pytest.mark.attack("a malicious server")
def test_nothing_is_trained_on_other_data_than_recorded(repository, monkeypatch):
    stages = []
    monkeypatch.setattr(reproduce, "run_stage", lambda tree, name, *arguments, variables: stages.append(name))
    others = {"file": "test.safetensors", "num_samples": 8, "sha256": "0" * 64, "floor": 1.9, "teacher_loss": 1.9}
    monkeypatch.setattr(reproduce, "read_card", lambda file: card(test=others))
    message = r"the data are not those of the run: SHA-256 .*, expected .*\. hint: get the files"
    with pytest.raises(UserError, match=message):
        reproduce.train_again(recorded(repository / "run"), repository, num_devices=None)
    assert stages == ["prepare"]


@pytest.mark.attack("a malicious repository or patch")
def test_data_files_are_linked_within_the_worktree_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tree, outside = tmp_path / "tree", tmp_path / "outside"
    for folder in (tree, outside, tmp_path / "link", tmp_path / "mine"):
        folder.mkdir()
    (tree / "link").symlink_to(outside)  # as a commit may have it
    for name in ("x.npy", "link/y.npy", "mine/z.npz"):
        (tmp_path / name).touch()
    given = {"inputs": "x.npy", "targets": "link/y.npy", "split": "mine/z.npz:split", "a": "mine/../x.npy",
             "b": "../secret", "c": "/etc/passwd", "d": 5}  # fmt: skip
    reproduce._link_files(given, tree)
    assert (tree / "x.npy").resolve() == tmp_path / "x.npy"
    assert (tree / "mine/z.npz").resolve() == tmp_path / "mine/z.npz"
    assert list(outside.iterdir()) == []
    assert {path.name for path in tree.iterdir()} == {"x.npy", "link", "mine"}


@pytest.mark.parametrize(("content", "why"), [(b"\xff: 1", "invalid start byte"), (None, "No such file or directory"),
                                              (b"\0" * 99, "special characters are not allowed"),
                                              (b"seed: [", "while parsing"), (b"[" * 99_999, "recursion")])  # fmt: skip
@pytest.mark.attack("a malicious server")
def test_recorded_params_that_cannot_be_read_are_said(content, why, tmp_path):
    with pytest.raises(UserError, match=f"params.yaml of run 0+ cannot be read: .*{why}"):
        recorded(tmp_path, content)


def test_a_reproduction_has_the_commit_of_the_original(repository):
    """Whatever the checkout is at from which it was asked for."""
    original = recorded_from_files(repository / "run", ROW.run)
    write_files(repository / "again", f"{ROW.run}-again")
    run, made = (read_run(repository / name) for name in ("run", "again"))
    facts = {"original": run, "again": made, "verdict": compare_runs(run, run), "differences": {}}
    again = log_reproduction(Reproduction(run_id=original, commit="c0ffee", **facts))
    assert connect(tracking_uri()).get_run(again).data.tags["git_commit"] == "c0ffee"


@pytest.mark.parametrize(
    ("strategy", "steps", "devices", "arguments"),
    [
        ("single", 2, None, ["--steps", 2]),
        ("single", None, None, []),
        ("ddp", None, None, ["--num-devices", 2]),
        ("ddp", None, "3", ["--num-devices", "3"]),
    ],
)
def test_a_reproduction_makes_as_many_steps_on_as_many_devices_as_the_original(
    strategy, steps, devices, arguments, repository, monkeypatch
):
    record = run_record(strategy, placement=placed(strategy, gpus=0, cores=2)[0])
    count = steps or record.params.total_steps
    measurement = record.measurement.model_copy(update={"step_ms": (1.0,) * count})
    record = record.model_copy(update={"measurement": measurement})
    made = recorded(repository / f"runs/{record.name}", record=record, losses=(1.0,) * count)
    stages = []
    monkeypatch.setattr(reproduce, "run_stage", lambda tree, *command, variables: stages.append(command))
    monkeypatch.setattr(reproduce, "read_card", lambda file: record.data)
    reproduce.train_again(made, repository, num_devices=devices)
    assert list(stages[-1][stages[-1].index("--out-dir") + 2 :]) == arguments


def test_devices_cannot_be_chosen_for_a_run_of_single(repository, monkeypatch):
    made = recorded(repository / "runs/single-fast")
    monkeypatch.setattr(reproduce, "fetch_run", lambda run_id, folder: folder)
    monkeypatch.setattr(reproduce, "read_recorded", lambda run_id, folder: made)
    with pytest.raises(UserError, match="--num-devices: the run is of single, which uses one device"):
        reproduce.reproduce("0" * 32, repository, num_devices="2", confirm=lambda text: True)


@pytest.mark.parametrize(
    ("numerics", "options", "answer", "code"),
    [("exact", ["--yes"], "", 1), ("fast", [], "y", 0), ("fast", ["--require", "bitwise", "--json"], "y", 1),
     ("fast", [], "n", 2), ("fast", [], "", 2)],
)  # fmt: skip
def test_recorded_code_runs_if_the_answer_is_yes_and_has_to_do_as_it_did(
    numerics, options, answer, code, repository, monkeypatch
):
    for name, weight in (("a", 1.0), ("b", 1.00001)):
        run_files(repository / name, run_record("single", numerics), weight=weight)
    facts = {"run": read_run(repository / "a"), "commit": "c0ffee", "patch": None, "params": ""}
    made = Mock(**facts, describe=lambda patch: "what will be run")
    for name, given in {"fetch_run": None, "read_recorded": made, "worktree": nullcontext(repository),
                        "train_again": read_run(repository / "b"), "log_reproduction": None}.items():  # fmt: skip
        monkeypatch.setattr(reproduce, name, lambda *_, given=given, **__: given)
    done = CliRunner().invoke(main, ["reproduce", "0" * 32, *options], input=answer)
    assert (done.exit_code, done.stderr.splitlines()[0]) == (code, "what will be run")
    assert done.stdout[:5] == ('{\n  "' if "--json" in options else {0: "≈ wit", 1: "≠ div", 2: ""}[code])
    assert ("error: nothing was run. hint: answer y, or give --yes" in done.stderr) == (code == 2)


KILLED = """
import os, signal
from sqlalchemy import event
from sqlalchemy.engine import Engine
from samebits.tracking.store import connect, tracking_uri

@event.listens_for(Engine, "after_cursor_execute")
def look(connection, cursor, statement, *rest):
    if "CREATE TABLE datasets" in statement:
        os.kill(os.getpid(), signal.SIGKILL)

connect(tracking_uri())
"""


@pytest.mark.parametrize(("folder", "file"), [(0o755, 0o644), (0o2775, 0o664), (0o2770, 0o664), (0o777, 0o666)])
def test_a_new_store_can_be_written_by_whoever_may_write_beside_it(folder, file, tmp_path, monkeypatch):
    """As in a group's clone, where each member's runs are recorded."""
    tmp_path.chmod(folder)
    (tmp_path / "mlflow.db").touch(0o644)
    store._open_to_writers_of(tmp_path, tmp_path / "mlflow.db")
    assert stat.S_IMODE((tmp_path / "mlflow.db").stat().st_mode) == file


AS_ANOTHER_USER = """
import os
from pathlib import Path
from samebits.tracking.delivery import Delivery
os.setgid(65534)
os.setuid(65534)
try:
    Delivery(Path("x.jsonl")).client
except Exception as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_users_store_is_named_before_anything_is_written(repository):
    repository.chmod(0o777)
    for folder in repository.parents:
        folder.chmod(folder.stat().st_mode | 0o055)
    done = subprocess.run([sys.executable, "-c", AS_ANOTHER_USER], capture_output=True, text=True, check=True)
    hint = "ask its owner for `chmod g+w mlflow.db`, or set MLFLOW_TRACKING_URI"
    assert done.stdout == f"{repository}/mlflow.db belongs to another user, and cannot be written. hint: {hint}\n"


READING = """
from samebits.tracking.store import connect, tracking_uri
print([one.name for one in connect(tracking_uri()).search_experiments()])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a store to another user")
def test_who_may_only_read_a_store_compares_its_runs(repository):
    connect(tracking_uri())
    repository.chmod(0o755)
    for path in (repository, *repository.rglob("*")):
        os.chown(path, 65534, 65534)
    command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", sys.executable, "-c", READING]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "['Default']\n", done.stderr


def test_a_store_whose_creation_was_killed_is_created_again(tmp_path, monkeypatch):
    """MLflow cannot go on with a file that has some of its tables."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    done = subprocess.run([sys.executable, "-c", KILLED], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [".samebits"]  # what is unfinished lies in there
    tmp_path.chmod(0o2775)
    client = connect(tracking_uri())
    assert stat.S_IMODE((tmp_path / "mlflow.db").stat().st_mode) == 0o664  # the group's, as its folder
    assert [one.name for one in client.search_experiments()] == ["Default"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".samebits", "mlflow.db"]
    assert sorted(path.name for path in (tmp_path / ".samebits").iterdir()) == ["store.lock"]


@pytest.mark.attack("another user of the host")
def test_the_page_of_an_unknown_kind_of_store_is_refused_without_its_password(repository, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "oracle://me:S3CRET@db/mlflow")
    monkeypatch.setattr(ui.os, "execve", None)
    with pytest.raises(
        UserError, match=r"^MLFLOW_TRACKING_URI: oracle://me:\*\*\*@db/mlflow: got oracle, accepts sqlite, "
    ):
        ui.serve(free_port())


@pytest.mark.attack("another user of the host")
def test_the_page_of_a_store_is_served_without_its_address_among_the_arguments(repository, monkeypatch):
    """They are shown to every user of the host, and a database's address has a password."""
    ran = []
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://me:S3CRET@db/mlflow")
    monkeypatch.setattr(ui.os, "fork", lambda: 1)
    monkeypatch.setattr(ui.os, "execve", lambda *call: ran.append(call))
    ui.serve(free_port())
    ((_, arguments, environ),) = ran
    assert "S3CRET" not in " ".join(arguments)
    assert environ["MLFLOW_BACKEND_STORE_URI"] == "postgresql://me:S3CRET@db/mlflow"


@pytest.mark.parametrize("away", [False, True])
def test_the_verdict_is_printed_if_mlflow_is_away_at_the_end(away, repository, monkeypatch, capsys):
    made = recorded(repository / "run")
    log = raising(HostError("MLflow cannot be reached", hint="later")) if away else lambda reproduction: None
    for name, answer in {"fetch_run": None, "read_recorded": made, "worktree": nullcontext(repository)}.items():
        monkeypatch.setattr(reproduce, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(reproduce, "train_again", lambda *_, **__: made.run)
    monkeypatch.setattr(reproduce, "log_reproduction", log)
    monkeypatch.setattr(Recorded, "describe", lambda *_: "")
    again = reproduce.reproduce("0" * 32, repository, num_devices=None, confirm=lambda _: True)
    assert again.verdict.grade == "bitwise"
    said = "the verdict stays untracked: MLflow cannot be reached. hint: later\n" if away else ""
    assert capsys.readouterr().err == said


@pytest.mark.attack("a malicious repository or patch")
def test_a_commit_message_that_is_not_utf8_can_be_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("message").write_bytes(b"caf\xe9")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "-c", "i18n.commitEncoding=", "commit", "--quiet", "--allow-empty", "--file=message")
    assert reproduce._git("show", "--no-patch", "--format=%s", "HEAD").stdout.strip() == "caf\ufffd"


def test_without_git_no_run_can_be_reproduced(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(HostError, match=r"git cannot be run: No such file or directory\. hint: install git"):
        reproduce._git("show")


NAMED = "model: {{name: 'mine:make', kwargs: {}}}\n"


@pytest.mark.parametrize(
    ("committed", "given", "changed"),
    [
        ("seed: [", "seed: 9\ntrain: {epochs: 2}\n", ["seed: (absent) -> 9", "train.epochs: (absent) -> 2"]),
        ("seed: 9\n", "seed: 9\nmodel: {source: null}\ntrain: {epochs: 3}\n", ["train.epochs: 2 -> 3"]),
        ("seed: 9\nmodel: {name: mlp}\n", "seed: 9\n", ["model.name: mlp -> (absent)"]),
        (NAMED.format("{a: 1, b: 2}"), NAMED.format("{b: 2, a: 1}"), ["model.kwargs: the same keys in another order"]),
        (NAMED.format("{a: [{s: 1}]}"), NAMED.format("{a: [{s: true}]}"),
         ["model.kwargs.a: [{'s': 1}] -> [{'s': True}]"]),
        (NAMED.format("{a: 1, b: 0.0}"), NAMED.format("{a: 1.0, b: -0.0}"),
         ["model.kwargs.a: 1 -> 1.0", "model.kwargs.b: 0.0 -> -0.0"]),
        (NAMED.format("{true: 2}"), NAMED.format("{1: 2}"),
         ["model.kwargs.1: (absent) -> 2", "model.kwargs.True: 2 -> (absent)"]),
        (NAMED.format("{b: 2}"), NAMED.format("{a: (absent), b: 2}"), ["model.kwargs.a: (absent) -> (absent)"]),
    ],
    ids=["which cannot be read", "which leave keys to their defaults", "which have more keys", "in another order",
         "by the type of a value in a list", "by types and signs", "by the type of a key", "by such a text"],
)  # fmt: skip
@pytest.mark.attack("a malicious repository or patch")
def test_what_differs_from_the_params_of_a_commit(committed, given, changed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text(committed)
    commit_all(tmp_path)
    assert changed_params(recorded(tmp_path / "run", given)) == changed
