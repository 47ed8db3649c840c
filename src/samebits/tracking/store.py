"""The MLflow store in use: where it is, how to reach it, and which of its failures may pass."""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from samebits.errors import MASK, HostError, UserError, caused_by, one_line, reason, without_password
from samebits.files import scratch_folder
from samebits.host.locks import locked
from samebits.records.log import LOGS
from samebits.tracking.limits import guard_client

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mlflow import MlflowClient
    from mlflow.entities import Run


NOTE_TAG = "mlflow.note.content"
"""Tag that the UI shows as a description."""

RUN_TAG = "samebits.run"
"""Tag with the key that names a run in its local log and in run.json."""

_STORE_LOCK = LOGS.parent / "store.lock"
_STORE_SECONDS = 120.0  # in which a fresh SQLite file is made on any host


def tracking_uri(environ: Mapping[str, str] = os.environ) -> str:
    """MLFLOW_TRACKING_URI, else a SQLite file in the working directory."""
    return environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path.cwd() / 'mlflow.db'}"


def connect(uri: str) -> MlflowClient:
    """A client of the store, to be used before the next one is asked for: MLflow has one login for all servers."""
    address, login = _address_and_login(uri)
    _log_in(login)
    return _client(address)


def answers(uri: str) -> bool:
    """Whether the store answers now, whatever it refuses."""
    try:
        connect(uri).search_experiments(max_results=1)
    except Exception:  # noqa: BLE001 - drivers of databases have their own
        return False
    return True


@cache
def _client(uri: str) -> MlflowClient:
    """One process at a time may create a fresh SQLite file."""
    # The sender itself tries again, and asks first: a request whose answer was lost may have made a run.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient

    guard_client()
    logging.getLogger("mlflow").setLevel(logging.CRITICAL)  # what fails is told once, by us; its import sets another

    file = file_of(uri)
    if file is None:
        return MlflowClient(tracking_uri=uri)
    with locked(_STORE_LOCK, seconds=_STORE_SECONDS):
        _make_whole(file)
        client = MlflowClient(tracking_uri=uri)
        client.search_experiments(max_results=1)
    return client


def file_of(uri: str) -> Path | None:
    """The file of a SQLite store, None of another one."""
    scheme, _, rest = uri.partition(":")
    return Path(rest.removeprefix("///")) if scheme == "sqlite" else None


def _make_whole(file: Path) -> None:
    """Make a SQLite file elsewhere, and give it its name when all tables are there.

    A process that is killed while MLflow makes them leaves a file that no later one can go on with.
    """
    from mlflow import MlflowClient

    if file.name.startswith(":") or "?" in file.name or file.exists() or not file.parent.is_dir():
        return
    hidden = LOGS.parent if file.parent == Path.cwd() else file.parent
    with scratch_folder(hidden) as folder:
        MlflowClient(f"sqlite:///{folder / file.name}").search_experiments(max_results=1)
        with suppress(OSError):  # another program was faster, or there are no links here: then it is made in its place
            file.hardlink_to(folder / file.name)


def address_parts(uri: str) -> SplitResult:
    """The parts of a store's address.

    Raises:
        UserError: it is no address.
    """
    try:
        return urlsplit(uri)
    except ValueError as error:
        raise UserError(f"MLFLOW_TRACKING_URI: {uri}: {error}", hint="as in https://mlflow.example:5000") from None


def _address_and_login(uri: str) -> tuple[str, dict[str, str]]:
    """The address that MLflow is given, and a login by its variables, since it prints addresses.

    A password that ``uri`` has lost on its way through a log is taken from the environment's address.

    Raises:
        HostError: that is of another server.
    """
    known = tracking_uri()
    whole = known if without_password(known) == uri else uri
    parts = address_parts(whole)
    if parts.netloc.rpartition("@")[0].endswith(MASK):
        text = f"the login for {uri} is not in MLFLOW_TRACKING_URI here"
        raise HostError(text, hint="set it to that address with its login, and run `samebits track sync`")
    if parts.scheme not in ("http", "https") or not parts.password:
        return whole, {}
    login = {"MLFLOW_TRACKING_USERNAME": parts.username, "MLFLOW_TRACKING_PASSWORD": parts.password}
    address = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    return address, {name: unquote(value or "") for name, value in login.items()}


_borrowed: dict[str, tuple[str | None, str]] = {}
"""The user's own login, by variable, while that of an address stands in its place, which comes second."""


def _log_in(login: Mapping[str, str]) -> None:
    """Let MLflow's variables hold this login, if it is one, which no other server is to see."""
    for name, (own, lent) in _borrowed.items():
        if os.environ.get(name) == lent:
            del os.environ[name]
            os.environ.update({name: own} if own is not None else {})
    _borrowed.clear()
    for name, value in login.items():
        _borrowed[name] = os.environ.get(name), value
        os.environ[name] = value


def experiment_id(client: MlflowClient, name: str) -> str:
    """The experiment of that name, made if there is none; a local store keeps its artifacts beside it."""
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        file = file_of(str(client.tracking_uri))
        location = (file.resolve().parent / "mlartifacts").as_uri() if file else None
        try:
            return str(client.create_experiment(name, artifact_location=location))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        experiment = client.get_experiment_by_name(name)  # another process was faster, perhaps on another host
        assert experiment
    return str(experiment.experiment_id)


def find_run(client: MlflowClient, experiment: str, key: str) -> Run | None:
    """The run with such a key that was not deleted, the newest first."""
    runs = client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{key}'", max_results=1)
    return runs[0] if runs else None


def is_permanent(error: Exception) -> bool:
    """Whether trying again cannot help: MLflow refused what it was sent."""
    from mlflow.exceptions import MlflowException

    refused = {"INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS", "INVALID_STATE"}
    return isinstance(error, MlflowException) and error.error_code in refused


@contextmanager
def errors_of_the_store() -> Iterator[None]:
    """Raise HostError for what MLflow, the database under it, its driver or the disk that its files are on refuses."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except ImportError as error:
        hint = "install it beside MLflow: an object store, and a database, has a client of its own"
        raise HostError(f"MLflow's store cannot be used: {reason(error)}", hint=hint) from None
    except (MlflowException, SQLAlchemyError, OSError) as error:
        if refused := caused_by(error, HostError):  # what MLflow's client was kept from
            raise refused from None
        first = one_line(str(error))[:300]
        raise HostError(f"MLflow cannot be reached: {first}", hint="see `samebits doctor`") from None
