"""Events of one training become one MLflow run. Recording an event twice changes nothing."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samebits.files import read_json, write_json
from samebits.host import fingerprint
from samebits.records import FILES, flatten
from samebits.report.text import COLOURS
from samebits.tracking.store import RUN_TAG, experiment_id, find_run

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput, Metric

    from samebits.provenance import Provenance

BATCH = 1000  # points that MLflow takes in one call
TIMES = ("training_seconds", "samples_per_sec", "step_time_ms", "step_time_p5_ms", "step_time_p95_ms")
_HOST_TAGS = ("driver", "image_id", "image_digest", "image_base", "container_toolkit")
_DIGEST = 36  # characters that MLflow keeps of a data set's hash


def metric(key: str, value: float, time_ms: int, step: int = 0) -> Metric:
    """One point."""
    from mlflow.entities import Metric

    return Metric(key, value, time_ms, step)


def send(client: MlflowClient, run_id: str, metrics: list[Metric]) -> None:
    """Log points in as few calls as MLflow allows."""
    for start in range(0, len(metrics), BATCH):
        client.log_batch(run_id, metrics=metrics[start : start + BATCH])


def set_tags(client: MlflowClient, run_id: str, tags: Mapping[str, object]) -> None:
    """Set several tags in one call."""
    from mlflow.entities import RunTag

    client.log_batch(run_id, tags=[RunTag(key, str(value)) for key, value in tags.items()])


def log_params(client: MlflowClient, run_id: str, params: Mapping[str, Any]) -> None:
    """Log nested params flat, and as the file that they can be run from."""
    from mlflow.entities import Param
    from ruamel.yaml import YAML

    flat = {key: str(value) for key, value in flatten(params).items()}
    client.log_batch(run_id, params=[Param(key, value) for key, value in flat.items()])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "params.yaml"
        YAML().dump(params, file)
        client.log_artifact(run_id, str(file))


class Recorder:
    """Records the events of one training; ``run_id`` is known from the first on."""

    def __init__(self, client: MlflowClient, run_id: str | None = None) -> None:
        self._client, self.run_id = client, run_id

    def record(self, event: dict[str, Any]) -> None:
        """Record one event of the local log."""
        getattr(self, f"_{event['event']}")(event)

    def _id(self) -> str:
        assert self.run_id, "an event before the start"
        return self.run_id

    def _start(self, event: dict[str, Any]) -> None:
        params, placement = event["params"], event["placement"]
        experiment = experiment_id(self._client, params["tracking"]["experiment"])
        found = find_run(self._client, experiment, event["run"])  # a delivery may have been cut off right here
        if found is None:
            tags = {
                RUN_TAG: event["run"],
                "strategy": event["strategy"],
                "mlflow.runColor": COLOURS[event["strategy"]],
                "numerics": event["numerics"],
                "num_devices": placement["devices_used"],
                "fallback": next((x["text"] for x in placement["labels"] if x["kind"] == "fallback"), ""),
                "labels": ", ".join(label["kind"] for label in placement["labels"]),
                **event.get("tags", {}),
            }
            found = self._client.create_run(
                experiment,
                start_time=event["time_ms"],
                tags={key: str(value) for key, value in tags.items()},
                run_name=f"{event['strategy']}-{event['numerics']} x{placement['devices_used']}",
            )
        self.run_id = str(found.info.run_id)
        log_params(self._client, self.run_id, params)

    def provenance(self, found: Provenance, patch: Path | None) -> None:
        """Record commit, patch, packages and environment."""
        tags: dict[str, object] = {"git_commit": found["git"]["commit"], "git_dirty": found["git"]["dirty"]}
        tags |= {f"version.{name}": found["packages"].get(name) for name in ("torch", "mlflow", "dvc", "samebits")}
        set_tags(self._client, self._id(), tags)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "provenance.json"
            write_json(file, found)
            self._client.log_artifact(self._id(), str(file))
        if patch is not None:
            self._client.log_artifact(self._id(), str(patch))

    def _setup(self, event: dict[str, Any]) -> None:
        """Host and data, as the first worker found them."""
        host, card = event["host"], event["data"]
        tags = {
            "host_fingerprint": fingerprint(host),
            **{name: host.get(name) or "" for name in _HOST_TAGS},
            "in_container": bool(host.get("in_container")),
            "data_sha256": card["sha256"],
        }
        set_tags(self._client, self._id(), tags)
        self._client.log_inputs(self._id(), datasets=[_dataset(card, event["data_dir"])])

    def _losses(self, event: dict[str, Any]) -> None:
        """Every loss; the learning rate, which follows from the params, once for each event."""
        first, when = event["first_step"], event["time_ms"]
        points = [metric("loss", value, when, first + i) for i, value in enumerate(event["losses"])]
        points += [metric("learning_rate", rate, when, first) for rate in event["learning_rates"][:1]]
        send(self._client, self._id(), points)

    def _result(self, event: dict[str, Any]) -> None:
        timing = event["timing"]
        figures = {name: timing[name] for name in TIMES}
        figures["peak_memory_gib"] = max(timing["peak_memory_gib"].values())
        figures |= {f"peak_memory_gib.{device}": value for device, value in timing["peak_memory_gib"].items()}
        figures |= {name: timing[name]["median"] for name in ("speedup", "bound", "price") if timing.get(name)}
        send(self._client, self._id(), [metric(name, value, event["time_ms"]) for name, value in figures.items()])
        set_tags(self._client, self._id(), {"weights_sha256": event["weights_sha256"]})
        self._artifacts(event["run"], Path(event["out_dir"]))

    def _artifacts(self, key: str, folder: Path) -> None:
        """Upload the run's files, unless a later training has put its own in their place."""
        try:
            owner = read_json(folder / "run.json", made_by="").get("run")
        except ValueError:
            owner = None
        if owner != key:
            reason = "unavailable: the files were gone, or were a later run's, when they could be delivered"
            set_tags(self._client, self._id(), {"artifacts": reason})
            return
        for name in FILES:
            self._client.log_artifact(self._id(), str(folder / name))

    def _end(self, event: dict[str, Any]) -> None:
        self._client.set_terminated(self._id(), event["status"], end_time=event["time_ms"])


def _dataset(card: dict[str, Any], folder: str) -> DatasetInput:
    """The training split as an MLflow dataset, with the card's hash over both splits as its digest."""
    import numpy as np
    from mlflow.data.schema import TensorDatasetSchema
    from mlflow.entities import Dataset, DatasetInput, InputTag
    from mlflow.types.schema import Schema, TensorSpec

    def tensor(kind: str) -> Schema:
        return Schema([TensorSpec(np.dtype(card[f"{kind}_dtype"]), (-1, *card[f"{kind}_shape"]))])

    schema = TensorDatasetSchema(features=tensor("input"), targets=tensor("target"))
    return DatasetInput(
        Dataset(
            name=card["task"],
            digest=card["sha256"][:_DIGEST],
            source_type="local",
            source=json.dumps({"uri": folder}),
            schema=json.dumps(schema.to_dict()),
            profile=json.dumps({"num_samples": card["train"]["num_samples"], "floor": card["floor"]}),
        ),
        [InputTag("mlflow.data.context", "training")],
    )


def record_all(client: MlflowClient, events: Iterable[dict[str, Any]]) -> str:
    """Record a whole training at once and return its run id."""
    recorder = Recorder(client)
    for event in events:
        recorder.record(event)
    return recorder._id()
