"""Deliver local logs to MLflow, in a process of its own, in batches, while training goes on.

``python -m samebits.tracking LOG`` follows one log until its writer has ended. How far a log was delivered is
kept beside it, and every point carries the time it was logged at, so delivering twice changes nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samebits.files import write_json
from samebits.host import fingerprint, host_facts
from samebits.provenance import git_state, versions
from samebits.runlog import LOGS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mlflow import MlflowClient
    from mlflow.entities import Metric

POLL_SECONDS = 0.5
BATCH = 1000  # points that MLflow takes in one call
RUN_TAG = "samebits.run"


def tracking_uri(environ: Mapping[str, str] = os.environ) -> str:
    """MLFLOW_TRACKING_URI, else a SQLite file in the working directory."""
    return environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path.cwd() / 'mlflow.db'}"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _client() -> MlflowClient:
    """A client of the store in use; one process at a time may create a fresh SQLite file."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient

    with _locked(LOGS.parent / "store.lock"):
        client = MlflowClient(tracking_uri=tracking_uri())
        client.search_experiments(max_results=1)
    return client


def _experiment(client: MlflowClient, name: str) -> str:
    with _locked(LOGS.parent / "store.lock"):
        found = client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        local = tracking_uri().startswith("sqlite:")
        location = (Path.cwd() / "mlartifacts").as_uri() if local else None
        return str(client.create_experiment(name, artifact_location=location))


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one level with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


class Delivery:
    """Delivers the events of one log to one MLflow run."""

    def __init__(self, log: Path) -> None:
        self._log, self._state_file = log, log.with_suffix(".state.json")
        self.state: dict[str, Any] = {"run_id": None, "offset": 0, "ended": False}
        if self._state_file.exists():
            self.state = json.loads(self._state_file.read_text(encoding="utf-8"))
        self._client: MlflowClient | None = None

    @property
    def client(self) -> MlflowClient:
        """The client, made at the first event that needs it."""
        if self._client is None:
            self._client = _client()
        return self._client

    def pending(self) -> list[dict[str, Any]]:
        """Whole lines that were not yet delivered."""
        with self._log.open("rb") as stream:
            stream.seek(self.state["offset"])
            data = stream.read()
        self._read_to = self.state["offset"] + data.rfind(b"\n") + 1
        return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]

    def deliver(self) -> None:
        """Deliver what is pending, and remember how far that was."""
        events = self.pending()
        for event in events:
            getattr(self, f"_{event['event']}")(event)
        if events:
            self.state["offset"] = self._read_to
            write_json(self._state_file, self.state)

    def abandon(self) -> None:
        """End the run of a writer that is gone without a word."""
        if self.state["run_id"] and not self.state["ended"]:
            self._end({"status": "FAILED", "time_ms": time.time_ns() // 1_000_000})
            write_json(self._state_file, self.state)

    def _start(self, event: dict[str, Any]) -> None:
        params, placement, git = event["params"], event["placement"], git_state()
        tags = {
            RUN_TAG: event["run"],
            "strategy": event["strategy"],
            "numerics": event["numerics"],
            "num_devices": placement["num_devices"],
            "fallback": next((x["text"] for x in placement["labels"] if x["kind"] == "fallback"), ""),
            "labels": ", ".join(label["kind"] for label in placement["labels"]),
            "git_commit": git["commit"],
            "git_dirty": git["dirty"],
            "host_fingerprint": fingerprint(host_facts()),
            **{f"version.{name}": version for name, version in versions().items()},
        }
        experiment = _experiment(self.client, params["tracking"]["experiment"])
        run_id = self._search(experiment, event["run"])  # there is one if a delivery was cut off right here
        if run_id is None:
            run = self.client.create_run(
                experiment,
                start_time=event["time_ms"],
                tags={key: str(value) for key, value in tags.items()},
                run_name=f"{event['strategy']}-{event['numerics']} x{placement['devices_used']}",
            )
            run_id = str(run.info.run_id)
        self.state["run_id"] = run_id
        write_json(self._state_file, self.state)
        from mlflow.entities import Param

        flat = {key: str(value) for key, value in flatten(params).items()}
        self.client.log_batch(run_id, params=[Param(key, value) for key, value in flat.items()])
        with tempfile.TemporaryDirectory() as folder:
            from ruamel.yaml import YAML

            file = Path(folder) / "params.yaml"
            YAML().dump(params, file)
            self.client.log_artifact(run_id, str(file))

    def _losses(self, event: dict[str, Any]) -> None:
        first, when = event["first_step"], event["time_ms"]
        metrics = []
        for key, values in (("loss", event["losses"]), ("learning_rate", event["learning_rates"])):
            metrics += [_metric(key, value, when, first + i) for i, value in enumerate(values)]
        self._send(self.state["run_id"], metrics)

    def _result(self, event: dict[str, Any]) -> None:
        timing, run_id, when = event["timing"], self.state["run_id"], event["time_ms"]
        names = ("training_seconds", "samples_per_sec", "step_time_ms", "step_time_p5_ms", "step_time_p95_ms")
        figures = {name: timing[name] for name in names}
        figures["peak_memory_gib"] = max(timing["peak_memory_gib"].values())
        self._send(run_id, [_metric(name, value, when, 0) for name, value in figures.items()])
        self.client.set_tag(run_id, "weights_sha256", event["weights_sha256"])
        for name in ("model.safetensors", "losses.csv", "timing.json", "run.json"):
            self.client.log_artifact(run_id, str(Path(event["out_dir"]) / name))

    def _end(self, event: dict[str, Any]) -> None:
        self.state["ended"] = True
        if self.state["run_id"]:
            self.client.set_terminated(self.state["run_id"], event["status"], end_time=event["time_ms"])

    def _comparison(self, event: dict[str, Any]) -> None:
        """Add to each compared run what only the comparison knows."""
        for row in event["rows"]:
            run_id = self._find(row["run"], event["experiment"])
            if run_id is None:
                sys.stderr.write(f"{row['run']}: no such run in MLflow\n")
                continue
            figures = {name: row[name] for name in ("eval_loss", "accuracy", "scaling_efficiency")}
            figures |= {"loss_above_floor": row["above_floor"], "loss_floor": row["floor"]}
            for name in ("speedup", "bound"):
                figures[name] = row[name]["median"] if row[name] else None
            known = {name: value for name, value in figures.items() if value is not None}
            self._send(run_id, [_metric(name, value, event["time_ms"], 0) for name, value in known.items()])
            self.client.set_tag(run_id, "labels", ", ".join(label["kind"] for label in row["labels"]))

    def _find(self, key: str, experiment: str) -> str | None:
        log = LOGS / f"{key}.jsonl"
        if log.exists():
            delivered: str | None = follow(log).state["run_id"]
            return delivered
        return self._search(_experiment(self.client, experiment), key)

    def _search(self, experiment_id: str, key: str) -> str | None:
        runs = self.client.search_runs([experiment_id], f"tags.`{RUN_TAG}` = '{key}'")
        return str(runs[0].info.run_id) if runs else None

    def _send(self, run_id: str, metrics: list[Metric]) -> None:
        for start in range(0, len(metrics), BATCH):
            self.client.log_batch(run_id, metrics=metrics[start : start + BATCH])


def _metric(key: str, value: float, time_ms: int, step: int) -> Metric:
    from mlflow.entities import Metric

    return Metric(key, value, time_ms, step)


def _writer_gone(log: Path) -> bool:
    with log.open("rb") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def follow(log: Path) -> Delivery:
    """Deliver a log until its writer has ended; waits for another process that follows the same log."""
    with _locked(log.with_suffix(".lock")):
        delivery = Delivery(log)
        while True:
            gone = _writer_gone(log)  # asked before reading, so that nothing written last is missed
            delivery.deliver()
            if gone:
                delivery.abandon()
                return delivery
            time.sleep(POLL_SECONDS)


def sync() -> int:
    """Deliver every local log that is not delivered whole; return how many there were."""
    logs = sorted(LOGS.glob("*.jsonl")) if LOGS.exists() else []
    deliveries = {log: Delivery(log) for log in logs}
    waiting = [log for log, delivery in deliveries.items() if delivery.pending() or not delivery.state["ended"]]
    for log in waiting:
        follow(log)
    return len(waiting)


if __name__ == "__main__":
    os.nice(10)  # never in the way of the training
    follow(Path(sys.argv[1]))
