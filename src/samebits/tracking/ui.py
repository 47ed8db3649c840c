"""MLflow's UI for the runs of this repository: the server, and a saved view with the columns of a comparison.

MLflow keeps saved views as tags of the experiment. This one is what its "Save as new view" writes.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import secrets
import shlex
import socket
import sys
import time
import urllib.request
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import samebits
from samebits.errors import HostError, UserError, printable, without_password
from samebits.files import write_text
from samebits.records.log import LOGS
from samebits.results.table import COLUMNS
from samebits.tracking.guarded import OWN_HEADER, OWN_VARIABLE
from samebits.tracking.store import NOTE_TAG, tracking_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient

KEY = "samebits"
LINK = LOGS.parent / "view.txt"
"""File with the view's address, relative to the server's."""

_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_ANSWERS = ("speedup", "bound", "scaling_efficiency")  # what a reader of the view asks first
_METRICS = (*_ANSWERS, *(one.metric for one in COLUMNS if one.metric and one.metric not in _ANSWERS))
_COLUMNS = (
    *(f"metrics.`{metric}`" for metric in _METRICS),
    *(f"tags.`{one.tag}`" for one in COLUMNS if one.tag),
    "tags.`labels`",
)
_LINES = ("loss",)
_BARS = (*_METRICS, "samples_per_sec", "step_time_ms", "peak_memory_gib")
_SECTION = {"display": True, "isReordered": False, "deleted": False}
_NOTE = (
    "Trainings of one model under single, dp and ddp, by samebits. Each parent run is a comparison; its description "
    "holds the table, its artifacts the report."
)


def _charts() -> list[dict[str, Any]]:
    common = {"runsCountToCompare": 10, "metricSectionId": KEY, "deleted": False, "isGenerated": False}
    line = {"type": "LINE", "lineSmoothness": 0, "xAxisScaleType": "linear", "scaleType": "linear", "range": {},
            "xAxisKey": "step", "selectedXAxisMetricKey": "", "yAxisKey": "metric", "yAxisExpressions": [],
            "ignoreOutliers": False, "useGlobalXaxisKey": True, "useGlobalLineSmoothing": True}  # fmt: skip
    lines = [{**common, **line, "uuid": f"{KEY}-{name}", "displayName": name, "metricKey": name} for name in _LINES]
    bar = {**common, "type": "BAR"}
    return lines + [{**bar, "uuid": f"{KEY}-{name}", "displayName": name, "metricKey": name} for name in _BARS]


def _view() -> str:
    """The view as MLflow keeps it: a flat list of trainings, the newest first, with their figures as columns."""
    state = {
        # Unless it sorts by the time of creation, MLflow lists runs without their parents.
        "searchFilter": "tags.`strategy` != ''",
        "orderByKey": "tags.`samebits.run`",
        "orderByAsc": False,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": _COLUMNS,
        "columnOrder": _COLUMNS,
        "columnWidths": {},
        "runsHiddenMode": "FIRST_10_RUNS",
        "compareRunCharts": _charts(),
        "compareRunSections": [
            {**_SECTION, "uuid": KEY, "name": "Comparison", "isGenerated": False},
            {**_SECTION, "uuid": f"{KEY}-model", "name": "Model metrics", "isGenerated": True},
            {**_SECTION, "uuid": f"{KEY}-system", "name": "System metrics", "isGenerated": True},
        ],
        "viewMaximized": False,
        "runListHidden": False,
        "isAccordionReordered": False,
        "useGroupedValuesInCharts": True,
        "hideEmptyCharts": True,
        "groupBy": None,
        "groupsExpanded": {},
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
    }
    packed = base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()
    return json.dumps({"name": KEY, "createdAt": 0, "updatedAt": 0, "state": f"deflate;{packed}"})


def link(experiment: str) -> str:
    """The view's address, relative to the server's."""
    return f"/#/experiments/{experiment}/runs?workflowType=machine_learning&viewStateShareKey={KEY}"


def prepare_view(client: MlflowClient, experiment: str) -> None:
    """Save the view in the experiment, unless it is there, and its address for ``samebits ui``."""
    wanted = {
        "mlflow.experimentKind": "custom_model_development",  # not one of language models' traces
        NOTE_TAG: _NOTE,
        f"mlflow.sharedViewState.{KEY}": _view(),
    }
    tags = client.get_experiment(experiment).tags
    for name, value in wanted.items():
        if tags.get(name) != value:
            client.set_experiment_tag(experiment, name, value)
    write_text(LINK, link(experiment))


def known_link() -> str:
    """The saved address of the view, or that of the start page."""
    return printable(LINK.read_text(encoding="utf-8")) if LINK.exists() else "/"


def require_free_port(port: int) -> None:
    """Raise HostError if something else listens there. The server itself would say so late and end with 0."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            hint = f"choose another: `samebits ui --port {port + 1}`"
            raise HostError(f"port {port} cannot be used: {error.strerror}", hint=hint) from None


def serve(port: int) -> None:
    """Become MLflow's server on a port of this host. Its address is printed once it answers.

    Raises:
        UserError: the runs are in no database that MLflow knows.
        HostError: the runs are on a server, which has pages of its own, or the port is taken.
    """
    uri = tracking_uri()
    if uri.startswith("http"):
        raise HostError(
            "MLFLOW_TRACKING_URI is a server with a page of its own",
            hint=f"open its address, and there {known_link()}",
        )
    if (kind := uri.partition(":")[0].partition("+")[0]) not in _DATABASES:  # MLflow would print the whole address
        what = f"MLFLOW_TRACKING_URI: {without_password(uri)}: got {kind}, accepts {', '.join(_DATABASES)} and http(s)"
        raise UserError(what, hint="unset it to use the local mlflow.db")
    require_free_port(port)
    click.echo("starting MLflow's server; its address follows when it answers", err=True)
    server, own = os.getpid(), secrets.token_urlsafe(16)
    if os.fork() == 0:
        announce(port, server, own)
        os._exit(0)
    # The peer is the connection's, whatever a header says. Nothing is imported from the current folder.
    options = f"--no-proxy-headers --app-dir {shlex.quote(str(Path(samebits.__file__).parent.parent))}"
    arguments = ["-P", "-m", "mlflow", "server", "--app-name", "samebits", "--host", "127.0.0.1", "--port", str(port),
                 "--workers", "1", "--uvicorn-opts", options]  # fmt: skip
    # Its libraries give warnings. The store's address may have a password, and everybody can read arguments.
    environ = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONSAFEPATH": "1"}
    environ |= {"MLFLOW_BACKEND_STORE_URI": uri, OWN_VARIABLE: own}
    environ.setdefault("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")  # eight processes for jobs that nobody starts
    os.execve(sys.executable, [sys.executable, *arguments], environ)  # noqa: S606 - the server takes this process over


def announce(port: int, server: int, own: str) -> None:
    """Print the address below the server's first messages, where a reader looks. End with the server.

    Another server may take the port while this one starts, so that the answer must carry this one's own header.
    """
    root = f"http://127.0.0.1:{port}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy, for a server of this host
    while os.getppid() == server:
        try:
            with opener.open(f"{root}/health", timeout=5) as answer:
                if answer.headers[OWN_HEADER] == own:
                    click.echo(f"\nReady: {root}{known_link()} (Ctrl-C ends it)", err=True)
                    return
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(0.2)
