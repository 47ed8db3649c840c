"""The marked pass on real GPUs: events on streams, buckets behind them, and dp's copies."""

import pytest

from conftest import small

pytestmark = pytest.mark.gpus(1)


def divided(stage, data_dir, strategy, devices):
    model = {"name": "mlp", "kwargs": {"hidden": [512, 512]}}
    params = stage.write_params(small(model=model, repeats=2, num_devices=devices))
    return stage.train_fresh(data_dir(params), strategy).record.breakdown


def test_phases_of_one_gpu_add_up_to_its_step(stage, data_dir):
    found = divided(stage, data_dir, "single", 1)
    (rank,) = found.ranks
    assert all(min(turn.forward, turn.backward, turn.optimizer) > 0 for turn in rank.noted)
    assert sum(turn.total for turn in rank.noted) == pytest.approx(sum(found.noted_ms), rel=0.2)
    assert found.bounds.host_to_device_gb_per_s > 0.1
    assert found.bounds.copy_gb_per_s > 10


@pytest.mark.gpus(2)
def test_ddp_has_buckets_behind_events(stage, data_dir):
    found = divided(stage, data_dir, "ddp", 2)
    assert found.traffic.buckets
    assert all(bucket.ready_ms < bucket.done_ms for bucket in found.traffic.buckets)
    assert found.bounds.all_reduces[-1].bus_gb_per_s > 0.1


@pytest.mark.gpus(2)
def test_dp_copies_in_each_step(stage, data_dir):
    found = divided(stage, data_dir, "dp", 2)
    (rank,) = found.ranks
    assert rank.noted
    assert all(min(turn.scatter, turn.replicate, turn.gather) > 0 for turn in rank.noted)
