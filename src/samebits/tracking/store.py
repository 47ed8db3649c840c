"""The MLflow store in use: its address, its client, and which of its errors are permanent."""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from samebits.errors import MASK, HostError, UserError, caused_by, one_line, reason, without_password
from samebits.files import private_mode, scratch_folder
from samebits.host.locks import locked
from samebits.records.log import LOGS
from samebits.tracking.limits import allow_host, guard_client

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mlflow import MlflowClient
    from mlflow.entities import Run


NOTE_TAG = "mlflow.note.content"
"""Tag that the UI shows as a description."""

RUN_TAG = "samebits.run"
"""Tag with the key that names a run in its local log and in run.json."""

_STORE_LOCK = LOGS.parent / "store.lock"
_STORE_SECONDS = 120.0  # enough for any host to make a new SQLite file


def tracking_uri(environ: Mapping[str, str] = os.environ) -> str:
    """MLFLOW_TRACKING_URI, else a SQLite file in the working directory."""
    return environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path.cwd() / 'mlflow.db'}"


def connect(uri: str) -> MlflowClient:
    """A client of the store. Use it before the next call, because MLflow has one login for all servers."""
    address, login = _address_and_login(uri)
    _log_in(login)
    return _client(address)


def answers(uri: str) -> bool:
    """Whether the store answers a search without an error."""
    try:
        connect(uri).search_experiments(max_results=1)
    except Exception:  # noqa: BLE001 - drivers of databases have their own
        return False
    return True


@cache
def _client(uri: str) -> MlflowClient:
    """The client of an address without a login. One process at a time creates a new SQLite file."""
    # The sender itself tries again after a search: a request whose answer was lost may have made a run.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # stdout is for results
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    for direction in ("UPLOAD", "DOWNLOAD"):  # else a server chooses addresses, headers and no limit of time
        os.environ[f"MLFLOW_ENABLE_PROXY_MULTIPART_{direction}"] = "false"
    from mlflow import MlflowClient

    guard_client()
    allow_host(uri)
    logging.getLogger("mlflow").setLevel(logging.CRITICAL)  # we report errors, once; MLflow's import sets another level

    file = file_of(uri)
    if file is None:
        return MlflowClient(tracking_uri=uri)
    can_change = not file.exists() or os.access(file, os.W_OK)
    with locked(_STORE_LOCK, seconds=_STORE_SECONDS) if can_change else nullcontext():
        _make_whole(file)
        client = MlflowClient(tracking_uri=uri)
        client.search_experiments(max_results=1)
    return client


def file_of(uri: str) -> Path | None:
    """The file of a SQLite store; None for another store."""
    scheme, _, rest = uri.partition(":")
    return Path(rest.removeprefix("///")) if scheme == "sqlite" else None


def _make_whole(file: Path) -> None:
    """Make a new SQLite file in a temporary folder, and link it to its place once it has all tables.

    MLflow cannot continue with the file of a process that was killed while it made the tables.
    """
    from mlflow import MlflowClient

    if file.name.startswith(":") or "?" in file.name or file.exists() or not file.parent.is_dir():
        return
    hidden = LOGS.parent if file.parent == Path.cwd() else file.parent
    with scratch_folder(hidden) as folder:
        MlflowClient(f"sqlite:///{folder / file.name}").search_experiments(max_results=1)
        _open_to_writers_of(file.parent, folder / file.name)
        with suppress(OSError):  # another process was faster, or the disk has no links: MLflow makes it in place
            file.hardlink_to(folder / file.name)


def _open_to_writers_of(folder: Path, file: Path) -> None:
    """Let whoever may write into a folder, such as its group, write to a new file of it, which SQLite does not."""
    found = folder.stat()
    with suppress(OSError):  # this user is not in the folder's group
        os.chown(file, -1, found.st_gid)
        file.chmod(file.stat().st_mode | private_mode(folder))


def hint_to_write(file: Path) -> str:
    """What to do about a store that this user cannot write to."""
    return f"ask its owner for `chmod g+w {file.name}`, or set MLFLOW_TRACKING_URI"


def require_writable(uri: str) -> None:
    """Raise HostError if the store is a file that this user cannot write to."""
    file = file_of(uri)
    if file and file.exists() and not os.access(file, os.W_OK):
        raise HostError(f"{file} belongs to another user, and cannot be written", hint=hint_to_write(file))


def address_parts(uri: str) -> SplitResult:
    """The parts of a store's address.

    Raises:
        UserError: it is no address.
    """
    try:
        return urlsplit(uri)
    except ValueError as error:
        raise UserError(f"MLFLOW_TRACKING_URI: {uri}: {error}", hint="as in https://mlflow.example:5000") from None


_LOGIN = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
"""MLflow's variables. They are meant for the server that MLFLOW_TRACKING_URI names, and no other one gets them."""


def _address_and_login(uri: str) -> tuple[str, dict[str, str | None]]:
    """The address for MLflow without its login, and the login by MLflow's variables, since MLflow prints addresses.

    Logs mask the password of ``uri``. It is taken from the address in the environment. Variables that are None have to
    be unset.

    Raises:
        HostError: the environment has the address of another server.
    """
    known = tracking_uri()
    whole = known if without_password(known) == uri else uri
    parts = address_parts(whole)
    if parts.netloc.rpartition("@")[0].endswith(MASK):
        text = f"the login for {uri} is not in MLFLOW_TRACKING_URI here"
        raise HostError(text, hint="set it to that address with its login, and run `samebits track sync`")
    if parts.scheme not in ("http", "https"):
        return whole, {}
    server = parts.netloc.rpartition("@")[2]
    own = address_parts(known)
    login: dict[str, str | None] = {}
    if (parts.scheme, server) != (own.scheme, own.netloc.rpartition("@")[2]):
        login = dict.fromkeys(_LOGIN)
    if parts.password:
        login |= dict(zip(_LOGIN, (unquote(parts.username or ""), unquote(parts.password), None), strict=True))
    return (urlunsplit(parts._replace(netloc=server)) if parts.password else whole), login


_borrowed: dict[str, tuple[str | None, str | None]] = {}
"""By variable: the user's own value, and the value that replaces it for now; None if unset."""


def _log_in(login: Mapping[str, str | None]) -> None:
    """Put a login into MLflow's variables, after the previous one is taken out, which no other server may see."""
    for name, (own, lent) in _borrowed.items():
        if os.environ.get(name) == lent:
            _set(name, own)
    _borrowed.clear()
    for name, value in login.items():
        _borrowed[name] = os.environ.get(name), value
        _set(name, value)


def _set(name: str, value: str | None) -> None:
    os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value


def experiment_id(client: MlflowClient, name: str) -> str:
    """The id of the experiment of that name, which is made if needed. A local store keeps artifacts beside itself."""
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
    """The newest run with that key that was not deleted, or None."""
    runs = client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{key}'", max_results=1)
    return runs[0] if runs else None


def is_permanent(error: Exception) -> bool:
    """Whether another try cannot help, because MLflow refused the content of the request."""
    from mlflow.exceptions import MlflowException

    refused = {"INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS", "INVALID_STATE"}
    return isinstance(error, MlflowException) and error.error_code in refused


@contextmanager
def errors_of_the_store() -> Iterator[None]:
    """Raise HostError for errors of MLflow, of its database and driver, and of the disk with its files."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except ImportError as error:
        hint = "install it beside MLflow: an object store, and a database, has a client of its own"
        raise HostError(f"MLflow's store cannot be used: {reason(error)}", hint=hint) from None
    except (MlflowException, SQLAlchemyError, OSError) as error:
        if refused := caused_by(error, HostError):  # one of our limits, which MLflow has wrapped
            raise refused from None
        first = one_line(str(error))[:300]
        raise HostError(f"MLflow cannot be reached: {first}", hint="see `samebits doctor`") from None
