"""Stand-ins that several modules use: what raises, a server on loopback, and a repository of git."""

from __future__ import annotations

import subprocess
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def raising(error: BaseException) -> Callable[..., NoReturn]:
    """A function that raises ``error``, whatever it is called with."""

    def call(*_: object, **__: object) -> NoReturn:
        raise error

    return call


class Handler(BaseHTTPRequestHandler):
    """Answers of a server that prints nothing."""

    def read_body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def begin(self, code: int = 200, length: int = 0, **headers: str) -> None:
        """The status and the headers, of a body of so many bytes."""
        self.send_response(code)
        for name, value in {"Content_Length": str(length), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def answer(self, body: bytes, code: int = 200, **headers: str) -> None:
        self.begin(code, len(body), **headers)
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(handler: type[Handler], **facts: Any) -> Iterator[Any]:
    """A server on loopback with these attributes, which ends with the block, and whose requests ``handler`` answers."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        vars(server).update(facts, url=f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, args=[0.01]).start()
        try:
            yield server
        finally:
            server.shutdown()


def git(folder: Path | str, *arguments: str) -> str:
    """What git prints in a folder, for a user with a name."""
    names = ("-c", "user.name=A", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *names, *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def commit_all(folder: Path | str) -> None:
    """Make a folder a repository whose one commit holds all files."""
    for command in ("init --quiet", "add --all", "commit --quiet --allow-empty --message=all"):
        git(folder, *command.split())
