"""A log or a delivery's state that ends at any of its bytes, as a loss of power leaves them: nothing lost or doubled.

The store is in memory, so that every byte can be tried; real ones are torn by ``make faults``.
"""

import copy
import itertools
from types import SimpleNamespace

import pytest
from tracking_fixtures import TIMING, finish, setup, start

from samebits import files
from samebits.records.log import LOGS, LossesEvent, ResultEvent
from samebits.tracking import comparison, delivery, recorder
from samples import comparison as sample
from samples import row

LOSSES = [(1, (2.5, 2.25)), (3, (2.0, 1.5)), (5, (1.25, 1.0))]


class Memory:
    """What MLflow's client does for a delivery; as in MLflow, a point that is logged twice is one."""

    tracking_uri = "memory"

    def __init__(self):
        self.experiments, self.runs = {}, {}

    def get_experiment_by_name(self, name):
        return self.experiments.get(name)

    get_experiment = get_experiment_by_name

    def create_experiment(self, name, artifact_location=None):
        self.experiments[name] = SimpleNamespace(experiment_id=name, tags={})
        return name

    def set_experiment_tag(self, experiment, key, value):
        self.experiments[experiment].tags[key] = value

    def search_runs(self, experiments, filter_string, max_results):
        key = filter_string.split("'")[1]
        return [run for run in self.runs.values() if run.data.tags[recorder.RUN_TAG] == key][:max_results]

    def create_run(self, experiment, start_time, tags, run_name):
        facts = {"experiment_id": experiment, "name": run_name, "began": start_time, "end": None, "status": "RUNNING"}
        info = SimpleNamespace(run_id=f"{len(self.runs):032x}", **facts)
        data = SimpleNamespace(tags=dict(tags), params={}, metrics={}, points=set(), files=set(), inputs=set())
        self.runs[info.run_id] = SimpleNamespace(info=info, data=data)
        return self.runs[info.run_id]

    def get_run(self, run_id):
        return self.runs[run_id]

    def log_batch(self, run_id, metrics=(), params=(), tags=()):
        data = self.runs[run_id].data
        data.points |= {(point.key, point.step, point.timestamp, point.value) for point in metrics}
        data.metrics |= {point.key: point.value for point in metrics}
        data.params |= {param.key: param.value for param in params}
        data.tags |= {tag.key: tag.value for tag in tags}

    def log_artifact(self, run_id, path, artifact_path=""):
        self.runs[run_id].data.files.add(f"{artifact_path}/{path.rpartition('/')[2]}".lstrip("/"))

    def log_artifacts(self, run_id, folder, path):
        self.runs[run_id].data.files.add(path)

    def log_inputs(self, run_id, datasets):
        self.runs[run_id].data.inputs |= {one.dataset.digest for one in datasets}

    def search_logged_models(self, *_, **__):
        return []

    def set_terminated(self, run_id, status, end_time):
        info = self.runs[run_id].info
        info.end, info.status = (status, end_time), status

    def told(self):
        """All of it, to be compared."""
        return [(vars(run.info), vars(run.data)) for run in self.runs.values()]


@pytest.fixture
def deliver(monkeypatch):
    """Deliver the one log there is to a store in memory, while its writer goes on or after it."""

    def run(store, log, *, writing=False):
        monkeypatch.setattr(delivery, "connect", lambda uri: store)
        monkeypatch.setattr(delivery, "writer_gone", lambda path: not writing)
        return delivery.deliver(log)

    monkeypatch.setattr(files, "fsync", lambda path: None)  # the power is not really lost
    return run


@pytest.fixture
def log(tmp_path, monkeypatch):
    """The log of a training that has ended."""
    monkeypatch.chdir(tmp_path)
    key = "20260101-000000-ddp"
    written = start(key)
    setup(written)
    for first, losses in LOSSES:
        written.append(LossesEvent(first_step=first, losses=losses, learning_rates=(0.5,) * len(losses)))
    written.append(ResultEvent(run=key, out_dir=str(tmp_path / "gone"), weights_sha256="ab" * 32, timing=TIMING))
    finish(written)
    return LOGS / f"{key}.jsonl"


def set_states(states):
    """Let these be all states of deliveries that there are."""
    for file in LOGS.glob("*.state.json"):
        file.unlink()
    for file, content in states.items():
        file.write_bytes(content)


@pytest.fixture
def compared(log, tmp_path):
    """The log of a comparison of that training with one of which nothing is left."""
    of_both = sample(row("ddp", run=log.stem), row(run="20260101-000000-single"))
    of_both.write(tmp_path / "reports/comparison.json")
    return comparison.log_comparison(of_both, reports=tmp_path / "reports", runs=tmp_path / "runs")


def test_what_is_delivered_of_a_training_and_of_a_comparison(log, compared, deliver):
    store = Memory()
    assert deliver(store, compared)
    (info, data), (parent, of_both) = store.told()
    assert (info["end"][0], parent["end"][0]) == ("FINISHED", "FINISHED")
    assert data["tags"][comparison.PARENT_TAG] == parent["run_id"]
    assert of_both["files"] == {"params.yaml", "report/comparison.json"}
    losses = [(key, step, value) for key, step, _, value in data["points"] if key == "loss"]
    assert sorted(losses) == [("loss", first + at, loss) for first, part in LOSSES for at, loss in enumerate(part)]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("which", ["log", "compared"])
def test_a_log_and_a_state_that_end_at_any_byte_are_delivered_once(which, every, log, compared, deliver):
    """Of all bytes those beside the ends of lines matter most."""
    path = {"log": log, "compared": compared}[which]
    reference, whole, state = Memory(), path.read_bytes(), path.with_suffix(".state.json")
    assert deliver(reference, path)
    ends = list(itertools.accumulate(map(len, whole.splitlines(keepends=True)), initial=0))
    near = {end + beside for end in ends for beside in (-1, 0, 1)}
    for place in (place for place in range(len(whole) + 1) if every or place in near):
        set_states({})
        path.write_bytes(whole[:place])
        before = Memory()
        assert deliver(before, path, writing=True) == (place == len(whole))
        states = {file: file.read_bytes() for file in LOGS.glob("*.state.json")}
        text = states.get(state, b"")
        path.write_bytes(whole)
        torn_at = range(len(text) + 1) if place in ends else [len(text)]
        for torn in torn_at if every else {0, 1, len(text) // 2, max(len(text) - 1, 0), len(text)}:
            store = copy.deepcopy(before)
            set_states({**states, state: text[:torn]})
            assert deliver(store, path)
            assert store.told() == reference.told(), (place, torn)
