"""A log or a delivery's state that ends at any of its bytes, as a loss of power leaves them: nothing lost or doubled.

The store is in memory, so that every byte can be tried; real ones are torn by ``make faults``.
"""

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


SOME_OR_ALL = pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
"""Bytes at which a file ends, of which those beside the ends of lines matter most."""


def ends_of(text):
    return list(itertools.accumulate(map(len, text.splitlines(keepends=True))))


def places_in(text, every):
    """Bytes at which a file may end: every one, or those beside the ends of its lines."""
    near = {end + beside for end in [0, *ends_of(text)] for beside in (-1, 0, 1)}
    return [place for place in range(len(text) + 1) if every or place in near]


@pytest.fixture
def compared(log, tmp_path):
    """The log of a comparison of that training with one of which nothing is left."""
    of_both = sample(row("ddp", run=log.stem), row(run="20260101-000000-single"))
    of_both.write(tmp_path / "reports/comparison.json")
    return comparison.log_comparison(of_both, reports=tmp_path / "reports", runs=tmp_path / "runs")


@SOME_OR_ALL
def test_a_comparison_whose_log_and_state_end_at_any_byte_is_recorded_once(every, log, compared, deliver):
    reference = Memory()
    assert deliver(reference, compared)
    child, parent = reference.told()
    assert child[1]["tags"][comparison.PARENT_TAG] == parent[0]["run_id"]
    assert parent[0]["end"][0] == "FINISHED"
    assert parent[1]["files"] == {"params.yaml", "report/comparison.json"}
    whole, state = compared.read_bytes(), compared.with_suffix(".state.json")
    for place in places_in(whole, every):
        store = Memory()
        for one in (log, compared):
            one.with_suffix(".state.json").unlink(missing_ok=True)
        compared.write_bytes(whole[:place])
        assert deliver(store, compared, writing=True) == (place == len(whole))
        text = state.read_bytes() if state.exists() else b""
        compared.write_bytes(whole)
        for torn in range(len(text) + 1) if every and place in ends_of(whole) else (0, len(text) // 2, len(text)):
            state.write_bytes(text[:torn])
            assert deliver(store, compared)
            assert store.told() == reference.told(), (place, torn)


@SOME_OR_ALL
def test_a_log_that_ends_at_any_byte_is_delivered_once_when_it_is_whole(every, log, deliver):
    whole, state = log.read_bytes(), log.with_suffix(".state.json")
    reference = Memory()
    assert deliver(reference, log)
    ((info, data),) = reference.told()
    assert info["end"][0] == "FINISHED"
    assert {(key, step, value) for key, step, _, value in data["points"] if key == "loss"} == {
        ("loss", first + index, loss) for first, losses in LOSSES for index, loss in enumerate(losses)
    }
    for place in places_in(whole, every):
        state.unlink(missing_ok=True)
        store = Memory()
        log.write_bytes(whole[:place])
        assert deliver(store, log, writing=True) == (place == len(whole))
        log.write_bytes(whole)
        assert deliver(store, log)
        assert store.told() == reference.told(), place


@SOME_OR_ALL
def test_a_state_that_ends_at_any_byte_has_the_whole_log_delivered_again(every, log, deliver):
    whole, state = log.read_bytes(), log.with_suffix(".state.json")
    reference = Memory()
    deliver(reference, log)
    for end in ends_of(whole):
        state.unlink(missing_ok=True)
        log.write_bytes(whole[:end])
        before = Memory()
        deliver(before, log, writing=True)
        text = state.read_bytes()
        for place in range(len(text)) if every else (0, 1, len(text) // 2, len(text) - 1):
            store = Memory()
            state.unlink()
            deliver(store, log, writing=True)
            state.write_bytes(text[:place])
            log.write_bytes(whole)
            assert deliver(store, log)
            assert store.told() == reference.told(), (end, place)
            log.write_bytes(whole[:end])
