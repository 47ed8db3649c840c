"""Check of MLflow's store: a server must answer MLflow's client, a file must be readable and writable."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING

from samebits.doctor.finding import Finding, check, failed, ok, skipped, warning
from samebits.errors import SamebitsError
from samebits.host.addresses import is_loopback
from samebits.host.variables import IMAGE
from samebits.tracking.store import address_parts, connect, file_of, hint_to_write

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from urllib.parse import SplitResult

REQUEST_SECONDS = 5
CLIENT_SECONDS = 60.0  # of which MLflow's import takes several
_LOCAL = "unset MLFLOW_TRACKING_URI to use the local mlflow.db"


@check("mlflow")
def store(uri: str, environ: Mapping[str, str] = os.environ) -> Finding:
    """Whether runs can be recorded in the store. A server is asked by another process."""
    scheme = uri.partition(":")[0]
    if (file := file_of(uri)) is not None:
        return _file(file)
    if scheme == "file" or ("://" not in uri and scheme != "databricks"):
        return failed("MLFLOW_TRACKING_URI is a folder, which MLflow no longer writes to", _LOCAL)
    if scheme not in ("http", "https"):
        return skipped(f"a {scheme} store is left alone: MLflow's client may change it when it looks")
    address_parts(uri)
    limits = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": str(REQUEST_SECONDS)}
    child = [sys.executable, "-P", "-m", "samebits.doctor.store"]
    environ = {**environ, **limits, "MLFLOW_TRACKING_URI": uri}
    try:
        done = subprocess.run(child, env=environ, capture_output=True, text=True, timeout=CLIENT_SECONDS, check=True)
    except subprocess.TimeoutExpired:
        return failed(f"MLflow's client took longer than {CLIENT_SECONDS:.0f} s", f"start the server, or {_LOCAL}")
    return Finding(**json.loads(done.stdout.splitlines()[-1]))


def ask(uri: str) -> Finding:
    """A server's answer to MLflow's client. The login is used and never shown."""
    from urllib3.exceptions import ProtocolError, ResponseError

    parts = address_parts(uri)
    host = parts.netloc.rpartition("@")[2]
    shown = f"{parts.scheme}://{host}{parts.path.rstrip('/')}"
    try:
        connect(uri).search_experiments(max_results=1)  # /health answers 200 even if the API refuses
    except Exception as error:  # noqa: BLE001 - MLflow's errors wrap urllib3's, whose innermost cause counts
        cause: BaseException = error
        while cause.__cause__ or cause.__context__:
            cause = cause.__cause__ or cause.__context__ or cause
        status = error.get_http_status_code()  # type: ignore[attr-defined] # 500 if the server gave none
    else:
        return _answers(shown, parts)
    if isinstance(cause, SamebitsError):
        return failed(cause.message, cause.hint)
    if isinstance(cause, ResponseError):
        return failed(f"{shown} answers with an error of its own: {cause}", "read the server's log")
    if isinstance(cause, ProtocolError) and isinstance(cause.args[-1], ConnectionError):
        return failed(f"{shown} closes the connection without an answer", "is it http or https? read the server's log")
    if isinstance(cause, OSError):
        reason = cause.strerror or f"no answer within {REQUEST_SECONDS} s"
        return failed(f"{shown} does not answer: {reason}", f"start the server, or {_LOCAL}")
    # Only its text distinguishes this refusal of MLflow's server, see mlflow.server.security_utils.
    if status == 403 and "invalid host header" in str(cause).lower():
        text = f"{shown} refuses the name that it was called by (403 Invalid Host header), though its /health is fine"
        return failed(text, f"start the server with --allowed-hosts {host}, or MLFLOW_SERVER_ALLOWED_HOSTS={host}")
    if status in (401, 403):
        hint = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        return failed(f"{shown} refuses access ({status})", hint)
    if status == 404:
        return failed(f"{shown} has no MLflow API (404)", f"correct MLFLOW_TRACKING_URI, or {_LOCAL}")
    return failed(f"something else than MLflow answers at {shown}", f"correct MLFLOW_TRACKING_URI, or {_LOCAL}")


def _answers(shown: str, parts: SplitResult, environ: Mapping[str, str] = os.environ) -> Finding:
    """Whether a server that answers requires a login, which it need not on this host's loopback interface.

    Compose's own server, seen from its experiment, answers other hosts no more than that.
    """
    from requests.utils import get_netrc_auth

    names = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_TOKEN")
    of_compose = parts.hostname == "mlflow" and IMAGE in environ
    login = parts.username or any(map(environ.get, names)) or get_netrc_auth(parts.geturl())
    if login or of_compose or is_loopback(parts.hostname or ""):
        return ok(f"{shown} answers")
    text = f"{shown} answers without a login: whoever reaches it can read, change and delete its runs"
    return warning(text, "ask who runs it for a login, or a proxy with one; see SECURITY.md")


def _file(path: Path) -> Finding:
    if not path.exists():
        if os.access(path.parent, os.W_OK | os.X_OK):
            return ok(f"{path.name} will be made by the first run")
        return failed(f"{path.name} cannot be made in its folder", "check the folder's owner")
    if not os.access(path, os.R_OK | os.W_OK):
        return failed(f"{path.name} cannot be read and written", hint_to_write(path))
    try:  # by SQLite, read-only: MLflow's client would create or migrate the file
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
    except sqlite3.Error as error:
        return failed(f"{path.name} cannot be read: {error}", "move the file away; the next run makes a new one")
    if tables and "experiments" not in tables:
        return failed(f"{path.name} is not a store of MLflow's", f"{_LOCAL}, or name another file")
    return ok(f"{path.name} can be read and written")


if __name__ == "__main__":
    print(json.dumps(asdict(ask(os.environ["MLFLOW_TRACKING_URI"]))))  # noqa: T201 - the doctor reads it
