"""Limits of MLflow's client against a server: time, memory, other hosts, and where a run's files may lie.

Neither requests nor MLflow sets any of them.
"""

from __future__ import annotations

import re
import signal
import threading
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

from samebits.errors import HostError, UserError, without_password

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from requests import PreparedRequest, Response, Session

ANSWER_SECONDS = 60.0
"""Time limit for an answer with all redirects before it, and for a list of files."""
SLOWEST = 2**18
"""Slowest accepted rate of a file, in bytes a second."""
_MOST_REDIRECTS = 3
_LARGEST = 2**24  # bytes of an answer of the API, which lists runs page by page
HINT = "ask who runs the server; see `samebits doctor`"

_OBJECT_STORES = {"s3", "gs", "wasbs"}
"""Schemes whose hosts are set by the environment or the cloud, so that no login goes to another host."""
_AZURE = re.compile(r"[^@]+@[\w-]+\.dfs\.core\.(windows\.net|chinacloudapi\.cn|usgovcloudapi\.net)")
"""Places of the scheme abfss, for which MLflow would log in to any host."""


@cache
def guard_client() -> None:
    """Apply these limits to MLflow's client. Files that are streamed to the disk have their own limits."""
    guard_places(require_own_place)
    from mlflow.utils import request_utils
    from requests import sessions
    from requests.utils import super_len

    class Limited(request_utils.TCPKeepAliveHTTPAdapter):
        def send(  # type: ignore[override]
            self, request: PreparedRequest, stream: bool = False, **options: Any
        ) -> Response:
            _require_known_host(request.url or "")
            response = super().send(request, stream=stream, **options)
            try:
                _require_same_host(response)
                if not stream:
                    _read(response)
            except BaseException:
                response.close()
                raise
            return response

    unlimited = sessions.Session.request

    def request(session: Session, method: str, url: str, *arguments: Any, **options: Any) -> Response:
        if not isinstance(session.adapters.get("https://"), Limited):
            return unlimited(session, method, url, *arguments, **options)
        size = super_len(options.get("data") or "")  # type: ignore[no-untyped-call] # a file may be sent
        try:
            with _limit(ANSWER_SECONDS + size / SLOWEST):  # of the whole way, to wherever redirects lead
                return unlimited(session, method, url, *arguments, **options)
        except HostError as error:
            _refused[:] = [error]
            raise

    request_utils.TCPKeepAliveHTTPAdapter = Limited  # type: ignore[misc]
    sessions.Session.request = request  # type: ignore[assignment,method-assign]
    sessions.DEFAULT_REDIRECT_LIMIT = _MOST_REDIRECTS
    _refuse_other_transfers()


_hosts: set[tuple[str, int]] = set()
_refused: list[HostError] = []  # the last one alone: each holds its answer


def last_refusal() -> HostError | None:
    """The last error of these limits: MLflow's threads replace it by one of their own."""
    return _refused[0] if _refused else None


def allow_host(uri: str) -> None:
    """Let requests go to the server of a store, and from then on to no host but those of such stores."""
    parts = urlsplit(uri)
    if parts.scheme in ("http", "https"):
        _hosts.add(_host_of(uri))


def _host_of(url: str) -> tuple[str, int]:
    """The host of an address, in lower case, and its port."""
    parts = urlsplit(url)
    usual = 443 if parts.scheme == "https" else 80
    try:
        return parts.hostname or "", parts.port or usual
    except ValueError:  # no number, which the client itself refuses
        return parts.netloc, usual


def _require_known_host(url: str) -> None:
    host, port = _host_of(url)
    if _hosts and (host, port) not in _hosts:
        raise HostError(f"MLflow's server sends a request to {host}:{port}", hint=HINT)


def _refuse_other_transfers() -> None:
    """Make MLflow refuse transfers of parts, whose addresses a server chooses, and which have no limit of time."""
    from mlflow.store.artifact.http_artifact_repo import HttpArtifactRepository

    def refuse(*_: object, **__: object) -> None:
        raise HostError("MLflow's server asks for a transfer in parts, to addresses of its choice", hint=HINT)

    for name in ("_multipart_download", "_upload_part"):
        if hasattr(HttpArtifactRepository, name):
            setattr(HttpArtifactRepository, name, refuse)


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raise HostError if the block takes longer. Works in the main thread alone, which receives signals."""

    def late(*_: object) -> None:
        raise HostError(f"MLflow's server has not answered within {seconds:.0f} s", hint=HINT)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, late)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left, interval)
        signal.signal(signal.SIGALRM, before)


def _require_same_host(response: Response) -> None:
    """Raise HostError: a redirect leads to another host, which would get the request or be trusted with the answer."""
    if response.is_redirect:
        here, there = urlsplit(response.url), urlsplit(urljoin(response.url, response.headers["location"]))
        if there.hostname != here.hostname or there.port != here.port or there.scheme not in (here.scheme, "https"):
            to = there._replace(netloc=there.netloc.rpartition("@")[2]).geturl() or "nowhere"
            text = f"MLflow's server at {here.netloc.rpartition('@')[2]} leads to {to}"
            raise HostError(text, hint="if that is yours, name it in MLFLOW_TRACKING_URI")


def _read(response: Response) -> None:
    """Read the whole answer, as requests does a moment later. Raises HostError: it is too large."""
    pieces = response.iter_content

    def limited(*arguments: Any, **options: Any) -> Iterator[bytes]:
        size = 0
        for piece in pieces(*arguments, **options):
            if (size := size + len(piece)) > _LARGEST:
                raise HostError(f"MLflow's server answers with more than {_LARGEST / 2**20:.0f} MiB", hint=HINT)
            yield piece

    response.iter_content = limited  # type: ignore[method-assign]
    _ = response.content


def guard_places(check: Callable[[str, str], None]) -> None:
    """Make MLflow call ``check`` with the address of files and that of the store before it reaches the files."""
    from mlflow.store.artifact.artifact_repository_registry import get_registered_artifact_repositories

    def guarded(make: Callable[..., Any]) -> Callable[..., Any]:
        def checked(artifact_uri: str, tracking_uri: str | None = None, registry_uri: str | None = None) -> Any:
            check(artifact_uri, tracking_uri or "")
            try:
                return make(artifact_uri, tracking_uri=tracking_uri, registry_uri=registry_uri)
            except AssertionError:  # MLflow's own, for a run whose files are another run's
                raise _refusal(artifact_uri) from None

        return checked

    known: dict[str, Any] = get_registered_artifact_repositories()
    for scheme, make in list(known.items()):
        known[scheme] = guarded(make)


def require_own_place(artifact_uri: str, tracking_uri: str) -> None:
    """Raise UserError: the server names a place for files that is neither its own nor an object store."""
    server, place = urlsplit(tracking_uri), urlsplit(artifact_uri)
    if server.scheme not in ("http", "https") or place.scheme in _OBJECT_STORES:
        return
    if place.scheme == "abfss" and _AZURE.fullmatch(place.netloc):
        return
    if place.scheme == "runs":  # MLflow resolves it to the place of the run's files, and checks that too
        return
    if place.scheme == "mlflow-artifacts" and place.netloc in ("", server.netloc, server.netloc.rpartition("@")[2]):
        return
    raise _refusal(artifact_uri)


def _refusal(artifact_uri: str) -> UserError:
    place = without_password(artifact_uri) or "an address without text"
    return UserError(
        f"MLflow's server keeps the files at {place}, expected a place of its own or an object store",
        hint="start it with --artifacts-destination, or ask who runs it; see SECURITY.md",
    )
