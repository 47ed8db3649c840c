"""MLflow's pages over the runs of this repository."""

from __future__ import annotations

import os
import socket
import sys
import time
import urllib.request

import click

from samebits.errors import HostError
from samebits.tracking.store import tracking_uri
from samebits.tracking.view import known_link


def require_free_port(port: int) -> None:
    """Refuse a port that something else listens on, which the server itself would say late and end with 0.

    Raises:
        HostError: the port is taken.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            hint = f"choose another: `samebits ui --port {port + 1}` or `make ui PORT={port + 1}`"
            raise HostError(f"port {port} cannot be used: {error.strerror}", hint=hint) from None


def serve(port: int) -> None:
    """Become MLflow's server on a port of this host; its address is printed once it answers.

    Raises:
        HostError: the runs are on a server, which has pages of its own, or the port is taken.
    """
    uri = tracking_uri()
    if uri.startswith("http"):
        raise HostError(
            "MLFLOW_TRACKING_URI is a server with a page of its own",
            hint=f"open its address, and there {known_link()}",
        )
    require_free_port(port)
    click.echo("starting MLflow's server; its address follows when it answers", err=True)
    server = os.getpid()
    if os.fork() == 0:
        _announce(port, server)
        os._exit(0)
    arguments = ["-m", "mlflow", "ui", "--backend-store-uri", uri]
    arguments += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    environ = {**os.environ, "PYTHONWARNINGS": "ignore"}  # its libraries' own
    environ.setdefault("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")  # eight processes for what nobody asks here
    os.execve(sys.executable, [sys.executable, *arguments], environ)  # noqa: S606 - the server takes this process over


def _announce(port: int, server: int) -> None:
    """Print the address below the server's first messages, where a reader looks; end with the server."""
    root = f"http://127.0.0.1:{port}"
    while os.getppid() == server:
        try:
            with urllib.request.urlopen(f"{root}/health", timeout=5):  # noqa: S310 - this host's own
                click.echo(f"\nReady: {root}{known_link()} (Ctrl-C ends it)", err=True)
                return
        except OSError:
            time.sleep(0.2)
