"""An MLflow server that can be killed, and a proxy that spoils its answers."""

from __future__ import annotations

import atexit
import ctypes
import http.client
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, ClassVar

from conftest import wait_for
from faults.subject import MARK
from ports import free_port

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


_PR_SET_PDEATHSIG = 1
SHARE_OF_CREATIONS = 0.7


class Server:
    """An MLflow server on loopback. It can be killed and started again on its port."""

    def __init__(self, folder: Path, store: Path, mark: str) -> None:
        self._folder, self._store, self._mark = folder, store, mark
        self.artifacts, self.port = folder / "artifacts", free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.kill)

    def start(self) -> None:
        """Start it without waiting."""
        command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{self._store}",
                   "--artifacts-destination", str(self.artifacts), "--host", "127.0.0.1", "--port", str(self.port),
                   "--workers", "1"]  # fmt: skip
        environ = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", MARK: self._mark}
        with (self._folder / "server.log").open("ab") as output:
            self._process = subprocess.Popen(
                command, cwd=self._folder, stdout=output, stderr=output, start_new_session=True, env=environ
            )

    def answers(self) -> bool:
        """Whether it answers."""
        with suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=5):  # noqa: S310
            return True
        return False

    def wait(self) -> None:
        """Wait until it answers."""
        wait_for(self.answers, seconds=90)

    def ensure(self) -> None:
        """Start it again if it does not answer."""
        if not self.answers():
            self.kill()
            self.start()
            self.wait()

    def kill(self) -> None:
        """Kill all of its processes."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


class _Spoiler(BaseHTTPRequestHandler):
    """Handler that forwards a request, and returns the answer with the harm that the server chooses."""

    protocol_version = "HTTP/1.1"
    server: _SpoilingServer
    _LENGTH: ClassVar[str] = "Content-Length"

    def _pass_on(self) -> None:
        body, harm = self._body(), self.server.next_harm(self.path)
        status, _, when = harm.partition(" ")
        if when == "before":
            self._send(int(status), b"<html>no</html>")
            return
        connection = http.client.HTTPConnection("127.0.0.1", self.server.upstream, timeout=60)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() != "transfer-encoding"}
            connection.request(self.command, self.path, body, {**headers, self._LENGTH: str(len(body))})
            answer = connection.getresponse()
            content = answer.read()
            if when == "after":
                self._send(int(status), b"<html>no</html>")
            elif harm == "silence":
                self.close_connection = True
            else:
                time.sleep(self.server.delay if harm == "slow" else 0)
                kept = [
                    (name, value) for name, value in answer.getheaders() if name.lower() in ("content-type", "etag")
                ]
                sent = {"cut": content[: len(content) // 2], "double": content * 2}.get(harm, content)
                self._send(answer.status, sent, kept, promised=len(content))
                self.close_connection = self.close_connection or harm == "cut"
        except OSError:
            self.close_connection = True
        finally:
            connection.close()

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = _pass_on  # noqa: N815 - http.server's names

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get(self._LENGTH, 0)))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _send(
        self, status: int, body: bytes, headers: Sequence[tuple[str, str]] = (), promised: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header(self._LENGTH, str(len(body) if promised is None else promised))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


class _SpoilingServer(ThreadingHTTPServer):
    """Server that harms a share of the answers until it gets SIGUSR1."""

    daemon_threads = True

    def __init__(self, port: int, upstream: int, harms: Sequence[str], share: float, delay: float, seed: str) -> None:
        super().__init__(("127.0.0.1", port), _Spoiler)
        self.upstream, self.delay = upstream, delay
        self._harms, self._share, self._random = harms, share, random.Random(seed)  # noqa: S311
        signal.signal(signal.SIGUSR1, self.heal)

    def heal(self, *_: object) -> None:
        """Harm no more answers."""
        self._share = 0.0

    def next_harm(self, path: str) -> str:
        """Harm of the next answer, empty for none. Likelier where a repeated request could create a second thing."""
        share = max(self._share, SHARE_OF_CREATIONS) if self._share and path.endswith("/create") else self._share
        return self._random.choice(self._harms) if self._random.random() < share else ""

    def handle_error(self, *_: object) -> None:
        """Ignore clients that hang up."""


class Proxy:
    """The spoiling server in a process of its own."""

    def __init__(self, upstream: int, harms: Sequence[str], share: float, delay: float, seed: str) -> None:
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._serve = partial(_SpoilingServer, self.port, upstream, harms, share, delay, seed)
        self._pid = 0

    def start(self) -> None:
        """Start it and wait until it listens."""
        ready, told = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            with suppress(BaseException):
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                server = self._serve()
                os.write(told, b"1")
                os.close(told)
                server.serve_forever(poll_interval=0.5)
            os._exit(1)
        os.close(told)
        with os.fdopen(ready, "rb") as stream:
            if stream.read(1) != b"1":
                raise RuntimeError("the proxy did not start")

    def heal(self) -> None:
        """Forward all later answers as they are."""
        os.kill(self._pid, signal.SIGUSR1)

    def close(self) -> None:
        """Kill it."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0
