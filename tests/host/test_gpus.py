"""Facts of the visible GPUs, by the stand-in for NVML."""

import pytest

from samebits import host
from samebits.host import DriverFacts


def test_gaps_are_said(gpu_host):
    gpu_host("D", "gpu 1", "fails memory NOT_SUPPORTED", "fails cores UNKNOWN")
    first, second = host.driver_facts().gpus
    assert first == host.Gpu(name="Tesla T4", memory_gib=15.0, compute_capability="7.5", gpu_cores=2560)
    assert (second.memory_gib, second.gpu_cores) == ("unavailable: Not Supported", "unavailable: Unknown Error")


@pytest.mark.parametrize(("ask", "cuda"), [(False, None), (True, "13.0")])
def test_the_driver_is_told_whatever_torch_was_built_for(ask, cuda, gpu_host):
    gpu_host("A", cuda=None, devices="1")
    facts = host.driver_facts(ask_cuda=ask)
    assert facts == DriverFacts(driver="580.95.05", cuda=cuda, gpus=facts.gpus)
    assert [gpu.name for gpu in facts.gpus] == ["NVIDIA A100-SXM4-80GB"]


def test_a_driver_that_keeps_its_cuda_to_itself(gpu_host):
    gpu_host("A", "cuda 0.0")
    assert host.driver_facts(ask_cuda=True).cuda is None


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ((), (True, False)),
        (("p2p_write 1",), (False, False)),
        (("p2p_nvlink 0",), (True, True)),
        (("fails p2p NOT_SUPPORTED",), ("unavailable: Not Supported",) * 2),
    ],
)
def test_pairs_of_gpus(lines, expected, gpu_host):
    gpu_host("D", "gpus 1", "p2p_nvlink 1", "gpu 0", "p2p_write 0", *lines, "gpu 1", "p2p_write 0", *lines)
    pairs = host.gpu_peers()
    assert [pair.gpus for pair in pairs] == [(0, 1), (0, 2), (1, 2)]
    assert [(pair.access, pair.nvlink) for pair in pairs] == [expected] * 3
    assert host.gpu_peers({"CUDA_VISIBLE_DEVICES": "2"}) == []


@pytest.mark.parametrize(
    ("name", "lines", "links"),
    [("A", ("gpu 3", "nvlinks 10"), [12, 12, 12, 10]), ("B", (), [0]), ("E", (), [0])],
)
def test_links_that_are_up_are_counted(name, lines, links, gpu_host):
    gpu_host(name, *lines)
    assert host.gpu_links() == links


COUNTERS = {
    "memory_usage_percentage": 0.4,
    "memory_usage_megabytes": 99.6,
    "utilization_percentage": 0.0,
    "power_usage_watts": 9.0,
    "temperature_celsius": 41.0,
    "sm_clock_mhz": 300.0,
}


@pytest.mark.parametrize(
    ("name", "lines", "left_out"),
    [
        ("D", ("gpu 0", "used_mib 95", "milliwatts 9000"), set()),
        ("D", ("gpu 0", "used_mib 95", "fails power NOT_SUPPORTED"), {"power_usage_watts"}),
        ("D", ("gpu 0", "used_mib 95", "fails utilization UNKNOWN", "fails clock NOT_SUPPORTED"),
         {"utilization_percentage", "sm_clock_mhz"}),
        ("D", ("gpu 0", "fails all GPU_IS_LOST"), set(COUNTERS)),
    ],
)  # fmt: skip
def test_a_counter_that_cannot_be_read_is_left_out(name, lines, left_out, gpu_host):
    gpu_host(name, *lines, "memory_mib 23750")
    expected = {f"gpu_0_{key}": pytest.approx(value, abs=0.1) for key, value in COUNTERS.items() if key not in left_out}
    counters = host.gpu_counters([0, 1, 9])
    assert {key: value for key, value in counters.items() if key.startswith("gpu_0")} == expected
    assert counters["gpu_1_temperature_celsius"] == 41.0
    assert not [key for key in counters if key.startswith("gpu_9")]


def test_the_counters_of_a_slice_are_its_own(gpu_host):
    """Counters of the whole GPU contain the work of others."""
    gpu_host("E")
    assert host.gpu_counters([0, 1]) == {
        "gpu_0_memory_usage_percentage": 0.2,
        "gpu_0_memory_usage_megabytes": pytest.approx(99.6, abs=0.1),
    }


def test_telemetry_goes_on_beside_a_dead_gpu(gpu_host):
    from samebits.tracking.sender import Telemetry

    gpu_host("A", "gpu 2", "fails all GPU_IS_LOST")
    telemetry = Telemetry([0, 2, 3], seconds=60)
    telemetry.sample()
    sampled = {point.key for point in telemetry.points}
    assert {"system/gpu_0_power_usage_watts", "system/gpu_3_power_usage_watts"} <= sampled
    assert not [key for key in sampled if "gpu_2" in key]
