import json
from types import SimpleNamespace

import pynvml
import pytest

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


class FakeNVML:
    """Stands in for NVML on a host without GPUs: two GPUs, one of which cannot tell its memory."""

    NVMLError = pynvml.NVMLError

    def __init__(self, monkeypatch):
        self.shut_down = 0
        monkeypatch.setattr(host, "pynvml", self)
        monkeypatch.setattr(host, "torch_build", lambda: {"version": "2.13.0+cu130", "cuda": "13.0"})
        monkeypatch.setattr(host, "_multiprocessors", lambda gpus: [108] * gpus)

    def nvmlInit(self):
        pass

    def nvmlShutdown(self):
        self.shut_down += 1

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle}"

    def nvmlSystemGetDriverVersion(self):
        return "580.1"

    def nvmlDeviceGetName(self, handle):
        return b"NVIDIA Test"

    def nvmlDeviceGetMemoryInfo(self, handle):
        if handle == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(total=80 * 2**30)

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return (9, 0)

    def nvmlDeviceGetNumGpuCores(self, handle):
        return 6912


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
