"""Delivery of local logs to a real MLflow store."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

from conftest import ROOT, small, wait_for
from samebits.errors import UserError
from samebits.files import write_json
from samebits.params import parse_params
from samebits.placement import place
from samebits.records import FILES, read_run
from samebits.runlog import LOGS, RunLog
from samebits.tracking import comparison as comparing
from samebits.tracking import delivery, sender, telemetry
from samebits.tracking.comparison import NOTE_TAG, PARENT_TAG, comparison_key
from samebits.tracking.delivery import Delivery, deliver, sync
from samebits.tracking.fetch import find_run_files
from samebits.tracking.recorder import TIMES, record_all
from samebits.tracking.restore import events
from samebits.tracking.store import RUN_TAG, connect, tracking_uri
from samebits.tracking.view import link

PARAMS = parse_params({})
PLACEMENT = place("ddp", PARAMS.train, gpus=0, cores=1)
HOST = {"cpu": {"model": "CPU"}, "gpus": [], "image_digest": None}
CARD = {"task": "vectors", "sha256": "5a" * 32, "input_dtype": "float32", "input_shape": [128], "target_dtype": "int64",
        "target_shape": [], "train": {"num_samples": 8}, "floor": 1.9}  # fmt: skip
TIMING = {
    **dict.fromkeys(TIMES, 2.0),
    "peak_memory_gib": {"device0": 1.0, "device1": 3.0},
    "speedup": {"median": 1.5, "low": 1.4, "high": 1.6},
    "bound": None,
}  # fmt: skip


@pytest.fixture(scope="session")
def migrated_store(tmp_path_factory):
    """A fresh SQLite store, whose first use takes seconds."""
    folder = tmp_path_factory.mktemp("store")
    code = f"import mlflow; mlflow.MlflowClient('sqlite:///{folder}/mlflow.db').search_experiments()"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    return folder / "mlflow.db"


@pytest.fixture
def repository(tmp_path, migrated_store, monkeypatch):
    """A working directory with an empty MLflow store."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copy(migrated_store, tmp_path)
    return tmp_path


def start(key, **placement):
    log = RunLog(LOGS / f"{key}.jsonl")
    params, where = PARAMS.model_dump(mode="json"), {**PLACEMENT.as_dict(), **placement}
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    log.event("start", tracking_uri=uri, run=key, strategy="ddp", numerics="fast", placement=where, params=params)
    return log


def finish(log, status="FINISHED"):
    log.event("end", status=status)
    log.close()
    return log.path


def write_files(folder, key):
    """What a training leaves, as far as it is delivered."""
    record = {"run": key, "strategy": "ddp", "numerics": "fast", "placement": PLACEMENT.as_dict(), "host": HOST,
              "data": CARD, "params": PARAMS.model_dump(mode="json"), "weights_sha256": "abc",
              "measurement": {"step_ms": [400.0, 200.0]}}  # fmt: skip
    write_json(folder / "run.json", record)
    write_json(folder / "timing.json", TIMING)
    (folder / "losses.csv").write_text("step,loss\n1,2.0\n2,1.5\n")
    (folder / "model.safetensors").write_text("weights")


def result(log, folder):
    log.event("result", run=log.path.stem, timing=TIMING, out_dir=str(folder), weights_sha256="abc")


def runs():
    client = connect(tracking_uri())
    found = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    return client, found


def losses_of(client, run):
    return [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "loss")]


def test_a_run_is_delivered_whole(repository):
    log = start("one")
    log.event("setup", host=HOST, data=CARD, data_dir=str(repository / "data"))
    losses = [1.0 / step for step in range(1, 1502)]  # more than MLflow takes in one call
    log.losses(1, losses[:700], [0.1] * 700)
    log.losses(701, losses[700:], [0.1] * 801)
    write_files(repository, "one")
    result(log, repository)
    assert deliver(finish(log))
    client, (run,) = runs()
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "ddp-fast x1"
    assert run.data.params["train.optimizer.lr"] == "0.1"
    assert run.data.params["data.kwargs.features"] == "128"
    tags = {"strategy": "ddp", "labels": "one_device", "weights_sha256": "abc", "data_sha256": "5a" * 32}
    assert {name: run.data.tags[name] for name in tags} == tags
    assert undocumented(run) <= {"peak_memory_gib.device1"}
    figures = {"peak_memory_gib": 3.0, "peak_memory_gib.device0": 1.0, "speedup": 1.5, "training_seconds": 2.0}
    assert {name: run.data.metrics[name] for name in figures} == figures
    assert losses_of(client, run) == list(enumerate(losses, start=1))
    names = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert names == {*FILES, "params.yaml"}
    dataset = run.inputs.dataset_inputs[0].dataset
    assert (dataset.name, dataset.digest) == ("vectors", ("5a" * 32)[:36])
    assert (repository / "mlartifacts").is_dir()


def test_what_a_run_was_made_from_may_be_known_after_all_else_was_delivered(repository):
    """A busy host starts the sender that writes it down late, while another one delivers the run."""
    log = start("late")
    finished = finish(log)
    assert deliver(finished)
    assert (Delivery(finished).done, Delivery(finished).final) == (True, False)
    found = {
        "git": {"commit": "a" * 40, "dirty": False},
        "packages": {"torch": "2.13.0"},
        "environment": {},
        "patch": None,
    }
    write_json(finished.with_suffix(".provenance.json"), found)
    assert not Delivery(finished).done
    assert deliver(finished)
    assert (Delivery(finished).done, Delivery(finished).final) == (True, True)
    assert runs()[1][0].data.tags["git_commit"] == "a" * 40


def test_losses_arrive_while_training_goes_on(repository):
    log = start("alive")
    assert not deliver(log.path)
    log.losses(1, [2.0, 1.0], [0.1, 0.1])
    os.write(log._fd, b'{"event": "losses", "first')  # a line that is being written
    assert not deliver(log.path)
    _, (run,) = runs()
    assert (run.info.status, run.data.metrics["loss"]) == ("RUNNING", 1.0)
    os.write(log._fd, b'_step": 3, "time_ms": 1, "losses": [0.5], "learning_rates": [0.1]}\n')
    deliver(log.path)
    log.close()
    _, (run,) = runs()
    assert run.data.metrics["loss"] == 0.5


def test_a_writer_that_is_gone_leaves_a_failed_run(repository):
    log = start("gone")
    log.losses(1, [2.0], [0.1])
    log.close()
    assert deliver(log.path)
    _, (run,) = runs()
    assert (run.info.status, run.data.metrics["loss"]) == ("FAILED", 2.0)


@pytest.mark.parametrize("lost", [None, {"uri": None, "run_id": None, "offset": 0, "ended": False}])
def test_delivering_again_changes_nothing(repository, lost):
    log = start("again")
    log.losses(1, [2.0, 1.0], [0.1, 0.1])
    path = finish(log, "KILLED")
    deliver(path)
    if lost:  # as if the sender had died before it could write down how far it was
        path.with_suffix(".state.json").write_text(json.dumps(lost))
    deliver(path)
    client, (run,) = runs()
    assert run.info.status == "KILLED"
    assert len(client.get_metric_history(run.info.run_id, "loss")) == 2


def test_what_the_store_refuses_is_kept_and_told(repository, monkeypatch):
    path = finish(start("refused"))
    refusal = MlflowException("no such thing", INVALID_PARAMETER_VALUE)

    def refuse(*arguments):
        raise refusal

    monkeypatch.setattr(delivery.Recorder, "record", refuse)
    assert sync() == (0, {path: "no such thing"})
    assert sync() == (0, {})


@pytest.fixture
def serve(monkeypatch):
    """Run a sender in this process until it finds nothing more to do."""
    for name in ("POLL_SECONDS", "RETRY_SECONDS", "LINGER_SECONDS", "GIVE_UP_SECONDS"):
        monkeypatch.setattr(sender, name, 0.0)
    monkeypatch.setenv(sender.DELAY, "0")
    return lambda: sender.Sender().serve()


def test_a_store_that_is_away_does_not_hold_up_another(repository, monkeypatch, serve, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    logs = [finish(start(name)) for name in ("first", "second")]
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    finish(start("third"))
    serve()
    said = capsys.readouterr().err
    assert "first.jsonl" in said
    assert "second.jsonl" not in said  # the store was asked once, for both of its logs
    assert {run.data.tags[RUN_TAG] for run in runs()[1]} == {"third"}
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert list(sync()[1]) == logs
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert sync() == (2, {})  # to the store that is in use now
    assert sync() == (0, {})
    _, found = runs()
    statuses = {run.data.tags[RUN_TAG]: run.info.status for run in found}
    assert statuses == dict.fromkeys(("first", "second", "third"), "FINISHED")


def test_a_sender_delivers_what_others_left(repository, serve):
    for name in ("first", "second"):
        finish(start(name))
    serve()
    assert len(runs()[1]) == 2


@pytest.mark.parametrize(("cores", "rest"), [(2, sender.REST), (64, sender.REST_WITH_SPARE_CORES)])
def test_beside_a_training_a_sender_works_a_share_of_the_time(cores, rest, repository, serve, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    log = start("alive")
    for _ in range(3):
        log.event("setup", host=HOST, data=CARD, data_dir="data")
    pauses, now = [], iter(range(1000))

    def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) == 3:
            log.close()

    monkeypatch.setattr(sender, "_clock", lambda: next(now) / 10)  # each delivery takes a tenth of a second
    monkeypatch.setattr(sender.time, "sleep", sleep)
    serve()
    assert pauses[:3] == pytest.approx([0.0, rest / 10, rest / 10])  # the first delivery imports MLflow, once
    assert [run.info.status for run in runs()[1]] == ["FAILED"]


def test_a_sender_leaves_a_young_training_alone(repository, serve, monkeypatch):
    monkeypatch.delenv(sender.DELAY)
    finish(start("ended"))
    young = start("young")
    passes = iter(range(3))

    def sleep(_):
        if next(passes, None) is None:
            young.close()

    monkeypatch.setattr(sender.time, "sleep", sleep)
    monkeypatch.setattr(sender, "deliver", lambda log, telemetry, at_most: asked.append(log))
    monkeypatch.setattr(sender, "GIVE_UP_SECONDS", 0.0)
    asked = []
    serve()
    assert next(passes, None) is None  # it waited for the young one to end, and then began
    assert len(asked) == 2


def test_files_of_a_later_run_are_not_uploaded_as_this_ones(repository):
    log = start("replaced")
    write_files(repository, "later")
    result(log, repository)
    deliver(finish(log))
    client, (run,) = runs()
    assert run.data.tags["artifacts"].startswith("unavailable: ")
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"params.yaml"}


def test_commit_packages_and_patch_are_recorded(repository):
    found = {"git": {"commit": "c0ffee", "dirty": True}, "patch": "one.patch", "patch_omits": [],
             "packages": {"torch": "2.13.0"}, "environment": {}}  # fmt: skip
    log = start("one")
    deliver(log.path)  # the note may come later than the first delivery
    write_json(log.path.with_suffix(".provenance.json"), found)
    log.path.with_suffix(".patch").write_text("changes")
    deliver(finish(log))
    client, (run,) = runs()
    assert (run.data.tags["git_commit"], run.data.tags["version.torch"]) == ("c0ffee", "2.13.0")
    files = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert files == {"params.yaml", "provenance.json", "one.patch"}


# -- comparisons -----------------------------------------------------------------------------------------------

ROW = {
    "run": "20261121-101500-ddp-fast-abc123", "strategy": "ddp", "numerics": "fast", "devices_used": 2,
    "device_type": "cpu", "training_seconds": 2.0, "eval_loss": 2.0, "accuracy": None, "scaling_efficiency": 0.75,
    "above_floor": 0.1, "floor": 1.9, "speedup": {"median": 1.5, "low": 1.4, "high": 1.6},
    "bound": {"median": 1.6, "low": 1.6, "high": 1.6}, "slice_step_ms": {"own": 4.0, "single": 6.0, "share": 3.75},
    "labels": [{"kind": "noisy", "text": "it was"}], "notes": [], "not_applied": {}, "speedup_unavailable": None,
    "verdict": None, "weights_sha256": "abc", "price": None,
}  # fmt: skip
COMPARISON = {"task": "vectors", "model": "mlp", "global_batch_size": 64, "steps": 2, "rows": [ROW],
              "params": PARAMS.model_dump(mode="json"), "host_fingerprint": "f00",
              "host": {"gpus": [], "cpu": {"model": "CPU", "cores": 2}, "torch": "2.13.0"}}  # fmt: skip


def undocumented(run):
    """Metrics and tags of a run that the reference does not name; MLflow's own aside."""
    page = (ROOT / "docs/reference/mlflow.md").read_text()
    names = {*run.data.metrics, *(name for name in run.data.tags if not name.startswith("mlflow."))}
    return {name for name in names if f"`{name}`" not in page}


def compare(repository):
    reports = repository / "reports"
    write_json(reports / "comparison.json", COMPARISON)
    assert sender.hand_over(COMPARISON, reports=reports, runs=repository / "runs", wait_seconds=60)
    client, found = runs()
    return client, {run.data.tags[RUN_TAG]: run for run in found}


def test_a_comparison_is_the_parent_of_the_runs_it_compares(repository):
    deliver(finish(start(ROW["run"])))
    for _ in range(2):  # the second time changes nothing
        client, found = compare(repository)
        parent = found[comparison_key([ROW])]
        child = found[ROW["run"]]
        assert len(found) == 2
        assert child.data.tags[PARENT_TAG] == parent.info.run_id
        assert child.data.tags["labels"] == "noisy"
        assert "1.50 times the speed of single" in child.data.tags[NOTE_TAG]
        assert child.data.metrics == {"speedup": 1.5, "bound": 1.6, "eval_loss": 2.0, "scaling_efficiency": 0.75,
                                      "loss_floor": 1.9, "loss_above_floor": 0.1}  # fmt: skip
        assert undocumented(child) == set()
        assert len(client.get_metric_history(child.info.run_id, "speedup")) == 1
        assert parent.data.metrics == {"speedup.ddp-fast": 1.5}
        assert "| ddp-fast |" in parent.data.tags[NOTE_TAG]
        assert parent.info.status == "FINISHED"
        assert [file.path for file in client.list_artifacts(parent.info.run_id, "report")] == ["report/comparison.json"]
        tags = client.get_experiment(parent.info.experiment_id).tags
        assert {"mlflow.experimentKind", "mlflow.sharedViewState.samebits"} <= set(tags)
        assert (repository / ".samebits/view.txt").read_text() == link(parent.info.experiment_id)


def test_a_run_that_mlflow_does_not_know_is_recorded_again(repository):
    write_files(repository / "runs" / "ddp-fast", ROW["run"])
    client, found = compare(repository)
    run = found[ROW["run"]]
    assert run.data.tags["restored"] == "recorded again from the run's files"
    assert run.data.tags["git_commit"].startswith("unavailable: ")
    assert losses_of(client, run) == [(1, 2.0), (2, 1.5)]
    assert run.info.start_time == 1795256100000  # from the run's name: 2026-11-21 10:15:00 UTC
    assert run.info.status == "FINISHED"
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {*FILES, "params.yaml"}


def test_recording_from_files_twice_changes_nothing(repository):
    write_files(repository, ROW["run"])
    client = connect(tracking_uri())
    first, second = (record_all(client, events(read_run(repository))) for _ in range(2))
    assert first == second
    assert len(client.get_metric_history(first, "loss")) == 2


def test_a_comparison_that_was_replaced_is_left_to_the_later_one(repository, capsys):
    reports = repository / "reports"
    write_json(reports / "comparison.json", COMPARISON)
    event = {"key": "another", "reports": str(reports), "runs": "runs", "time_ms": 1}
    comparing.record_comparison(connect(tracking_uri()), event)
    assert "holds a later comparison" in capsys.readouterr().err
    assert runs()[1] == []


def test_a_run_is_found_by_its_folder_and_by_its_id(repository, tmp_path_factory):
    write_files(repository / "here", ROW["run"])
    run_id = record_all(connect(tracking_uri()), events(read_run(repository / "here")))
    first = find_run_files("here", tmp_path_factory.mktemp("a"))
    second = find_run_files(run_id, tmp_path_factory.mktemp("b"))
    assert first.folder != second.folder
    assert (first.record, first.timing, first.losses) == (second.record, second.timing, second.losses)
    assert (second.folder / "model.safetensors").read_text() == "weights"


def test_a_run_without_files_cannot_be_fetched(repository, tmp_path):
    log = start("empty")
    deliver(finish(log))
    with pytest.raises(UserError, match=r"has no model\.safetensors\. hint: choose a training that has ended"):
        find_run_files(runs()[1][0].info.run_id, tmp_path)


# -- telemetry -------------------------------------------------------------------------------------------------


def test_telemetry_samples_the_host_and_the_gpus_in_use(repository, monkeypatch):
    asked = []

    def gpu_counters(devices):
        asked.append(list(devices))
        return {"gpu_1_utilization_percentage": 50.0}

    monkeypatch.setattr(telemetry, "gpu_counters", gpu_counters)
    log = start("watched", device_type="cuda", devices=[1])
    watching = telemetry.Telemetry([1], seconds=0.05)
    watching.start()
    wait_for(lambda: len(asked) >= 3)
    watching.stop()
    watching.join()
    deliver(log.path, watching)
    _, (run,) = runs()
    assert asked[0] == [1]
    assert run.data.metrics["system/gpu_1_utilization_percentage"] == 50.0
    assert run.data.metrics["system/cpu_utilization_percentage"] >= 0
    assert watching.take() == []
    log.close()


def test_telemetry_that_could_not_be_delivered_is_kept(repository, monkeypatch):
    log = start("kept")
    deliver(log.path)
    watching = telemetry.Telemetry([])
    watching.sample()

    def fail(*arguments):
        raise OSError("away")

    monkeypatch.setattr(delivery, "send", fail)
    with pytest.raises(OSError, match="away"):
        deliver(log.path, watching)
    assert watching.take() != []
    log.close()


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

    wait_for(ended)
    return runs()


def test_a_training_is_tracked_by_a_process_of_its_own(stage, data_dir, repository):
    (stage.folder / "mine.py").write_text(MODEL)
    params = stage.write_params(small(model={"name": "mine:make", "source": "mine.py"}))
    done = stage("train", "--strategy", "ddp", "--data-dir", str(data_dir(params)))
    assert done.returncode == 0, done.stderr
    client, (run,) = finished(stage.folder)
    assert run.info.status == "FINISHED"
    assert len(client.get_metric_history(run.info.run_id, "loss")) == 8
    assert {"host_fingerprint", "data_sha256", "git_commit"} <= set(run.data.tags)


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGKILL, "FAILED"), (signal.SIGTERM, "KILLED")])
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


class Server:
    """A real MLflow server on loopback that can be killed and started again on the same port."""

    def __init__(self, folder, store):
        self.folder, self.store = folder, store
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"

    def start(self):
        command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{self.store}",
                   "--artifacts-destination", str(self.folder / "artifacts"), "--host", "127.0.0.1",
                   "--port", str(self.port), "--workers", "1"]  # fmt: skip
        environ = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self.folder / "server.log").open("ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, env=environ)

    def kill(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.mark.slow
def test_a_server_that_is_away_for_a_while_gets_every_loss_once(stage, data_dir, repository, tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("server"), repository / "mlflow.db")
    environ = {"MLFLOW_TRACKING_URI": server.uri, sender.DELAY: "1"}
    params = stage.write_params(small(epochs=100_000, model={"name": "wide_mlp"}))
    command = [sys.executable, stage.script("train"), "--strategy", "single", "--data-dir", str(data_dir(params))]
    server.start()
    try:
        with subprocess.Popen(
            command, cwd=stage.folder, stderr=subprocess.DEVNULL, env={**os.environ, **environ}
        ) as process:
            wait_for(lambda: any(state["offset"] > 3_000 for state in states(stage.folder)), seconds=120)
            server.kill()
            (log,) = (stage.folder / LOGS).glob("*.jsonl")
            size = log.stat().st_size
            wait_for(lambda: log.stat().st_size > size + 500)  # the training does not care
            assert process.poll() is None
            server.start()
            away = states(stage.folder)[0]["offset"]
            wait_for(lambda: states(stage.folder)[0]["offset"] > away, seconds=120)
            process.send_signal(signal.SIGTERM)
        wait_for(lambda: states(stage.folder)[0]["ended"], seconds=120)
    finally:
        server.kill()
    logged = [json.loads(line) for line in log.read_text().splitlines()]
    expected = [loss for event in logged if event["event"] == "losses" for loss in event["losses"]]
    client, (run,) = runs()
    assert run.info.status == "KILLED"
    assert losses_of(client, run) == list(enumerate(expected, start=1))
