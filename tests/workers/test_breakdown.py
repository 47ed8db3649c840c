"""What the marked pass of a real training leaves in its record, and a trace of its steps."""

import gzip
import json

import pytest

from conftest import small
from samebits.measuring.phases import TURNS
from samebits.records.run import RunRecord


@pytest.fixture
def trained(stage, data_dir):
    """Train, and return the record."""

    def run(strategy, *arguments, **settings):
        params = stage.write_params(small(**{"repeats": 2, "oversubscribe": True, **settings}))
        stage.train(data_dir(params), strategy, "--out-dir", "out", *arguments)
        return RunRecord.read(stage.folder / "out/run.json", made_by="train")

    return run


def test_ddp_leaves_phases_of_every_rank_and_its_traffic(trained):
    record = trained("ddp", num_devices=2, model={"name": "mlp", "kwargs": {"hidden": [64]}})
    divided = record.breakdown
    assert [len(rank.noted) for rank in divided.ranks] == [len(rank.alone) for rank in divided.ranks] == [TURNS] * 2
    assert divided.traffic.gradient_bytes == divided.traffic.bytes_per_step == 4 * record.model_parameters
    assert divided.traffic.buffer_bytes == 0
    assert all(0 < bucket.ready_ms < bucket.done_ms for bucket in divided.traffic.buckets)
    *_, whole = divided.bounds.all_reduces
    assert whole.size_bytes == divided.traffic.gradient_bytes
    assert whole.bus_gb_per_s > 0
    assert divided.bounds.half_ms is None
    assert min(divided.launches.passes, divided.launches.rest) > 0


def test_each_micro_batch_is_not_reduced_by_itself(trained):
    record = trained("ddp", num_devices=2, grad_accum_steps=4)
    assert record.breakdown.traffic.bytes_per_step == 4 * record.model_parameters


@pytest.mark.parametrize("synced", [True, False])
def test_buffers_count_where_they_are_sent(synced, trained, stage):
    model = stage.write_model(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Linear(128, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))\n"
    )
    record = trained("ddp", num_devices=2, model=model, ddp={"forward_sync_buffers": synced})
    assert record.breakdown.traffic.buffer_bytes == synced * (8 * 4 + 8 * 4 + 8)


def test_single_leaves_half_a_batch_and_no_traffic(trained):
    record = trained("single")
    assert record.breakdown.traffic is None
    assert len(record.breakdown.bounds.half_ms) == TURNS


@pytest.mark.parametrize(
    ("numerics", "settings"), [("exact", {"numerics": ["exact"]}), ("fast", {"repeats": 1})], ids=str
)
def test_no_breakdown_of_exact_or_without_repeats(numerics, settings, trained):
    assert trained("single", "--numerics", numerics, **settings).breakdown is None


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_a_trace_has_the_steps_and_is_not_left_by_the_next_training(strategy, trained, stage):
    settings = {"repeats": 1, "num_devices": 2 if strategy == "ddp" else 1}
    trained(strategy, "--trace", **settings)
    file = stage.folder / "out/trace.json.gz"
    names = {event.get("name") for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
    assert {"step 1", "step 2", "step 3", "aten::addmm"} <= names
    trained(strategy, **settings)
    assert not file.exists()


WATCHED = """
import torch
from torch import nn

class Watched(nn.Sequential):
    def forward(self, x):
        with open({file!r}, "a") as file:
            print(torch.backends.cuda.flash_sdp_enabled(), file=file)
        return super().forward(x)

def make():
    return Watched(nn.Linear(128, 10))
"""


def test_a_trace_is_of_the_trainings_numerics_whatever_was_timed_last(trained, stage):
    file = stage.folder / "switches.txt"
    model = stage.write_model(WATCHED.format(file=str(file)))
    odd = {"numerics": ["exact"], "global_batch_size": 56}  # nine steps, and so fast has the last turn beside exact
    trained("single", "--numerics", "exact", "--trace", model=model, **odd)
    first, *timed, last = file.read_text().split()
    assert first == last == "False"
    assert "True" in timed  # the reference in fast
