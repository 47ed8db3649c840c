"""Record the events of a training as one MLflow run. Recording an event twice changes nothing."""

from __future__ import annotations

import calendar
import itertools
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from samebits.errors import UserError
from samebits.files import scratch_folder
from samebits.here import stage_command
from samebits.params import flatten, write_params
from samebits.records import log
from samebits.records.provenance import UNAVAILABLE
from samebits.records.run import FILES, RECORD, TRACE, WEIGHTS, RunRecord, run_name
from samebits.results.text import COLOURS, count_of
from samebits.tracking.checkpoint import fail_unfinished, log_checkpoint
from samebits.tracking.store import RUN_TAG, experiment_id, find_run

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput, Metric

    from samebits.params import Params
    from samebits.params.schema import Tracking
    from samebits.records.card import Card
    from samebits.records.log import Event
    from samebits.records.provenance import Provenance
    from samebits.records.run import Run

BATCH = 1000  # points that MLflow takes in one call
TIMES = ("training_seconds", "samples_per_sec", "step_time_ms", "step_time_p5_ms", "step_time_p95_ms")
_HOST_TAGS = ("driver", "image_id", "image_digest", "image_base", "container_toolkit")
_DIGEST = 36  # characters that MLflow keeps of a dataset's hash
SEGMENT_MS = 500  # about the interval at which a training logs its losses
RESTORED = {"restored": "recorded again from the run's files", "git_commit": f"{UNAVAILABLE}recorded from files"}


def metric(key: str, value: float, time_ms: int, step: int = 0) -> Metric:
    """One point of a metric, as MLflow's client takes it."""
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


def log_params(client: MlflowClient, run_id: str, params: Params) -> None:
    """Log params by their dotted names, and as a params.yaml that can be trained from."""
    from mlflow.entities import Param

    flat = flatten(params.model_dump(mode="json"))
    client.log_batch(run_id, params=[Param(key, str(value)) for key, value in flat.items()])
    with scratch_folder() as folder:
        file = folder / "params.yaml"
        write_params(params, file)
        client.log_artifact(run_id, str(file))


def refuse_links(paths: Iterable[Path]) -> None:
    """Raise UserError: one of these files, which go to MLflow, is a link to some other file."""
    if link := next((path for path in paths if path.is_symlink()), None):
        raise UserError(f"{link}: a link, whose file is not the run's", hint="no stage writes one: look at who made it")


def _name(event: log.StartEvent) -> str:
    """What tells a run apart in a list: strategy, numerics, devices, batch, model, and a precision other than fp32."""
    placement, params = event.placement, event.params
    devices = count_of(placement.devices_used, placement.devices_by_node)
    model = params.model.name.rpartition(":")[2]
    precision = "" if params.train.precision == "fp32" else f" {params.train.precision}"
    run = run_name(event.strategy, event.numerics)
    return f"{run} x{devices} b{params.train.global_batch_size} {model}{precision}"


class Recorder:
    """Records the events of one training. ``run_id`` is known after the first one."""

    def __init__(self, client: MlflowClient, run_id: str | None = None) -> None:
        self._client, self.run_id = client, run_id

    def record(self, *events: Event) -> None:
        """Record one event of a training, or several events of losses in one call of MLflow."""
        match event := events[0]:
            case log.StartEvent():
                self._start(event)
            case log.SetupEvent():
                self._setup(event)
            case log.LossesEvent():
                self._losses([one for one in events if isinstance(one, log.LossesEvent)])
            case log.SampledEvent():
                values = {f"system/{event.node}/{name}": value for name, value in event.values.items()}
                points = [metric(name, value, event.time_ms, event.sample) for name, value in values.items()]
                send(self._client, self._id(), points)
            case log.ResultEvent():
                self._result(event)
            case log.EndEvent():
                fail_unfinished(self._client, self._id())
                if event.error:
                    self._client.set_tag(self._id(), "error", event.error)
                self._client.set_terminated(self._id(), event.status, end_time=event.time_ms)
            case log.ComparedEvent():
                raise AssertionError("a comparison is no event of a training")

    def _id(self) -> str:
        assert self.run_id, "an event before the start"
        return self.run_id

    def _start(self, event: log.StartEvent) -> None:
        placement = event.placement
        experiment = experiment_id(self._client, event.params.tracking.experiment)
        run = find_run(self._client, experiment, event.run)  # an earlier delivery may have ended right after create_run
        if run is None:
            tags = {
                RUN_TAG: event.run,
                "strategy": event.strategy,
                "mlflow.runColor": COLOURS[event.strategy],
                "numerics": event.numerics,
                "num_devices": str(placement.devices_used),
                "num_nodes": str(len(placement.devices_by_node) or 1),
                "fallback": placement.fallback.sentence() if placement.fallback else "",
                "labels": ", ".join(label.kind for label in placement.labels),
                **event.tags,
            }
            name = _name(event)
            run = self._client.create_run(experiment, start_time=event.time_ms, tags=tags, run_name=name)
        self.run_id = str(run.info.run_id)
        log_params(self._client, self.run_id, event.params)

    def provenance(self, provenance: Provenance, patch: Path | None) -> None:
        """Record commit, patch, packages and environment."""
        packages = provenance.packages
        tags: dict[str, object] = {"git_commit": provenance.git.told, "git_dirty": provenance.git.dirty}
        tags |= {f"version.{name}": packages.get(name) for name in ("torch", "mlflow", "dvc", "samebits")}
        set_tags(self._client, self._id(), tags)
        with scratch_folder() as folder:
            file = folder / "provenance.json"
            provenance.write(file)
            self._client.log_artifact(self._id(), str(file))
        if patch is not None:
            self._client.log_artifact(self._id(), str(patch))

    def _setup(self, event: log.SetupEvent) -> None:
        host, card = event.host, event.data
        tags = {
            "host_fingerprint": host.fingerprint,
            **{name: getattr(host, name) or "" for name in _HOST_TAGS},
            "in_container": host.in_container,
            "data_sha256": card.sha256,
            **({"nodes": ", ".join(f"{n.name} {n.host.fingerprint}" for n in event.nodes)} if event.nodes else {}),
        }
        set_tags(self._client, self._id(), tags)
        self._client.log_inputs(self._id(), datasets=[_dataset(card, event.data_dir)])

    def _losses(self, events: list[log.LossesEvent]) -> None:
        """Record every loss, and one learning rate per event, since the params imply the others.

        Each point has the time of its event, because a store takes the same point at another time for a new one.
        """
        points = []
        for event in events:
            first, when = event.first_step, event.time_ms
            points += [metric("loss", value, when, first + i) for i, value in enumerate(event.losses)]
            points += [metric("learning_rate", rate, when, first) for rate in event.learning_rates[:1]]
        send(self._client, self._id(), points)

    def _result(self, event: log.ResultEvent) -> None:
        points = [metric(name, value, event.time_ms) for name, value in figures_of(event).items()]
        send(self._client, self._id(), points)
        set_tags(self._client, self._id(), {"weights_sha256": event.weights_sha256})
        self._artifacts(event.run, Path(event.out_dir))

    def _artifacts(self, key: str, folder: Path) -> None:
        """Upload the run's files, and tag the run if a later training has replaced them before or meanwhile."""
        record = _record_of(key, folder)
        names = (*FILES, *((TRACE,) if (folder / TRACE).is_file() else ()))
        refuse_links(folder / name for name in names)
        if record is not None:
            for name in names:
                self._client.log_artifact(self._id(), str(folder / name))
            tags = {"strategy": record.strategy, "numerics": record.numerics, "weights_sha256": record.weights_sha256}
            log_checkpoint(self._client, self._id(), folder / WEIGHTS, name=record.name, tags=tags)
            record = _record_of(key, folder)
        if record is None:
            reason = f"{UNAVAILABLE}the files were gone, or were a later run's, when they could be delivered"
            set_tags(self._client, self._id(), {"artifacts": reason})


def _record_of(key: str, folder: Path) -> RunRecord | None:
    """The record of the run in a folder; None if it is another run's or cannot be read."""
    try:
        record = RunRecord.read(folder / RECORD, made_by=stage_command("train"))
    except UserError:
        return None
    return record if record.run == key else None


def figures_of(event: log.ResultEvent) -> dict[str, float]:
    """The figures of a finished training by the names of their metrics."""
    timing = event.timing
    figures: dict[str, float] = timing.model_dump(include=set(TIMES))
    peaks = {device: peak for device, peak in timing.peak_memory_gib.items() if peak is not None}
    figures |= {f"peak_memory_gib.{device}": peak for device, peak in peaks.items()}
    figures |= {"peak_memory_gib": max(peaks.values())} if peaks else {}
    ratios = {"speedup": timing.speedup, "bound": timing.bound, "price": timing.price}
    return figures | {name: ratio.median for name, ratio in ratios.items() if ratio}


def _dataset(card: Card, folder: str) -> DatasetInput:
    """The training split as an MLflow dataset. Its digest is the card's hash of both splits."""
    import numpy as np
    from mlflow.data.schema import TensorDatasetSchema
    from mlflow.entities import Dataset, DatasetInput, InputTag
    from mlflow.types.schema import Schema, TensorSpec

    def tensor(dtype: str, shape: tuple[int, ...]) -> Schema:
        return Schema([TensorSpec(np.dtype(dtype), (-1, *shape))])

    schema = None
    if card.loss != "own":
        features, targets = tensor(card.input_dtype, card.input_shape), tensor(card.target_dtype, card.target_shape)
        schema = json.dumps(TensorDatasetSchema(features=features, targets=targets).to_dict())
    return DatasetInput(
        Dataset(
            name=card.task,
            digest=card.sha256[:_DIGEST],
            source_type="local",
            source=json.dumps({"uri": folder}),
            schema=schema,
            profile=json.dumps({"num_samples": card.train.num_samples, "floor": card.floor}),
        ),
        [InputTag("mlflow.data.context", "training")],
    )


# -- a run that MLflow does not have, recorded from its files: after a restored run cache, or in a new clone ---------


def record_all(client: MlflowClient, events: Iterable[Event]) -> str:
    """Record a whole training and return its run id."""
    recorder = Recorder(client)
    for event in events:
        recorder.record(event)
    return recorder._id()


def started_ms(run: Run) -> int:
    """When the run began, from its key, or from the time of its file where the key has no date."""
    stamp = "-".join(run.record.run.split("-")[:2])
    try:
        return calendar.timegm(time.strptime(stamp, "%Y%m%d-%H%M%S")) * 1000
    except ValueError:
        return int((run.folder / "run.json").stat().st_mtime * 1000)


def events(run: Run, tags: Mapping[str, str] = RESTORED, *, tracking: Tracking | None = None) -> Iterator[Event]:
    """The events of a finished run in their order, nearly at the times at which they were logged.

    ``tracking`` replaces the experiment of the run's own params. A run's files hold neither learning rates nor the
    state of the working tree.
    """
    record, began = run.record, started_ms(run)
    params = record.params.model_copy(update={"tracking": tracking}) if tracking else record.params
    yield log.StartEvent(
        time_ms=began,
        log_schema=log.SCHEMA,
        tracking_uri=None,
        run=record.run,
        strategy=record.strategy,
        numerics=record.numerics,
        placement=record.placement,
        params=params,
        tags=dict(tags),
    )
    yield log.SetupEvent(time_ms=began, host=record.host, data=record.data, data_dir="data")
    ends = list(itertools.accumulate(record.measurement.step_ms))
    first = 1
    for segment, steps in itertools.groupby(ends, key=lambda milliseconds: int(milliseconds // SEGMENT_MS)):
        losses = tuple(run.losses[first - 1 : first - 1 + len(list(steps))])
        when = began + (segment + 1) * SEGMENT_MS
        yield log.LossesEvent(time_ms=when, first_step=first, losses=losses, learning_rates=())
        first += len(losses)
    ended = began + round(ends[-1])
    yield log.ResultEvent(
        time_ms=ended,
        run=record.run,
        timing=run.timing,
        out_dir=str(run.folder.resolve()),
        weights_sha256=record.weights_sha256,
    )
    yield log.EndEvent(time_ms=ended, status="FINISHED")
