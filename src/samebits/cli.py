"""The ``samebits`` command."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import click

from samebits import __version__
from samebits.commands import HELP_OPTIONS
from samebits.errors import HostError, UserError, exit_on_error


@click.group(context_settings=HELP_OPTIONS)
@click.version_option(__version__)
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.pass_context
def main(context: click.Context, debug: bool) -> None:
    """Measure what DataParallel and DistributedDataParallel buy on this host."""
    context.with_resource(exit_on_error(debug=debug))


def require_repository() -> None:
    """Refuse to work where no pipeline is: the local store would be made in the wrong folder.

    Raises:
        UserError: there is no params.yaml here.
    """
    if not Path("params.yaml").exists() and "MLFLOW_TRACKING_URI" not in os.environ:
        raise UserError(f"{Path.cwd()} has no params.yaml", hint="run this at the root of the repository")


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
            raise HostError(
                f"port {port} cannot be used: {error.strerror}", hint="choose another with --port"
            ) from None


@main.command()
@click.option("--port", default=5000, show_default=True)
def ui(port: int) -> None:
    """Open the local MLflow store on http://127.0.0.1:PORT."""
    from samebits.tracking.store import tracking_uri

    require_repository()
    uri = tracking_uri()
    if uri.startswith("http"):
        raise HostError(f"MLFLOW_TRACKING_URI is {uri}, a server with a page of its own", hint="open that address")
    arguments = [
        "-m",
        "mlflow",
        "ui",
        "--backend-store-uri",
        uri,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    require_free_port(port)
    click.echo(f"MLflow will answer on http://127.0.0.1:{port} in some seconds; Ctrl-C ends it", err=True)
    environ = {**os.environ, "PYTHONWARNINGS": "ignore"}  # its libraries' own
    os.execve(sys.executable, [sys.executable, *arguments], environ)  # noqa: S606 - the server takes this process over


@main.command()
@click.option("--model", "with_model", is_flag=True, help="Also run one batch of the model under each strategy.")
@click.option("--checkpoint", type=click.Path(path_type=Path), help="A safetensors file to try on the model; --model.")
@click.option("--params", "params_file", default="params.yaml", show_default=True, help="Parameters to read.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(with_model: bool, checkpoint: Path | None, params_file: str, as_json: bool) -> None:
    """Tell what this host, this repository and the model lack for a training, and what to do about it.

    Exit codes: 0 nothing failed; 2 params.yaml or the model is wrong; 3 the host or its software is.
    """
    from samebits.doctor.visit import visit

    visit(Path(params_file), with_model=with_model or checkpoint is not None, checkpoint=checkpoint, as_json=as_json)


@main.group()
def track() -> None:
    """Deliver local logs to MLflow."""


@track.command()
def sync() -> None:
    """Deliver every log that MLflow does not have whole.

    Needed where a server was away for longer than the sender waits, and no training was started since.
    """
    from samebits.tracking.delivery import sync as deliver

    require_repository()
    count, problems = deliver()
    click.echo(f"{count} {'log' if count == 1 else 'logs'} delivered")
    for log, problem in problems.items():
        click.echo(f"{log}: {problem}", err=True)
    if problems:
        raise HostError(f"{len(problems)} could not be delivered", hint="see above; is MLFLOW_TRACKING_URI right?")
