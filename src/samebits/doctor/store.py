"""MLflow's store: whether it answers on a route of its API, or, if it is a file, whether it can be read and written."""

from __future__ import annotations

import base64
import json
import os
import socket
import sqlite3
from contextlib import closing
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit, urlunsplit
from urllib.request import Request, urlopen

from samebits.doctor.finding import Finding, check, failed, ok, skipped
from samebits.errors import first_line

if TYPE_CHECKING:
    from collections.abc import Mapping

ROUTE = "/api/2.0/mlflow/experiments/search?max_results=1"  # /health says 200 also where the API refuses
TIMEOUT_SECONDS = 5.0
_LOCAL = "unset MLFLOW_TRACKING_URI to use the local mlflow.db"


@check("mlflow")
def store(uri: str, environ: Mapping[str, str] = os.environ) -> Finding:
    """Whether runs can be recorded in the store in use; credentials in ``uri`` are used and never shown."""
    scheme = uri.partition(":")[0]
    if scheme in ("http", "https"):
        return _server(uri, environ)
    if scheme == "sqlite":
        return _file(Path(uri.removeprefix("sqlite:///")))
    if scheme == "file" or ("://" not in uri and scheme != "databricks"):
        return failed("MLFLOW_TRACKING_URI is a folder, which MLflow no longer writes to", _LOCAL)
    return skipped(f"a {scheme} store, which only MLflow itself can reach")


def _server(uri: str, environ: Mapping[str, str]) -> Finding:
    parts = urlsplit(uri)
    shown = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), "", ""))
    request = Request(shown + ROUTE)  # noqa: S310 - the scheme is http or https
    if credentials := _credentials(parts.username, parts.password, environ):
        request.add_unredirected_header("Authorization", credentials)
    try:
        with urlopen(request, timeout=TIMEOUT_SECONDS) as answer:  # noqa: S310
            body = answer.read(1_000_000)
    except HTTPError as error:
        with error:
            return _refusal(shown, error.code, error.read(10_000).decode(errors="replace"))
    except HTTPException:  # no address of a server, or no words of one
        body = b""
    except (URLError, OSError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        said = getattr(reason, "strerror", None) or str(reason)
        if isinstance(reason, TimeoutError):
            said = f"no answer within {TIMEOUT_SECONDS:.0f} s"
        if isinstance(reason, socket.gaierror):
            said = "no such host name"
        return failed(f"{shown} does not answer: {first_line(said)}", f"start the server, or {_LOCAL}")
    try:
        known = isinstance(json.loads(body), dict)
    except ValueError:
        known = False
    if not known:
        hint = f"correct MLFLOW_TRACKING_URI, or {_LOCAL}"
        return failed(f"something else than MLflow answers at {shown}", hint)
    return ok(f"{shown} answers")


def _credentials(user: str | None, password: str | None, environ: Mapping[str, str]) -> str | None:
    """The header that MLflow's own client would send."""
    user = unquote(user) if user else environ.get("MLFLOW_TRACKING_USERNAME")
    password = unquote(password) if password else environ.get("MLFLOW_TRACKING_PASSWORD")
    if user:
        return "Basic " + base64.b64encode(f"{user}:{password or ''}".encode()).decode()
    token = environ.get("MLFLOW_TRACKING_TOKEN")
    return f"Bearer {token}" if token else None


def _refusal(shown: str, code: int, body: str) -> Finding:
    if code == 403 and "invalid host header" in body.lower():
        host = urlsplit(shown).netloc
        text = f"{shown} refuses the name that it was called by (403 Invalid Host header), though its /health is fine"
        return failed(text, f"start the server with --allowed-hosts {host}, or MLFLOW_SERVER_ALLOWED_HOSTS={host}")
    if code in (401, 403):
        hint = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        return failed(f"{shown} refuses access ({code})", hint)
    if code >= 500:
        return failed(f"{shown} answers with an error of its own ({code})", "read the server's log")
    return failed(
        f"{shown} has no MLflow API ({code})", "correct MLFLOW_TRACKING_URI, or use a server of MLflow 2 or newer"
    )


def _file(path: Path) -> Finding:
    if not path.exists():
        if os.access(path.parent, os.W_OK | os.X_OK):
            return ok(f"{path.name} will be made by the first run")
        return failed(f"{path.name} cannot be made in its folder", "check the folder's owner")
    if not os.access(path, os.R_OK | os.W_OK):
        return failed(f"{path.name} cannot be read and written", "check the file's owner")
    try:
        # Read-only, so that looking at a store never changes it.
        with closing(
            sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=TIMEOUT_SECONDS)
        ) as opened:
            tables = {name for (name,) in opened.execute("SELECT name FROM sqlite_master")}
    except sqlite3.Error as error:
        hint = "move the file away; the next run makes a new one"
        return failed(f"{path.name} cannot be read: {error}", hint)
    if tables and "experiments" not in tables:
        return failed(f"{path.name} is not a store of MLflow's", _LOCAL + ", or name another file")
    return ok(f"{path.name} can be read and written")
