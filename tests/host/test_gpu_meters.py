"""NVML's readings beside a training: against the stand-in for NVML."""

from contextlib import closing

import pytest

from samebits.host import TOTALS, GpuMeters

GAUGES = {"utilization_percent", "memory_used_mib", "power_w", "sm_clock_mhz", "max_sm_clock_mhz", "temperature_c"}
ALL = GAUGES | set(TOTALS)
NVLINK = {"nvlink_tx_mb", "nvlink_rx_mb"}
PCIE = {"pcie_tx_mb_per_s", "pcie_rx_mb_per_s"}


def read(devices=(0,), pids=(), *, slow=False):
    with closing(GpuMeters(devices)) as meters:
        return meters.read(pids, slow=slow)


@pytest.mark.parametrize(
    ("name", "visible", "missing"),
    [
        ("A", None, set()),
        ("B", None, NVLINK),
        ("C", "2,3", set()),
        ("D", None, NVLINK),
        ("E", None, ALL - {"memory_used_mib"}),
        ("F", None, NVLINK | {"energy_j"}),
    ],
)
def test_what_can_be_read_of_each_host(name, visible, missing, gpu_host):
    gpu_host(name, devices=visible)
    reading = read()[0]
    assert set(reading.values) == ALL - missing
    assert missing <= set(reading.unreadable)


def test_gpus_that_cannot_be_counted_have_a_reason_in_place_of_readings(gpu_host):
    gpu_host("A", "count_fails UNKNOWN")
    reading = read()[0]
    assert reading.values == {}
    assert {*reading.unreadable.values()} == {"GPUs cannot be counted: Unknown Error"}


@pytest.mark.parametrize(
    ("question", "lost"),
    [
        ("utilization", {"utilization_percent"}),
        ("memory", {"memory_used_mib"}),
        ("power", {"power_w"}),
        ("energy", {"energy_j"}),
        ("clock", {"sm_clock_mhz"}),
        ("max_clock", {"max_sm_clock_mhz"}),
        ("temperature", {"temperature_c"}),
        ("fields", NVLINK),
        ("reasons", {"reasons"}),
        ("processes", {"shared"}),
    ],
)
def test_one_unreadable_counter_loses_no_other(question, lost, gpu_host):
    gpu_host("A", "gpu 1", "process 7", f"fails {question} NO_PERMISSION")
    reading = read([1], [7])[1]
    assert reading.unreadable == dict.fromkeys(lost, "Insufficient Permissions")
    assert set(reading.values) == ALL - lost
    assert (reading.reasons is None) == (question == "reasons")
    assert (reading.shared is None) == (question == "processes")


def test_values_are_in_the_unit_of_their_name(gpu_host, tmp_path):
    (tmp_path / "clock").write_text("100")
    gpu_host("A", "utilization 50", STAND_IN_NVML_CLOCK=str(tmp_path / "clock"))
    values = read()[0].values
    assert {name: values[name] for name in GAUGES} == {
        "utilization_percent": 50.0, "memory_used_mib": 4.0, "power_w": 61.0, "sm_clock_mhz": 210.0,
        "max_sm_clock_mhz": 1410.0, "temperature_c": 33.0,
    }  # fmt: skip
    # Counters of the stand-in rise from the same moment on: 61 W and 51200 MB a second.
    assert values["nvlink_rx_mb"] / values["energy_j"] == pytest.approx(51200 / 61, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("A", {2000.0}),
        ("B", {4.0}),
        ("D", {"Not Supported"}),
        ("E", {"NVML counts it for the whole GPU, not for a slice (MIG)"}),
    ],
)
def test_pcie_is_measured_where_there_is_time(name, rates, gpu_host):
    """It is a rate and no count, because counters of 32 bits begin again after 4 GB."""
    calls = gpu_host(name)
    quick = read()[0]
    assert not PCIE & quick.values.keys()
    assert not calls.exists() or "nvmlDeviceGetPcieThroughput" not in calls.read_text()
    reading = read(slow=True)[0]
    assert {(reading.values | reading.unreadable)[name] for name in PCIE} == rates


@pytest.mark.parametrize(
    ("lines", "reasons"),
    [((), ()), (("reasons 0x5",), ("gpu_idle", "sw_power_cap")), (("reasons 0x20",), ("sw_thermal_slowdown",)),
     (("reasons 0x88",), ("hw_slowdown", "hw_power_brake_slowdown"))],
)  # fmt: skip
def test_reasons_have_names(lines, reasons, gpu_host):
    gpu_host("A", *lines)
    assert read()[0].reasons == reasons


@pytest.mark.parametrize(
    ("listed", "pids", "shared"),
    [((7,), (7,), False), ((7, 8), (7, 8, 9), False), ((7, 8), (7,), True), ((8,), (7,), None), ((), (7,), None)],
)
def test_who_else_computes_on_a_gpu(listed, pids, shared, gpu_host):
    """The answer is unknown if NVML lists no own process: process ids in a container are not those of its host."""
    gpu_host("A", *(f"process {pid}" for pid in listed))
    reading = read(pids=pids)[0]
    assert reading.shared is shared
    assert ("shared" in reading.unreadable) == (shared is None)


def test_somebody_else_s_gpu_that_is_too_hot(gpu_host):
    gpu_host("C")
    first, second, third = read([0, 1, 2], [4242]).values()
    assert first.reasons == ("hw_slowdown", "hw_thermal_slowdown")
    assert (first.shared, second.shared, third.shared) == (False, None, None)
    assert (second.reasons, third.reasons) == ((), ())


@pytest.mark.parametrize(
    ("lines", "devices", "why"),
    [
        (("gpu 2", "fails all GPU_IS_LOST"), (2,), "GPU 2 cannot be read: GPU is lost"),
        ((), (9,), "NVML does not list it"),
    ],
)
def test_a_device_that_is_not_there_is_said(lines, devices, why, gpu_host):
    gpu_host("A", *lines)
    readings = read([0, *devices])
    assert set(readings[0].values) == ALL
    assert readings[devices[0]].unreadable == {"device": why}


def test_without_a_driver_that_is_said(gpu_host):
    gpu_host("A", STAND_IN_NVML="/nowhere")
    assert "Driver Not Loaded" in read()[0].unreadable["device"]


def test_no_device_asks_nobody(gpu_host):
    calls = gpu_host("A")
    assert read([]) == {}
    assert not calls.exists()
