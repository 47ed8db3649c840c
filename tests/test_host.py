import json

import pynvml
import pytest

from conftest import FakeNVML
from samebits import host


def test_facts_are_stable_and_plain():
    facts = host.host_facts()
    assert json.loads(json.dumps(facts)) == facts == host.host_facts()
    assert facts["torch"]
    assert facts["cpu"]["cores"] >= 1
    assert len(host.fingerprint(facts)) == 12


def test_a_changed_driver_changes_the_fingerprint():
    facts = host.host_facts()
    assert host.fingerprint(facts) != host.fingerprint({**facts, "driver": "600.1"})


def test_gpus_are_told_by_nvml_and_gaps_are_said(monkeypatch):
    nvml = FakeNVML(monkeypatch)
    facts = host.host_facts({})
    first, second = facts["gpus"]
    assert first == {"name": "NVIDIA Test", "memory_gib": 80.0, "compute_capability": "9.0", "gpu_cores": 6912,
                     "multiprocessors": 108}  # fmt: skip
    assert second["memory_gib"] == "unavailable: Not Supported"
    assert (facts["driver"], facts["gpus_unavailable"]) == ("580.1", None)
    assert nvml.shut_down == 1


@pytest.mark.parametrize(("devices", "count"), [(None, 2), ("1", 1), ("", 0)])
def test_gpus_are_counted_as_cuda_would_see_them(devices, count, monkeypatch):
    FakeNVML(monkeypatch)
    setting = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    assert host.count_gpus(setting) == count
    assert len(host.host_facts(setting)["gpus"]) == count


def test_a_cpu_build_of_torch_has_no_gpus(monkeypatch):
    FakeNVML(monkeypatch)
    monkeypatch.setattr(host, "torch_build", lambda: {"version": "2.13.0+cpu", "cuda": None})
    assert host.count_gpus({}) == 0


def test_the_build_of_torch_without_importing_it():
    import torch

    assert host.torch_build() == {"version": torch.__version__, "cuda": torch.version.cuda}


def test_the_driver_is_told_whatever_torch_was_built_for(monkeypatch):
    FakeNVML(monkeypatch)
    monkeypatch.setattr(host, "torch_build", lambda: {"version": "2.13.0+cpu", "cuda": None})
    facts = host.driver_facts({"CUDA_VISIBLE_DEVICES": "1"})
    assert (facts["driver"], facts["cuda"], facts["problem"]) == ("580.1", "13.0", None)
    assert [gpu["memory_gib"] for gpu in facts["gpus"]] == ["unavailable: Not Supported"]


def test_a_host_without_a_driver_says_why(monkeypatch):
    nvml = FakeNVML(monkeypatch)
    nvml.init_error = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    facts = host.driver_facts({})
    assert (facts["gpus"], facts["driver"]) == ([], None)
    assert "NVML Shared Library Not Found" in facts["problem"]
    assert (host.gpu_peers({}), host.gpu_links({})) == ([], [])


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (pynvml.NVML_P2P_STATUS_OK, True),
        (pynvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED, False),
        (None, "unavailable: Not Supported"),
    ],
)
def test_pairs_of_gpus(status, expected, monkeypatch):
    nvml = FakeNVML(monkeypatch, gpus=3)
    nvml.p2p = {pynvml.NVML_P2P_CAPS_INDEX_WRITE: status, pynvml.NVML_P2P_CAPS_INDEX_NVLINK: pynvml.NVML_P2P_STATUS_OK}
    pairs = host.gpu_peers({})
    assert [pair["gpus"] for pair in pairs] == [(0, 1), (0, 2), (1, 2)]
    assert [(pair["access"], pair["nvlink"]) for pair in pairs] == [(expected, True)] * 3
    assert host.gpu_peers({"CUDA_VISIBLE_DEVICES": "2"}) == []


def test_links_that_are_up_are_counted(monkeypatch):
    nvml = FakeNVML(monkeypatch)
    nvml.links = {0: [1, 1, 0], 1: []}
    assert host.gpu_links({}) == [2, 0]
