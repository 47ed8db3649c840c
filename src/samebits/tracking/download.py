"""Fetch a run's files from MLflow in a separate process, because a server may never answer or never stop sending."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from samebits.errors import (
    HostError,
    SamebitsError,
    UserError,
    caused_by,
    first_line,
    from_exit_code,
    last_line,
    reason,
)
from samebits.host import private_bytes
from samebits.params import require_repository
from samebits.records.run import FILES, read_run
from samebits.tracking.limits import ANSWER_SECONDS, HINT, SLOWEST, last_refusal
from samebits.tracking.store import connect, errors_of_the_store, file_of, tracking_uri

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from samebits.records import run as records

_SLACK = 2**20  # bytes above the listed sizes, since file systems count differently
_SPARE = 2**30  # bytes of the disk that are left free
_LARGEST = {".json": 2**26, ".csv": 2**26, ".yaml": 2**18, ".patch": 2**27}
"""Bytes of a file by its suffix; a run of a million steps has 30 MiB of losses. Weights may fill the disk."""
_MEMORY = 2**30  # bytes of this process: files are streamed, and a list of files is short
_MORE = ("params.yaml", "provenance.json")  # more files of a run that can be made again
_FILE_NAME = re.compile(r"\w[\w.-]*")
_POLL_SECONDS = 0.1
_STILL_SECONDS = 5 * ANSWER_SECONDS
_SAID_SECONDS = 15.0  # how often a long fetch says how far it is
_RUN_ID = re.compile(r"[0-9a-f]{32}")


def find_run_files(reference: str, scratch: Path) -> records.Run:
    """The run that ``reference`` names: a folder, or the id of an MLflow run, which is downloaded to ``scratch``.

    Raises:
        UserError: there is no such folder and no such run, or it has no files.
        HostError: see ``fetch``.
    """
    if os.path.isdir(reference):  # noqa: PTH112 - Path.is_dir raises OSError for a name that is too long
        return read_run(Path(reference))
    if not _RUN_ID.fullmatch(reference):
        hint = "give a run's folder such as runs/single-fast, or the id of an MLflow run"
        raise UserError(f"{reference}: no such folder, and not a run id (32 hexadecimal digits)", hint=hint)
    require_repository()  # elsewhere MLflow would make a store
    fetch(reference, scratch)
    with errors_by_run(reference, scratch):
        return read_run(scratch)


@contextmanager
def errors_by_run(run_id: str, folder: Path) -> Iterator[None]:
    """Let errors of files in a temporary ``folder`` name the run that they were fetched from."""
    try:
        yield
    except UserError as error:
        if str(folder) not in error.message:
            raise
        text = error.message.replace(f"{folder}/", "").replace(str(folder), "its files")
        hint = "its artifacts in MLflow are not what samebits has recorded"
        raise UserError(f"run {run_id}: {text}", hint=hint) from None


def fetch_run(run_id: str, scratch: Path) -> Path:
    """Download everything that MLflow has of a run. Raises UserError and HostError: see ``fetch``."""
    if not _RUN_ID.fullmatch(run_id):
        raise UserError(f"{run_id}: not a run id (32 hexadecimal digits)", hint="it is on the run's page in MLflow")
    return fetch(run_id, scratch, everything=True)


def fetch(run_id: str, folder: Path, *, everything: bool = False) -> Path:
    """Download a run's own files, or ``everything`` that MLflow has of it, to ``folder``.

    Raises:
        UserError: there is no such run, or it has no files.
        HostError: the MLflow store cannot be reached, is too slow, or sends more than it says.
    """
    call = {"run_id": run_id, "folder": str(folder), "seconds": ANSWER_SECONDS, "everything": everything}
    command = [sys.executable, "-P", "-m", "samebits.tracking.download", json.dumps(call)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        size, grew = -1, time.monotonic()
        while True:
            try:
                stdout, stderr = process.communicate(timeout=_SAID_SECONDS)
                break
            except subprocess.TimeoutExpired:
                if (now := _size(folder)) != size:
                    size, grew = now, time.monotonic()
                if time.monotonic() > grew + _STILL_SECONDS:  # its own watch did not end it
                    process.kill()
                    raise HostError(f"run {run_id}: nothing has come for minutes", hint=_hint_if_slow()) from None
                sys.stderr.write(f"fetching run {run_id}: {size / 2**20:.0f} MiB so far\n")
            except BaseException:  # a signal
                process.kill()
                raise
    try:
        exit_code, message, hint = json.loads(last_line(stdout))
    except ValueError:
        raise HostError(f"MLflow's client failed: {last_line(stderr)}", hint="see `samebits doctor`") from None
    if exit_code:
        raise from_exit_code(exit_code, message, hint)
    return folder


@errors_of_the_store()
def download(run_id: str, folder: Path, watch: Watch, *, everything: bool = False) -> None:
    """As ``fetch``, in this process. ``watch`` is told the listed sizes."""
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode

    client = connect(tracking_uri())
    watch.begin()  # the import of MLflow takes none of the server's time
    try:
        listed = client.list_artifacts(run_id)
    except SamebitsError:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise HostError(f"MLflow's server lists no files: {reason(error)}", hint=HINT) from None
    except MlflowException as error:
        if not caused_by(error, HostError) and error.error_code == ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
            raise UserError(f"MLflow has no run {run_id}", hint="is MLFLOW_TRACKING_URI the right one?") from None
        raise
    # A server may list any name. Only plain file names are artifacts of this run.
    here = {file.path: file.file_size for file in listed if _FILE_NAME.fullmatch(file.path)}
    for name in (*FILES, *(_MORE if everything else ())):
        if name not in here:
            hint = "choose a training that has ended; a comparison's own run holds no weights"
            raise UserError(f"run {run_id} has no {name}", hint=hint)
    names = [*here] if everything else FILES
    for name in names:
        most = _LARGEST.get(Path(name).suffix, shutil.disk_usage(folder).free - _SPARE)
        if not 0 <= (here[name] or 0) <= most:
            text = f"MLflow's server lists {name} with {here[name]} bytes, and at most {most} are fetched"
            raise HostError(text, hint=HINT)
    watch.expect(here[name] for name in names)
    for name in names:
        try:
            client.download_artifacts(run_id, name, str(folder))
        except MlflowException as error:  # MLflow hides its cause
            text = f"MLflow does not give {name} of run {run_id}: {first_line(str(error))}"
            raise last_refusal() or HostError(text, hint=HINT) from None


class Watch(threading.Thread):
    """Ends this process with an error when the server is too slow or sends more than it has listed."""

    def __init__(self, folder: Path, seconds: float) -> None:
        super().__init__(daemon=True)
        self._folder, self._most, self._seconds = folder, _SLACK, seconds
        self.begin()

    def begin(self) -> None:
        """Count the server's time from now on."""
        self._began = time.monotonic()

    def expect(self, sizes: Iterable[int | None]) -> None:
        """Allow so many bytes more."""
        self._most += sum(size or 0 for size in sizes)

    def run(self) -> None:
        """Check size, memory and time until the process ends."""
        while True:
            time.sleep(_POLL_SECONDS)
            size = _size(self._folder)
            if size > self._most or private_bytes() > _MEMORY:
                _tell(HostError(f"MLflow's server sends more than the {self._most} bytes it has listed", hint=HINT))
            elif time.monotonic() > self._began + self._seconds + size / SLOWEST:
                _tell(HostError("MLflow has taken too long to send a run's files", hint=_hint_if_slow()))
            else:
                continue
            os._exit(0)


def _hint_if_slow() -> str:
    """What to do about a store that is too slow: a local one has nobody who runs it."""
    return HINT if file_of(tracking_uri()) is None else "try again when this host and its disk are less busy"


def _size(folder: Path) -> int:
    """Bytes of all files in a folder. Files may go away meanwhile."""
    size = 0
    for file in folder.rglob("*"):
        with suppress(OSError):
            size += file.lstat().st_size
    return size


def _tell(error: SamebitsError | None) -> None:
    """Print the result for ``fetch``."""
    told = (0, "", "") if error is None else (error.exit_code, error.message, error.hint)
    print(f"\n{json.dumps(told)}", flush=True)  # noqa: T201


def main(run_id: str, folder: str, seconds: float, *, everything: bool) -> None:
    """Entry point of the process that ``fetch`` starts."""
    watch = Watch(Path(folder), seconds)
    watch.start()
    try:
        download(run_id, Path(folder), watch, everything=everything)
    except SamebitsError as error:
        _tell(error)
    else:
        _tell(None)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
