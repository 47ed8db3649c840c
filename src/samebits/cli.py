"""The ``samebits`` command."""

from __future__ import annotations

import os
import sys

import click

from samebits import __version__
from samebits.errors import HostError, exit_on_error


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.pass_context
def main(context: click.Context, debug: bool) -> None:
    """Measure what DataParallel and DistributedDataParallel buy on this host."""
    context.with_resource(exit_on_error(debug=debug))


@main.command()
@click.option("--port", default=5000, show_default=True)
def ui(port: int) -> None:
    """Open the local MLflow store on http://127.0.0.1:PORT."""
    from samebits.tracking.store import tracking_uri

    uri = tracking_uri()
    if uri.startswith("http"):
        raise HostError(f"MLFLOW_TRACKING_URI is {uri}, a server with a page of its own", hint="open that address")
    arguments = ["-m", "mlflow", "ui", "--backend-store-uri", uri, "--host", "127.0.0.1", "--port", str(port)]
    os.execv(sys.executable, [sys.executable, *arguments])  # noqa: S606 - the server takes this process over


@main.group()
def track() -> None:
    """Deliver local logs to MLflow."""


@track.command()
def sync() -> None:
    """Deliver every log that MLflow does not have whole, for example after the server was away."""
    from samebits.tracking.delivery import sync as deliver

    count, problems = deliver()
    click.echo(f"{count} {'log' if count == 1 else 'logs'} delivered")
    for log, problem in problems.items():
        click.echo(f"{log}: {problem}", err=True)
    if problems:
        raise HostError(f"{len(problems)} could not be delivered", hint="see above; is MLFLOW_TRACKING_URI right?")
