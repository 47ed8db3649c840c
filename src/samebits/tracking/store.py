"""The MLflow store in use: where it is, how to reach it, which of its failures may pass."""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from samebits.runlog import LOGS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mlflow import MlflowClient
    from mlflow.entities import Run

NOTE_TAG = "mlflow.note.content"
"""Tag that the UI shows as a description."""

RUN_TAG = "samebits.run"
"""Tag with the key that names a run in its local log and in run.json."""

_STORE_LOCK = LOGS.parent / "store.lock"


def tracking_uri(environ: Mapping[str, str] = os.environ) -> str:
    """MLFLOW_TRACKING_URI, else a SQLite file in the working directory."""
    return environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path.cwd() / 'mlflow.db'}"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file, which another user may have made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@cache
def connect(uri: str) -> MlflowClient:
    """A client of the store; one process at a time may create a fresh SQLite file."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # the sender itself tries again
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    if uri.startswith("sqlite:"):
        with locked(_STORE_LOCK):
            client.search_experiments(max_results=1)
    return client


def experiment_id(client: MlflowClient, name: str) -> str:
    """The experiment of that name, made if there is none; a local store keeps its artifacts beside it."""
    found = client.get_experiment_by_name(name)
    if found is None:
        with locked(_STORE_LOCK):
            found = client.get_experiment_by_name(name)
            if found is None:
                local = str(client.tracking_uri).startswith("sqlite:")
                location = (Path.cwd() / "mlartifacts").as_uri() if local else None
                return str(client.create_experiment(name, artifact_location=location))
    return str(found.experiment_id)


def find_run(client: MlflowClient, experiment: str, key: str) -> Run | None:
    """The run with such a key that was not deleted, the newest first."""
    found = client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{key}'", max_results=1)
    return found[0] if found else None


def is_permanent(error: Exception) -> bool:
    """Whether trying again cannot help: MLflow refused what it was sent."""
    from mlflow.exceptions import MlflowException

    refused = {"INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS", "INVALID_STATE"}
    return isinstance(error, MlflowException) and error.error_code in refused
