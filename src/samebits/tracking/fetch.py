"""A run by its folder or by its MLflow run id."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from samebits.errors import HostError, UserError
from samebits.records import FILES, read_run
from samebits.tracking.store import connect, tracking_uri

if TYPE_CHECKING:
    from samebits.records import Run

_RUN_ID = re.compile(r"[0-9a-f]{32}")


def find_run_files(reference: str, scratch: Path) -> Run:
    """The run that ``reference`` names, its files in place or downloaded to ``scratch``.

    Raises:
        UserError: there is no such folder and no such run, or it has no files.
        HostError: the MLflow store cannot be reached.
    """
    folder = Path(reference)
    if folder.is_dir():
        return read_run(folder)
    if not _RUN_ID.fullmatch(reference):
        hint = "give a run's folder such as runs/single-fast, or the id of an MLflow run"
        raise UserError(f"{reference}: no such folder, and not a run id (32 hexadecimal digits)", hint=hint)
    return read_run(_download(reference, scratch))


def fetch_run(run_id: str, scratch: Path) -> Path:
    """Download everything that MLflow has of a run.

    Raises:
        UserError: there is no such run, or it has no files.
        HostError: the MLflow store cannot be reached.
    """
    if not _RUN_ID.fullmatch(run_id):
        raise UserError(f"{run_id}: not a run id (32 hexadecimal digits)", hint="it is on the run's page in MLflow")
    return _download(run_id, scratch, everything=True)


def _download(run_id: str, scratch: Path, *, everything: bool = False) -> Path:
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode

    uri = tracking_uri()
    try:
        client = connect(uri)
        here = {file.path for file in client.list_artifacts(run_id)}
        for name in (*FILES, *(("params.yaml", "provenance.json") if everything else ())):
            if name not in here:
                hint = "choose a training that has ended; a comparison's own run holds no weights"
                raise UserError(f"run {run_id} has no {name}", hint=hint)
        for name in here if everything else FILES:
            client.download_artifacts(run_id, name, str(scratch))
    except MlflowException as error:
        first = " ".join(str(error).split())[:300]
        if error.error_code == ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
            raise UserError(f"MLflow has no run {run_id}", hint="is MLFLOW_TRACKING_URI the right one?") from None
        raise HostError(f"MLflow cannot be reached: {first}", hint="see `samebits doctor`") from None
    return scratch
