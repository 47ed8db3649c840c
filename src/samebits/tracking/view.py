"""How MLflow's UI shows the experiment: a saved view with the columns and charts that a comparison needs.

MLflow keeps such views as tags of the experiment; this one is what its "Save as new view" would write.
"""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samebits.files import write_text
from samebits.runlog import LOGS
from samebits.tracking.store import NOTE_TAG

if TYPE_CHECKING:
    from mlflow import MlflowClient

KEY = "samebits"
LINK = LOGS.parent / "view.txt"
"""File with the view's address below the server's."""

_COLUMNS = (
    "metrics.`speedup`",
    "metrics.`bound`",
    "metrics.`scaling_efficiency`",
    "metrics.`training_seconds`",
    "metrics.`eval_loss`",
    "metrics.`accuracy`",
    "tags.`verdict`",
    "tags.`num_devices`",
    "tags.`labels`",
    "tags.`weights_sha256`",
)
_LINES = ("loss",)
_BARS = ("speedup", "bound", "scaling_efficiency", "training_seconds", "samples_per_sec", "step_time_ms", "eval_loss",
         "accuracy", "peak_memory_gib")  # fmt: skip
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


def view_tag() -> tuple[str, str]:
    """Name and value of the tag: a flat list of trainings, the newest first, with their figures in this order."""
    state = {
        # Sorted by anything but the time of creation, MLflow lists runs without their parents.
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
    value = {"name": KEY, "createdAt": 0, "updatedAt": 0, "state": f"deflate;{packed}"}
    return f"mlflow.sharedViewState.{KEY}", json.dumps(value)


def link(experiment: str) -> str:
    """The view's address, to be put behind the server's."""
    return f"/#/experiments/{experiment}/runs?workflowType=machine_learning&viewStateShareKey={KEY}"


def prepare_view(client: MlflowClient, experiment: str) -> None:
    """Put the view on the experiment, unless it is there, and note its address for ``samebits ui``."""
    wanted = {
        "mlflow.experimentKind": "custom_model_development",  # not one of language models' traces
        NOTE_TAG: _NOTE,
        **dict([view_tag()]),
    }
    tags = client.get_experiment(experiment).tags
    for name, value in wanted.items():
        if tags.get(name) != value:
            client.set_experiment_tag(experiment, name, value)
    write_text(LINK, link(experiment))


def known_link() -> str:
    """The address that was noted, else that of the start page."""
    return Path(LINK).read_text(encoding="utf-8") if LINK.exists() else "/"
