"""MLflow's server as the kit starts it: it answers this user alone, and serves files of its own store alone.

MLflow itself has no login, and reads and writes files with the server's rights wherever an experiment says that they
are. The factories here are entry points in pyproject.toml, for ``mlflow server --app-name``.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from samebits.tracking.limits import guard_places
from samebits.tracking.store import file_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    App = Callable[[dict[str, Any], Any, Any], Awaitable[None]]

OWN_HEADER = "x-samebits-own"
OWN_VARIABLE = "SAMEBITS_UI_OWN"
"""Header of every answer, and the variable with its value: `samebits ui` recognises the server that it started."""

_NAMES = {"127.0.0.1", "localhost"}  # MLflow also takes 10.evil.example, for an address of a private network
_ESTABLISHED = "01"
_SOCKETS = Path("/proc/net/tcp")


def shared_app() -> App:
    """The server limited to files of its own store, for a container that others can reach."""
    from mlflow.server.fastapi_app import app

    roots = [os.environ.get(f"_MLFLOW_SERVER_{name}") for name in ("ARTIFACT_DESTINATION", "ARTIFACT_ROOT")]
    database = file_of(os.environ.get("_MLFLOW_SERVER_FILE_STORE", ""))
    guard_files([*filter(None, map(_folder_of, filter(None, roots))), *([database.parent] if database else [])])
    return SameOrigin(app)


def own_app() -> App:
    """The same server, limited to processes of this user."""
    return OwnPeers(shared_app(), os.environ[OWN_VARIABLE])


def guard_files(roots: Iterable[Path]) -> None:
    """Make MLflow refuse local files outside of these folders."""
    below = [root.resolve() for root in roots]

    def require_below(uri: str, _: str) -> None:
        from mlflow.exceptions import MlflowException
        from mlflow.protos.databricks_pb2 import PERMISSION_DENIED

        folder = _folder_of(uri)
        if folder is not None and not any(folder.resolve().is_relative_to(root) for root in below):
            raise MlflowException("these files lie outside this server's store", error_code=PERMISSION_DENIED)

    guard_places(require_below)


def _folder_of(uri: str) -> Path | None:
    """The local folder of an artifact address; None if the files are not on this machine."""
    parts = urlsplit(uri)
    if parts.scheme.lower() == "file":
        return Path(unquote(parts.path))
    return None if parts.scheme else Path(uri)


class SameOrigin:
    """An ASGI application that refuses pages of other origins. MLflow itself accepts every port of localhost."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Pass a request on, or answer it with 403."""
        headers = dict(scope.get("headers", ()))
        origin = headers.get(b"origin")
        if origin is None or _netloc(origin) == headers.get(b"host"):
            await self._app(scope, receive, send)
        else:
            await _refuse(scope, send, "this server answers no page of another site or port")


class OwnPeers:
    """An ASGI application that answers this user's processes alone. Linux knows the user of a local connection."""

    def __init__(self, app: App, own: str) -> None:
        self._app, self._header = app, (OWN_HEADER.encode(), own.encode())

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Pass a request on, or answer it with 403."""
        host = dict(scope.get("headers", ())).get(b"host", b"").decode("latin-1")
        if scope["type"] != "lifespan" and _hostname(host) not in _NAMES:
            await _refuse(scope, send, "this server answers to the names 127.0.0.1 and localhost alone")
            return

        async def send_as_own(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), self._header]}
            await send(message)

        if scope["type"] == "lifespan" or owner_of(scope["client"], scope["server"]) == os.getuid():
            await self._app(scope, receive, send_as_own)
        else:
            await _refuse(scope, send, "this server answers processes of the user who has started it alone")


def _netloc(origin: bytes) -> bytes | None:
    """Host and port of a header ``Origin``; None if it is no address."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _hostname(host: str) -> str | None:
    """The name in a header ``Host``; None if it has none."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:  # such as [x].example
        return None


async def _refuse(scope: dict[str, Any], send: Any, why: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": f"403: {why}\n".encode()})


def owner_of(client: tuple[str, int] | None, server: tuple[str, int] | None) -> int | None:
    """The uid of the peer of an open IPv4 connection; None if the peer is not on this machine."""
    if not client or not server:
        return None
    try:
        ends = [_in_hexadecimal(*client), _in_hexadecimal(*server), _ESTABLISHED]
    except OSError:  # IPv6
        return None
    for line in _SOCKETS.read_text(encoding="ascii").splitlines()[1:]:
        fields = line.split()
        if fields[1:4] == ends:
            return int(fields[7])
    return None


def _in_hexadecimal(host: str, port: int) -> str:
    """An address as the kernel writes it: the host is a number in this machine's byte order."""
    (number,) = struct.unpack("=I", socket.inet_aton(host))
    return f"{number:08X}:{port:04X}"
