"""Readings beside a training: what becomes of them, and what they may take."""

import threading
from unittest import mock

import pytest

from conftest import small, wait_for
from samebits.files import write_text
from samebits.host import GpuReading
from samebits.host.cores import CoreTimes
from samebits.records.run import read_run
from samebits.records.usage import MeanMax, Roof
from samebits.strategies.placement import Placement
from samebits.training.loop import TrainResult
from samebits.workers import sampler
from samebits.workers.sampler import Sampler, device_usage, pause_after

TRAINING = TrainResult(losses=[1.0] * 8, step_seconds=[], seconds=1.0)


def placed_on(*devices, **changes):
    return Placement(strategy="dp", device_type="cuda", num_devices=len(devices), devices=devices, rows_per_device=1,
                     **{"devices_used": len(devices), **changes})  # fmt: skip


def watch(placement, readings=0, at_the_end=lambda: None):
    """What is said of an interval with so many readings between the first and the last."""
    one, taken = Sampler(placement, on=True, seconds=0.05), []
    counted = mock.patch.object(sampler, "pause_after", lambda *took: taken.append(took) or pause_after(*took))
    with counted, one.during("training"):
        wait_for(lambda: len(taken) >= readings)
        at_the_end()
    return one.usage(TRAINING, 64)


@pytest.fixture
def any_length(monkeypatch):
    """Energy is told of intervals as short as a test's."""
    monkeypatch.setattr(sampler, "SHORTEST_ENERGY", {"cuda": 0.0, "cpu": 0.0})


def test_what_readings_say_of_a_device():
    first = GpuReading({"energy_j": 10.0, "nvlink_rx_mb": 5.0, "nvlink_tx_mb": 9.0, "power_w": 7.0}, {"clock": "no"})
    middle = GpuReading({"power_w": 100.0, "max_sm_clock_mhz": 2000.0}, {}, ("sw_power_cap",), True)
    last = GpuReading(
        {"energy_j": 410.0, "nvlink_rx_mb": 25.0, "nvlink_tx_mb": 1.0, "power_w": 300.0, "max_sm_clock_mhz": 1900.0},
        {"clock": "no", "shared": "no"}, (), False,
    )  # fmt: skip
    usage = device_usage(3, first, [middle, last], 2.0)
    assert usage.counters == {
        "power_w": MeanMax(mean=200.0, maximum=300.0),
        "nvlink_rx_mb_per_s": MeanMax(mean=10.0, maximum=10.0),
    }
    assert (usage.index, usage.readings, usage.energy_j, usage.max_sm_clock_mhz) == (3, 2, 400.0, 2000.0)
    assert (usage.reasons, usage.shared) == ({"sw_power_cap": 0.5}, 0.5)
    assert usage.unreadable == {"clock": "no", "nvlink_tx_mb": "its counter went back"}


@pytest.mark.usefixtures("any_length")
def test_gpus_are_watched(gpu_host, tmp_path):
    clock = tmp_path / "clock"
    clock.write_text("100")
    gpu_host("A", "gpu 1", "milliwatts 300000", "utilization 90", "reasons 0x20", STAND_IN_NVML_CLOCK=str(clock))
    usage = watch(placed_on(0, 1, 0), readings=1, at_the_end=lambda: write_text(clock, "102"))
    first, second = usage.training.devices
    assert (first.index, second.index, usage.samples) == (0, 1, 512)
    assert first.readings >= 2
    assert second.counters["utilization_percent"] == MeanMax(mean=90.0, maximum=90.0)
    assert second.reasons == {"sw_thermal_slowdown": 1.0}
    assert "none of this training's own" in first.unreadable["shared"]  # nobody computes on the stand-in
    assert (first.energy_j, second.energy_j) == (2 * 61, 2 * 300)
    assert usage.training.energy_j == pytest.approx(first.energy_j + second.energy_j)
    assert usage.training.watts == pytest.approx(usage.training.energy_j / usage.training.seconds, rel=1e-3)
    assert usage.training.energy_unavailable is None
    assert 0 < usage.sampler_share < 1


@pytest.mark.usefixtures("any_length")
@pytest.mark.parametrize(
    ("host", "lines", "changes", "why"),
    [
        ("F", (), {}, "GPU 0: Unknown Error"),
        ("E", (), {}, "GPU 0: NVML counts it for the whole GPU, not for a slice (MIG)"),
        ("B", ("fails all GPU_IS_LOST",), {}, "GPU 0 cannot be read: GPU is lost"),
        ("A", (), {"devices": (0, 1), "devices_by_node": (1, 1)},
         "of several machines, counters of the first alone are read"),
    ],
)  # fmt: skip
def test_why_there_is_no_energy(host, lines, changes, why, gpu_host):
    gpu_host(host, *lines)
    interval = watch(placed_on(0).model_copy(update=changes)).training
    assert (interval.energy_j, interval.watts, interval.energy_unavailable) == (None, None, why)
    assert [device.index for device in interval.devices] == [0]


def test_an_interval_too_short_for_the_counter(gpu_host, monkeypatch):
    monkeypatch.setattr(sampler, "SHORTEST_ENERGY", {"cuda": 3600.0})
    gpu_host("A")
    interval = watch(placed_on(0)).training
    assert interval.energy_j is None
    assert interval.energy_unavailable.endswith("s is too short for counters of energy")


def test_devices_that_get_no_samples_are_not_watched(gpu_host):
    gpu_host("A")
    assert [one.index for one in watch(placed_on(0, 1, 2, 3, devices_used=2)).training.devices] == [0, 1]


def test_cores_are_watched():
    cpu = Placement(strategy="single", device_type="cpu", rows_per_device=1)
    interval = watch(cpu, readings=10).training
    assert interval.devices == ()
    assert interval.cores.available >= 1
    assert (interval.energy_j is None) == bool(interval.energy_unavailable)


def test_what_was_measured_when_the_training_was_done(monkeypatch):
    monkeypatch.setattr(sampler.Cores, "read", lambda cores: CoreTimes(10.0, 2, 10.0, 5.0, 1.0))
    one = Sampler(Placement(strategy="single", device_type="cpu", rows_per_device=1), on=True)
    for name in ("training", "slices"):
        with one.during(name):
            pass
    one.roof = Roof(roof_flops=1e9)
    resumed = TrainResult(losses=[1.0] * 8, step_seconds=[], seconds=1.0, resumed=[2, 5])
    usage = one.usage(resumed, 64)
    assert (usage.samples, usage.roof.roof_flops) == (3 * 64, 1e9)
    assert usage.slices.cores is None  # too short for the kernel's clocks


def test_another_rank_watches_nothing(gpu_host):
    calls = gpu_host("A")
    one = Sampler(placed_on(0), on=False)
    with one.during("training"):
        pass
    assert one.usage(TRAINING, 64) is None
    assert not calls.exists()


def test_a_training_that_fails_leaves_no_thread(gpu_host):
    gpu_host("A")
    one = Sampler(placed_on(0), on=True, seconds=0.01)
    with pytest.raises(ZeroDivisionError), one.during("training"):
        raise ZeroDivisionError
    assert not [thread for thread in threading.enumerate() if thread.name == "sampler"]
    assert one.usage(TRAINING, 64) is None


@pytest.mark.parametrize(
    ("used", "took", "pause"), [(0.0, 0.0, 1.0), (0.005, 0.01, 1.0), (0.02, 0.02, 4.0), (0.001, 0.32, 6.4)]
)
def test_readings_become_rarer_where_they_take_much(used, took, pause):
    """At most 0.5% of a core, and 5% of the time waiting for NVML."""
    assert pause_after(1.0, used, took) == pytest.approx(pause)


@pytest.mark.parametrize(("strategy", "devices", "repeats"), [("single", 1, 2), ("ddp", 2, 1)])
def test_a_training_keeps_its_usage(strategy, devices, repeats, stage, data_dir):
    params = stage.write_params(small(repeats=repeats, oversubscribe=True, num_devices=devices))
    stage.train(data_dir(params), strategy)
    usage = read_run(stage.folder / f"runs/{strategy}-fast").record.usage
    assert usage.samples == 8 * 64
    assert usage.training.seconds > 0
    assert usage.slices is not None
    assert (usage.roof is None) == (repeats == 1)
    if usage.roof:
        assert (usage.roof.problem, usage.roof.flops_per_step > 0, usage.roof.roof_flops > 0) == (None, True, True)
