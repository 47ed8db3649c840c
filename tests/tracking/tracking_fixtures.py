"""A repository with a store of its own, logs of trainings that are delivered there, and a real MLflow server."""

import os
import shutil
import signal
import subprocess
import sys

import pytest
from mlflow import MlflowClient

from ports import free_port
from samebits.records import log as events_of_a_log
from samebits.records.log import LOGS, RunLog
from samebits.records.run import read_run
from samebits.tracking.comparison import comparison_key, record_comparison
from samebits.tracking.recorder import TIMES, events, record_all
from samebits.tracking.store import RUN_TAG, connect, tracking_uri
from samples import PARAMS, card, host, placed, ratio, run_files, run_record, timing

PLACEMENT, _ = placed("ddp", gpus=0, cores=1)
TIMING = timing(
    **dict.fromkeys(TIMES, 2.0), peak_memory_gib={"device0": 1.0, "device1": 3.0}, speedup=ratio(1.5, 1.4, 1.6)
)


@pytest.fixture(scope="session", name="migrated_store")
def make_migrated_store(tmp_path_factory):
    """A fresh SQLite store, whose first use takes seconds."""
    folder = tmp_path_factory.mktemp("store")
    MlflowClient(f"sqlite:///{folder}/mlflow.db").search_experiments()
    return folder / "mlflow.db"


@pytest.fixture(name="repository")
def make_repository(tmp_path, migrated_store, monkeypatch):
    """A working directory with params, and with an empty MLflow store."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").touch()
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copy(migrated_store, tmp_path)
    return tmp_path


def start(key, **placement):
    log = RunLog(LOGS / f"{key}.jsonl")
    log.append(
        events_of_a_log.StartEvent(
            log_schema=events_of_a_log.SCHEMA,
            tracking_uri=os.environ.get("MLFLOW_TRACKING_URI"),
            run=key,
            strategy="ddp",
            numerics="fast",
            placement=PLACEMENT.model_copy(update=placement),
            params=PARAMS,
        )
    )
    return log


def setup(log, data_dir="data"):
    log.append(events_of_a_log.SetupEvent(host=host(), data=card(), data_dir=data_dir))


def finish(log, status="FINISHED"):
    """Let the writer of a log end, with an event of that status, or without one."""
    if status:
        log.append(events_of_a_log.EndEvent(status=status))
    log.close()
    return log.path


def write_files(folder, key):
    """What a training leaves, as far as it is delivered."""
    run_files(folder, run_record("ddp", run=key), **TIMING.model_dump())


def result(log, folder):
    key, out = log.path.stem, str(folder)
    log.append(events_of_a_log.ResultEvent(run=key, timing=TIMING, out_dir=out, weights_sha256="abc"))


def recorded_from_files(folder, key="one"):
    """The id of a run that MLflow knows from the files that it left in a folder."""
    write_files(folder, key)
    return record_all(connect(tracking_uri()), events(read_run(folder)))


def record_compared(folder, compared, **changes):
    """Write a comparison of the runs in a folder, and record it as a sender does."""
    compared.write(folder / "reports/comparison.json")
    facts = {"key": comparison_key(compared), "keys": (), "reports": str(folder / "reports"), "runs": str(folder)}
    schema = events_of_a_log.SCHEMA
    event = events_of_a_log.ComparedEvent(log_schema=schema, tracking_uri=None, **{**facts, **changes})
    record_comparison(connect(tracking_uri()), event)


def runs(uri=None):
    client = connect(uri or tracking_uri())
    found = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    return client, found


def keys():
    """The keys of the runs that MLflow knows."""
    return [run.data.tags[RUN_TAG] for run in runs()[1]]


class Server:
    """A real MLflow server on loopback, whose files are in a folder; it can be killed and started on the same port."""

    def __init__(self, folder, store):
        self.folder, self.store, self.port = folder, store, free_port()
        self.uri = f"http://127.0.0.1:{self.port}"

    def start(self):
        command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{self.store}",
                   "--artifacts-destination", str(self.folder / "artifacts"), "--host", "127.0.0.1",
                   "--port", str(self.port), "--workers", "1"]  # fmt: skip
        environ = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self.folder / "server.log").open("ab") as output:
            self.process = subprocess.Popen(
                command, cwd=self.folder, stdout=output, stderr=output, start_new_session=True, env=environ
            )

    def kill(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
