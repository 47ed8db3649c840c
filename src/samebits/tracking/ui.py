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
_WORDS = ("speed", "same_model", "holds_back", "try")  # tags: MLflow prints raw floats
_METRICS = ("speedup", *(one.metric for one in COLUMNS if one.metric and one.metric != "speedup"))
_COLUMNS = (
    *(f"tags.`{tag}`" for tag in _WORDS),
    *(f"params.`{param}`" for param in ("train.global_batch_size", "model.name", "data.task")),
    *(f"metrics.`{metric}`" for metric in _METRICS),
    *(f"tags.`{tag}`" for tag in ("num_devices", "labels", "bits", "dvc_experiment")),
)
_WIDTHS = {"speed": 170, "same_model": 130, "holds_back": 240, "try": 260, "labels": 100, "bits": 100}
_SECTION = {"display": True, "isReordered": False, "deleted": False}
_NOTE = (
    "Trainings of one model under single, dp and ddp, by samebits. Each parent run is a comparison; its description "
    "holds the table, its artifacts the report."
)


SECTIONS = ("How much faster?", "Where is the rest?", "The same model?")
"""Sections of charts."""


def _charts() -> list[dict[str, Any]]:
    faster, rest, same = (f"{KEY}-{number}" for number in range(len(SECTIONS)))
    line = {"type": "LINE", "metricKey": "loss", "lineSmoothness": 0, "xAxisScaleType": "linear", "scaleType": "linear",
            "range": {}, "selectedXAxisMetricKey": "", "yAxisKey": "metric", "yAxisExpressions": [],
            "ignoreOutliers": False, "useGlobalXaxisKey": False, "useGlobalLineSmoothing": True}  # fmt: skip
    batch = {"key": "train.global_batch_size", "type": "PARAM"}
    return [
        _chart("speedup", faster, type="BAR", metricKey="speedup"),
        _chart("scaling_efficiency", faster, type="BAR", metricKey="scaling_efficiency"),
        _chart("speed-up over batch", faster, type="SCATTER", xaxis=batch, yaxis={"key": "speedup", "type": "METRIC"},
               runsCountToCompare=100),
        _chart("from the ideal to what you get", rest, type="IMAGE", imageKeys=["where"], step=0),
        _chart("all figures against the first run", rest, type="DIFFERENCE", compareGroups=["Model metrics"],
               chartName="all figures against the first run", showChangeFromBaseline=True, showDifferencesOnly=True,
               baselineColumnUuid=""),
        _chart("loss", same, **line, xAxisKey="step"),
        _chart("loss over time", same, **line, xAxisKey="time-relative"),
    ]  # fmt: skip


def _chart(name: str, section: str, **settings: Any) -> dict[str, Any]:
    common = {"runsCountToCompare": 10, "metricSectionId": section, "deleted": False, "isGenerated": False}
    return {**common, "uuid": f"{KEY}-{name}", "displayName": name, **settings}


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
        "columnWidths": {f"tags.`{tag}`": width for tag, width in _WIDTHS.items()},
        "runsHiddenMode": "FIRST_10_RUNS",
        "compareRunCharts": _charts(),
        "compareRunSections": [
            *(
                {**_SECTION, "uuid": f"{KEY}-{number}", "name": name, "isGenerated": False}
                for number, name in enumerate(SECTIONS)
            ),
            {**_SECTION, "uuid": f"{KEY}-model", "name": "Model metrics", "isGenerated": True},
            {**_SECTION, "uuid": f"{KEY}-system", "name": "System metrics", "isGenerated": True},
        ],
        "viewMaximized": False,
        "runListHidden": False,
        "isAccordionReordered": True,
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
