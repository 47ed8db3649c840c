"""A run's weights as a logged model of a real MLflow store."""

import shutil
from contextlib import contextmanager

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import ENDPOINT_NOT_FOUND, INVALID_PARAMETER_VALUE
from tracking_fixtures import (  # noqa: F401 - two fixtures
    finish,
    make_migrated_store,
    make_repository,
    record_compared,
    recorded_from_files,
    result,
    runs,
    start,
    write_files,
)

from samebits.records.run import WEIGHTS
from samebits.tracking import delivery
from samebits.tracking.delivery import Delivery, deliver
from samebits.tracking.store import RUN_TAG
from samples import comparison, host, row
from standins import raising

FIGURES = {"loss": 1.0, "training_seconds": 2.0, "speedup": 1.5, "peak_memory_gib": 3.0}


def trained(folder, key="one", status="FINISHED"):
    """The log of a training that has ended, whose files are in ``folder``."""
    log = start(key)
    log.losses(1, [2.0, 1.0], [0.1, 0.1])
    write_files(folder, key)
    result(log, folder)
    return finish(log, status)


def models():
    client, found = runs()
    return client.search_logged_models([*{run.info.experiment_id for run in found}]) if found else []


def values_of(model):
    return {point.key: point.value for point in model.metrics or ()}


class KilledError(BaseException):
    """As SIGKILL: nothing that catches exceptions sees it."""


@contextmanager
def killed_at(name, *, after=True, number=1):
    """End the sender where it calls one of the client's methods for the n-th time, before or after it took effect."""
    plain, calls = getattr(MlflowClient, name), []

    def killed(*arguments, **named):
        calls.append(name)
        done = plain(*arguments, **named) if after or len(calls) < number else None
        if len(calls) == number:
            raise KilledError
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MlflowClient, name, killed)
        with pytest.raises(KilledError):
            yield


def test_the_weights_are_a_logged_model_with_the_runs_metrics(repository):
    assert deliver(trained(repository))
    client, (run,) = runs()
    (model,) = models()
    assert (model.name, model.model_type, model.status) == ("ddp-fast", "checkpoint", "READY")
    assert model.source_run_id == run.info.run_id
    assert [(output.model_id, output.step) for output in run.outputs.model_outputs] == [(model.model_id, 2)]
    assert model.tags == {RUN_TAG: "one", "strategy": "ddp", "numerics": "fast", "weights_sha256": "abc"}
    assert [file.path for file in client.list_logged_model_artifacts(model.model_id)] == [WEIGHTS]
    fetched = client.download_artifacts(run.info.run_id, f"{model.name}/{WEIGHTS}", str(repository))
    assert (repository / model.name / WEIGHTS).read_bytes() == (repository / WEIGHTS).read_bytes(), fetched
    assert values_of(model) == run.data.metrics
    assert FIGURES.items() <= values_of(model).items()
    assert len(client.get_metric_history(run.info.run_id, "loss")) == 2  # linking adds no points


def test_telemetry_of_the_host_is_no_metric_of_the_model(repository):
    path = trained(repository)
    deliver(path)
    client, (run,) = runs()
    client.log_metric(run.info.run_id, "system/cpu_utilization_percentage", 50.0)
    delivery.State().write(path.with_suffix(".state.json"))
    deliver(path)
    (model,) = models()
    assert FIGURES.items() <= values_of(model).items()
    assert "system/cpu_utilization_percentage" not in values_of(model)


@pytest.mark.parametrize(
    ("state_is_lost", "at"),
    [
        (False, {"name": "create_logged_model", "after": False}),
        (False, {"name": "create_logged_model"}),
        (True, {"name": "create_logged_model"}),
        (False, {"name": "log_outputs"}),
        (False, {"name": "log_model_artifact"}),
        (False, {"name": "finalize_logged_model"}),
        (True, {"name": "finalize_logged_model"}),
        (False, {"name": "log_batch", "number": 5}),  # which links the metrics
        (False, {"name": "set_terminated"}),
    ],
)
def test_a_sender_that_is_killed_and_delivers_again_leaves_one_model(state_is_lost, at, repository):
    path = trained(repository)
    with killed_at(**at):
        deliver(path)
    if state_is_lost:
        delivery.State().write(path.with_suffix(".state.json"))
    assert deliver(path)
    client, (run,) = runs()
    (model,) = models()
    assert (model.status, run.info.status) == ("READY", "FINISHED")
    assert [output.model_id for output in run.outputs.model_outputs] == [model.model_id]
    assert [file.path for file in client.list_logged_model_artifacts(model.model_id)] == [WEIGHTS]
    assert values_of(model) == run.data.metrics
    assert len(model.metrics) == len(run.data.metrics)
    assert len(client.get_metric_history(run.info.run_id, "loss")) == 2


def test_delivering_twice_makes_one_model(repository):
    path = trained(repository)
    deliver(path)
    (before,) = models()
    delivery.State().write(path.with_suffix(".state.json"))
    deliver(path)
    (again,) = models()
    facts = [(model.model_id, model.last_updated_timestamp, len(model.metrics)) for model in (before, again)]
    assert facts[0] == facts[1]


def test_an_unfinished_model_fails_if_a_later_run_has_replaced_its_files(repository):
    path = trained(repository)
    with killed_at("create_logged_model"):
        deliver(path)
    write_files(repository, "later")
    deliver(path)
    (model,) = models()
    assert model.status == "FAILED"


def test_an_unfinished_model_fails_if_the_store_refuses_its_files(repository, monkeypatch):
    monkeypatch.setattr(
        MlflowClient, "log_model_artifact", raising(MlflowException("no room", INVALID_PARAMETER_VALUE))
    )
    path = trained(repository)
    deliver(path)
    assert Delivery(path).state.refused == "no room"
    (model,) = models()
    assert model.status == "FAILED"


@pytest.mark.parametrize("status", ["FAILED", "KILLED"])
def test_a_run_has_a_model_once_its_weights_were_saved(status, repository):
    deliver(finish(start("early"), status))
    assert models() == []
    deliver(trained(repository, status=status))
    (model,) = models()
    assert (model.status, model.tags[RUN_TAG]) == ("READY", "one")


def test_a_run_recorded_again_after_its_deletion_gets_its_own_model(repository):
    deliver(trained(repository))
    client, (run,) = runs()
    client.delete_run(run.info.run_id)
    again = recorded_from_files(repository)
    assert {model.source_run_id for model in models()} == {run.info.run_id, again}


def test_a_server_without_logged_models_still_gets_the_run(repository, monkeypatch):
    monkeypatch.setattr(MlflowClient, "search_logged_models", raising(MlflowException("no such", ENDPOINT_NOT_FOUND)))
    path = trained(repository)
    assert deliver(path)
    _, (run,) = runs()
    assert Delivery(path).state.refused is None
    assert run.info.status == "FINISHED"
    assert run.data.tags["logged_model"] == "unavailable: this server knows no logged models"


# -- comparisons -----------------------------------------------------------------------------------------------

ROW = row("ddp", devices=2, run="one", device_type="cpu", eval_loss=2.25, accuracy=0.5, weights_sha256="abc")
COMPARISON = comparison(ROW, host=host())


def test_the_figures_of_a_comparison_are_linked_with_the_model(repository):
    deliver(trained(repository))
    for _ in range(2):  # the second time changes nothing
        record_compared(repository, COMPARISON)
        (model,) = models()
        assert {"eval_loss": 2.25, "accuracy": 0.5}.items() <= values_of(model).items()
        assert len({point.key for point in model.metrics}) == len(model.metrics)


@pytest.mark.parametrize("number", [2, 3])  # the run's metrics, and the model's
def test_an_interrupted_comparison_is_linked_by_the_next_delivery(number, repository):
    deliver(trained(repository))
    with killed_at("log_batch", number=number):
        record_compared(repository, COMPARISON, time_ms=1)
    record_compared(repository, COMPARISON, time_ms=1)
    client, found = runs()
    (child,) = [run for run in found if run.data.tags[RUN_TAG] == "one"]
    (model,) = models()
    assert {"eval_loss": 2.25, "accuracy": 0.5}.items() <= values_of(model).items()
    assert len(model.metrics) == len(child.data.metrics)
    assert len(client.get_metric_history(child.info.run_id, "eval_loss")) == 1


def test_a_run_that_is_recorded_again_from_its_files_has_a_model(repository):
    write_files(repository / "ddp-fast", "one")
    record_compared(repository, COMPARISON)
    (model,) = models()
    assert model.status == "READY"
    assert values_of(model)["eval_loss"] == 2.25
    shutil.rmtree(repository / "ddp-fast")
    record_compared(repository, COMPARISON)
    assert len(models()) == 1
