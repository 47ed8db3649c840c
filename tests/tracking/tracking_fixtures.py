"""A repository with a store of its own, and logs of trainings that are delivered there."""

import os
import shutil

import pytest
from mlflow import MlflowClient

from samebits.records import log as events_of_a_log
from samebits.records.log import LOGS, RunLog
from samebits.tracking.recorder import TIMES
from samebits.tracking.store import connect, tracking_uri
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
    log.append(events_of_a_log.EndEvent(status=status))
    log.close()
    return log.path


def write_files(folder, key):
    """What a training leaves, as far as it is delivered."""
    run_files(folder, run_record("ddp", run=key), **TIMING.model_dump())


def result(log, folder):
    key, out = log.path.stem, str(folder)
    log.append(events_of_a_log.ResultEvent(run=key, timing=TIMING, out_dir=out, weights_sha256="abc"))


def runs():
    client = connect(tracking_uri())
    found = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    return client, found
