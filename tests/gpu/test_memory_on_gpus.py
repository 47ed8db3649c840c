"""Memory by PyTorch's allocator, and the largest batch, on real GPUs. Nothing here starts CUDA in pytest's process."""

import pytest

from conftest import small
from samebits.doctor.fitting import Case, search
from samebits.host import driver_facts
from samebits.params import parse_params
from samebits.training.placement import this_machine

pytestmark = pytest.mark.gpus(1)
MODEL = {"name": "wide_mlp", "kwargs": {"hidden": [1024, 1024]}}
WEIGHTS = 4 * (128 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 * 10 + 10)
GIB = 2**30


def train(stage, data_dir, strategy, **settings):
    params = stage.write_params(small(model=MODEL, optimizer={"name": "adamw", "lr": 0.001}, **settings))
    return stage.train_fresh(data_dir(params), strategy)


def about(count):
    """The allocator gives memory in pieces."""
    return pytest.approx(count, rel=0.02, abs=64 * 1024)


def test_the_parts_of_one_gpu(stage, data_dir):
    run = train(stage, data_dir, "single")
    memory = run.record.memory
    (device,) = memory.devices
    assert (memory.source, device.weights, device.optimizer) == ("allocator", about(WEIGHTS), about(2 * WEIGHTS))
    assert 0 <= device.gradients <= 1.02 * WEIGHTS
    assert device.activations > 0
    assert device.capacity / GIB == pytest.approx(driver_facts().gpus[0].memory_gib, rel=0.05)
    assert device.peak / GIB == pytest.approx(run.timing.peak_memory_gib["device0"], rel=0.2)


@pytest.mark.gpus(2)
def test_device_0_of_dp_holds_more_than_the_others(stage, data_dir):
    record = train(stage, data_dir, "dp", global_batch_size=512).record
    first, *others = record.memory.devices
    assert len(others) == record.placement.devices_used - 1 > 0
    assert first.optimizer == about(2 * WEIGHTS)
    assert all((other.weights, other.optimizer, other.gradients) == (about(WEIGHTS), 0, 0) for other in others)
    assert all(other.peak < first.peak for other in others)


@pytest.mark.gpus(2)
def test_the_ranks_of_ddp_hold_the_same(stage, data_dir):
    record = train(stage, data_dir, "ddp").record
    devices = record.memory.devices
    assert len(devices) == record.placement.devices_used > 1
    for part in ("weights", "gradients", "optimizer"):
        assert len({getattr(device, part) for device in devices}) == 1
    assert devices[0].gradients >= WEIGHTS  # in buckets, which stay


def gpu_case(tmp_path, data_dir, strategy, limit) -> Case:
    params = parse_params(small(model=MODEL, optimizer={"name": "adamw", "lr": 0.001}))
    data = data_dir(params)
    wide = params.model_copy(update={"data": params.data.model_copy(update={"num_samples": 10**7})})
    facts = {"machine": this_machine(), "data_dir": data, "folder": tmp_path, "seconds": 300}
    return Case(params=wide, strategy=strategy, numerics="fast", limit=limit, **facts)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", pytest.param("dp", marks=pytest.mark.gpus(2))])
def test_the_forecast_of_a_limited_gpu_is_within_a_tenth_of_the_truth(strategy, tmp_path, data_dir):
    case = gpu_case(tmp_path, data_dir, strategy, GIB)
    forecast = case.estimate().forecast
    bracket = search(
        lambda samples: case.fits(samples, limit=GIB, at_once=False), forecast.samples, unit=case.unit, most=case.most
    )
    assert forecast.samples == pytest.approx(bracket.fitted, rel=0.1)
    assert forecast.device == 0


def test_a_gpu_without_a_limit_has_what_is_free(tmp_path, data_dir):
    step = gpu_case(tmp_path, data_dir, "single", None)._measure(64)
    assert 0 < step.peaks[0] < step.rooms[0] <= driver_facts().gpus[0].memory_gib * GIB
    assert step.memory.source == "allocator"
