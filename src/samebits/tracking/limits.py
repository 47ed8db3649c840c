"""What a server may have MLflow's client wait for, hold in memory, and turn to: requests itself sets no limit."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

from samebits.errors import HostError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from requests import PreparedRequest, Response

ANSWER_SECONDS = 60.0
"""In which a server has to answer, and to say what files there are."""
SLOWEST = 2**18
"""Bytes a second at which files are waited for."""
_LARGEST = 2**26  # bytes of an answer of the API, which lists runs by their pages
_HINT = "ask who runs the server; see `samebits doctor`"


@cache
def guard_answers() -> None:
    """Have MLflow's client keep to these limits; files that are streamed to the disk have limits of their own."""
    from mlflow.utils import request_utils
    from requests.utils import super_len

    class Limited(request_utils.TCPKeepAliveHTTPAdapter):
        def send(  # type: ignore[override]
            self, request: PreparedRequest, stream: bool = False, **options: Any
        ) -> Response:
            size = super_len(request.body or "")  # type: ignore[no-untyped-call] # a file may be sent
            with _limit(ANSWER_SECONDS + size / SLOWEST):
                response = super().send(request, stream=stream, **options)
                try:
                    _require_same_host(response)
                    if not stream:
                        _read(response)
                except BaseException:
                    response.close()
                    raise
            return response

    request_utils.TCPKeepAliveHTTPAdapter = Limited  # type: ignore[misc]


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raise HostError when the block takes longer, in the main thread, which alone a signal interrupts."""

    def late(*_: object) -> None:
        raise HostError(f"MLflow's server has not answered within {seconds:.0f} s", hint=_HINT)

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
    """Raise HostError: another host would be sent the request, or believed in the place of the one that was named."""
    if response.is_redirect:
        here, there = urlsplit(response.url), urlsplit(urljoin(response.url, response.headers["location"]))
        if there.hostname != here.hostname or there.port != here.port or there.scheme not in (here.scheme, "https"):
            text = f"MLflow's server at {here.netloc} leads to {there.geturl() or 'nowhere'}"
            raise HostError(text, hint="if that is yours, name it in MLFLOW_TRACKING_URI")


def _read(response: Response) -> None:
    """Take a whole answer, as requests does a moment later. Raises HostError: it is too large."""
    pieces = response.iter_content

    def limited(*arguments: Any, **options: Any) -> Iterator[bytes]:
        size = 0
        for piece in pieces(*arguments, **options):
            if (size := size + len(piece)) > _LARGEST:
                raise HostError(f"MLflow's server answers with more than {_LARGEST / 2**20:.0f} MiB", hint=_HINT)
            yield piece

    response.iter_content = limited  # type: ignore[method-assign]
    _ = response.content
