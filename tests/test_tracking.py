"""Delivery of local logs to a real MLflow store."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from conftest import small, wait_for
from samebits import tracking
from samebits.params import parse_params
from samebits.placement import place
from samebits.runlog import LOGS, RunLog, record_comparison

PARAMS = parse_params({})
PLACEMENT = place("ddp", PARAMS.train, gpus=0, cores=1)


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


def start(key):
    log = RunLog(LOGS / f"{key}.jsonl")
    params = PARAMS.model_dump(mode="json")
    log.event("start", run=key, strategy="ddp", numerics="fast", placement=PLACEMENT.as_dict(), params=params)
    return log


def result(log, folder):
    for name in ("model.safetensors", "losses.csv", "timing.json", "run.json"):
        (folder / name).write_text(name)
    names = ("training_seconds", "samples_per_sec", "step_time_ms", "step_time_p5_ms", "step_time_p95_ms")
    timing = {**dict.fromkeys(names, 2.0), "peak_memory_gib": {"device0": 1.0, "device1": 3.0}}
    log.event("result", timing=timing, out_dir=str(folder), weights_sha256="abc")


def runs():
    client = tracking._client()
    found = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    return client, found


def test_a_run_is_delivered_whole(repository):
    log = start("one")
    losses = [1.0 / step for step in range(1, 1502)]  # more than MLflow takes in one call
    log.losses(1, losses[:700], [0.1] * 700)
    log.losses(701, losses[700:], [0.1] * 801)
    result(log, repository)
    log.event("end", status="FINISHED")
    log.close()
    tracking.follow(log.path)
    client, (run,) = runs()
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "ddp-fast x1"
    assert run.data.params["train.optimizer.lr"] == "0.1"
    assert run.data.params["data.kwargs.features"] == "128"
    assert run.data.tags["strategy"] == "ddp"
    assert run.data.tags["labels"] == "one_device"
    assert run.data.tags["weights_sha256"] == "abc"
    assert run.data.metrics["peak_memory_gib"] == 3.0
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(point.step, point.value) for point in history] == list(enumerate(losses, start=1))
    names = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert names == {"model.safetensors", "losses.csv", "timing.json", "run.json", "params.yaml"}
    assert (repository / "mlartifacts").is_dir()


def test_losses_arrive_while_training_goes_on(repository):
    log = start("alive")
    delivery = tracking.Delivery(log.path)
    delivery.deliver()
    log.losses(1, [2.0, 1.0], [0.1, 0.1])
    os.write(log._fd, b'{"event": "losses", "first')  # a line that is being written
    delivery.deliver()
    _, (run,) = runs()
    assert (run.info.status, run.data.metrics["loss"]) == ("RUNNING", 1.0)
    os.write(log._fd, b'_step": 3, "time_ms": 1, "losses": [0.5], "learning_rates": [0.1]}\n')
    delivery.deliver()
    log.close()
    _, (run,) = runs()
    assert run.data.metrics["loss"] == 0.5


def test_a_writer_that_is_gone_leaves_a_failed_run(repository):
    log = start("gone")
    log.losses(1, [2.0], [0.1])
    log.close()
    tracking.follow(log.path)
    _, (run,) = runs()
    assert (run.info.status, run.data.metrics["loss"]) == ("FAILED", 2.0)


@pytest.mark.parametrize("lost", [None, {"run_id": None, "offset": 0, "ended": False}])
def test_delivering_again_changes_nothing(repository, lost):
    log = start("again")
    log.losses(1, [2.0, 1.0], [0.1, 0.1])
    log.event("end", status="KILLED")
    log.close()
    tracking.follow(log.path)
    if lost:  # as if the sender had died before it could write down how far it was
        log.path.with_suffix(".state.json").write_text(json.dumps(lost))
    tracking.follow(log.path)
    client, (run,) = runs()
    assert run.info.status == "KILLED"
    assert len(client.get_metric_history(run.info.run_id, "loss")) == 2


def test_sync_delivers_what_the_sender_could_not(repository, monkeypatch):
    log = start("late")
    log.event("end", status="FINISHED")
    log.close()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(Exception, match=r"127\.0\.0\.1"):
        tracking.follow(log.path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert tracking.sync() == 1
    assert tracking.sync() == 0
    _, (run,) = runs()
    assert run.info.status == "FINISHED"


def test_a_comparison_reaches_the_runs_it_compares(repository):
    log = start("compared")
    log.event("end", status="FINISHED")
    log.close()
    tracking.follow(log.path)
    row = {"run": "compared", "eval_loss": 2.0, "accuracy": None, "scaling_efficiency": 0.5, "above_floor": 0.1,
           "floor": 1.9, "speedup": {"median": 1.5, "low": 1.4, "high": 1.6}, "bound": None,
           "labels": [{"kind": "noisy", "text": ""}]}  # fmt: skip
    assert record_comparison({"rows": [row], "params": PARAMS.model_dump(mode="json")})
    _, (run,) = runs()
    assert run.data.metrics["speedup"] == 1.5
    assert "accuracy" not in run.data.metrics
    assert run.data.tags["labels"] == "noisy"


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
        states = [json.loads(file.read_text()) for file in (folder / LOGS).glob("*.state.json")]
        return states and all(state["ended"] for state in states)

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


def test_a_killed_training_is_a_failed_run(stage, data_dir, repository):
    params = stage.write_params(small(epochs=100_000))
    command = [sys.executable, stage.script("train"), "--strategy", "single", "--data-dir", str(data_dir(params))]
    with subprocess.Popen(command, cwd=stage.folder, stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: any('"losses"' in file.read_text() for file in (stage.folder / LOGS).glob("*.jsonl")))
        process.send_signal(signal.SIGKILL)
    client, (run,) = finished(stage.folder)
    assert run.info.status == "FAILED"
    assert run.data.metrics["loss"] > 0
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["params.yaml"]
