"""Record a run's weights as a logged model of MLflow, linked with the run and its metrics.

The model is searched by the run's key and id before it is made, so that a delivery continues one that was cut off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from samebits.records.provenance import UNAVAILABLE
from samebits.tracking.store import RUN_TAG

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel, Run

_SAMPLED = "system/"  # metrics of the host, not of the model


def log_checkpoint(client: MlflowClient, run_id: str, weights: Path, *, name: str, tags: Mapping[str, str]) -> None:
    """Log a file of weights as the run's model, unless MLflow has it, and link the run's metrics with it.

    If the server knows no logged models, a tag of the run says so.
    """
    from mlflow.entities import LoggedModelOutput, LoggedModelStatus

    run = client.get_run(run_id)
    found = _models(client, run)
    if found is None:
        client.set_tag(run_id, "logged_model", f"{UNAVAILABLE}this server knows no logged models")
        return
    if found:
        model = found[0]
    else:
        tags = {RUN_TAG: run.data.tags[RUN_TAG], **tags}
        model = client.create_logged_model(
            run.info.experiment_id, name=name, source_run_id=run_id, tags=tags, model_type="checkpoint"
        )
    if model.status != LoggedModelStatus.READY:
        outputs = run.outputs.model_outputs if run.outputs else []
        if model.model_id not in {output.model_id for output in outputs}:  # else MLflow would list it twice
            last_step = max((point.step for point in run.data.to_proto().metrics if point.key == "loss"), default=0)
            client.log_outputs(run_id, [LoggedModelOutput(model.model_id, last_step)])
        client.log_model_artifact(model.model_id, str(weights))
        client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
    link_metrics(client, run_id)


def link_metrics(client: MlflowClient, run_id: str) -> None:
    """Link a run's latest metrics with its logged model, if it has one. Linked metrics are not sent again."""
    from mlflow.entities import Metric

    run = client.get_run(run_id)
    for model in _models(client, run) or ():
        linked = {(point.key, point.timestamp, point.step) for point in model.metrics or ()}
        points = [
            Metric(point.key, point.value, point.timestamp, point.step, model_id=model.model_id)
            for point in run.data.to_proto().metrics  # their own times add no second points to the run
            if not point.key.startswith(_SAMPLED) and (point.key, point.timestamp, point.step) not in linked
        ]
        if points:
            client.log_batch(run_id, metrics=points)


def fail_unfinished(client: MlflowClient, run_id: str) -> None:
    """Mark a run's logged model as failed if it still waits for its weights."""
    from mlflow.entities import LoggedModelStatus

    for model in _models(client, client.get_run(run_id)) or ():
        if model.status == LoggedModelStatus.PENDING:
            client.finalize_logged_model(model.model_id, LoggedModelStatus.FAILED)


def _models(client: MlflowClient, run: Run) -> list[LoggedModel] | None:
    """The run's logged model, if it has one; None where the server, before MLflow 3, knows no logged models."""
    from mlflow.exceptions import MlflowException

    key = run.data.tags.get(RUN_TAG)
    try:
        models = client.search_logged_models([run.info.experiment_id], f"tags.`{RUN_TAG}` = '{key}'")
    except MlflowException as error:
        if error.error_code != "ENDPOINT_NOT_FOUND":
            raise
        return None
    return [model for model in models if model.source_run_id == run.info.run_id][:1]  # without models of deleted runs
