"""The facts of a host, as host.json has them."""

import json
import os

import pytest

from samebits import host
from samebits.errors import HostError
from samebits.host import facts


def test_facts_are_stable_and_plain():
    known = host.host_facts()
    plain = json.loads(json.dumps(known.model_dump(mode="json")))
    assert host.HostFacts.model_validate(plain) == known == host.host_facts()
    assert known.torch
    assert known.cpu.cores >= 1
    assert len(known.fingerprint) == 12


def test_a_changed_driver_changes_the_fingerprint():
    known = host.host_facts()
    assert known.fingerprint != known.model_copy(update={"driver": "600.1"}).fingerprint


@pytest.mark.skipif("STAND_IN_CUDA" in os.environ, reason="this session is told of another build: python -m nvml")
def test_the_build_of_torch_without_importing_it():
    import torch

    assert host.torch_build() == (torch.__version__, torch.version.cuda, torch.version.hip)


def test_gpus_are_told_by_nvml_and_multiprocessors_by_torch(gpu_host):
    gpu_host("A")
    known = host.host_facts()
    a100 = host.Gpu(
        name="NVIDIA A100-SXM4-80GB", memory_gib=80.0, compute_capability="8.0", gpu_cores=6912, multiprocessors=108
    )
    assert known.gpus == (a100,) * 4
    assert (known.driver, known.gpus_unavailable) == ("580.95.05", None)


@pytest.mark.parametrize(
    ("devices", "count"),
    [(None, 1), ("MIG-00000001-0000-5000-8000-000000000001", 1), ("0", 1), ("", 0), ("0,1", 1)],
)
def test_a_slice_is_one_gpu_with_its_own_name_and_memory(devices, count, gpu_host):
    """NVML lists two GPUs, of which CUDA shows one slice."""
    gpu_host("E", devices=devices)
    known = host.host_facts()
    assert [(gpu.name, gpu.memory_gib, gpu.multiprocessors) for gpu in known.gpus] == [
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 39.5, 108)
    ] * count
    assert all(str(gpu.gpu_cores).startswith("unavailable") for gpu in known.gpus)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("The NVIDIA driver on your system is too old (found version 12040).\nMore."), "too old"),
        (RuntimeError("cudaGetDeviceCount(): Error 802: system not yet initialized"), "Error 802"),
        (AssertionError("Invalid device id"), "Invalid device id"),
        (OSError("libcudart.so.13: cannot open shared object file"), "libcudart"),
    ],
)
def test_what_torch_says_when_cuda_does_not_start_is_one_line(error, said, gpu_host, monkeypatch):
    def fail(gpus):
        raise error

    gpu_host("D")
    monkeypatch.setattr(facts, "_multiprocessors", fail)
    with pytest.raises(HostError, match=f"torch cannot use the 2 GPUs that the driver shows: .*{said}") as caught:
        host.host_facts()
    assert "TORCH=cpu" in caught.value.hint
    assert "More" not in str(caught.value)


def test_a_call_that_torch_had_put_off_is_told_by_its_own_error(gpu_host, monkeypatch):
    """``torch.cuda`` raises it, with many lines, if CUDA starts and a GPU does not."""
    import torch

    def fail(index):
        text = "CUDA call failed lazily at initialization with error: CUDA error: out of memory\n\nCUDA call was ..."
        raise torch.cuda.DeferredCudaCallError(text) from RuntimeError("CUDA error: out of memory\nCompile with ...")

    real = facts._multiprocessors
    gpu_host("B")
    monkeypatch.setattr(facts, "_multiprocessors", real)
    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    with pytest.raises(HostError) as caught:
        host.host_facts()
    assert caught.value.message == "torch cannot use the 1 GPU that the driver shows: CUDA error: out of memory"
    assert caught.value.hint == "`samebits doctor` tries each GPU; make repro TORCH=cpu uses none"


def test_the_real_torch_of_the_cpu_under_a_gpu_host(gpu_host, monkeypatch):
    """The CUDA part of ``host_facts`` is the real one, in a torch without CUDA."""
    import torch

    real = facts._multiprocessors
    gpu_host("B")
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    monkeypatch.setattr(facts, "_multiprocessors", real)
    with pytest.raises(HostError, match="the 1 GPU that the driver shows: Torch not compiled with CUDA enabled"):
        host.host_facts()


def test_a_gpu_that_is_lost_ends_no_training_that_uses_none(gpu_host):
    gpu_host("A", "gpu 2", "fails all GPU_IS_LOST", cuda=None)
    known = host.host_facts()
    assert (known.gpus, known.gpus_unavailable) == ((), "GPU 2 cannot be read: GPU is lost")


QUOTA_V1 = {"cpu.cfs_quota_us": "150000", "cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("cgroup", "files", "cores"),
    [
        ("", {}, None),
        ("0::/job\n", {"job": {"cpu.max": "max 100000"}}, None),
        ("0::/job\n", {"job": {"cpu.max": "100000 100000"}}, 1),
        ("0::/job/step\n", {"job": {"cpu.max": "100000 100000"}, "job/step": {"cpu.max": "max 100000"}}, 1),
        ("0::/what/the/host/says\n", {".": {"cpu.max": "150000 100000"}}, 1),
        ("0::/job\n", {"job": {"cpu.max": "1000 100000"}}, 1),  # less than one
        ("4:cpu,cpuacct:/job\n0::/\n", {"cpu,cpuacct/job": QUOTA_V1}, 1),
        ("4:cpu:/job\n", {"cpu/job": {**QUOTA_V1, "cpu.cfs_quota_us": "-1"}}, None),
        ("4:memory:/job\n", {"memory/job": QUOTA_V1}, None),
    ],
)
def test_cores_are_those_that_the_lowest_quota_leaves(cgroup, files, cores, kernel):
    assert host.count_cores(**kernel(cgroup, files)) == (cores or len(os.sched_getaffinity(0)))


def test_a_processor_that_linux_does_not_describe(monkeypatch):
    def missing(path, *arguments, **options):
        raise FileNotFoundError(path)

    monkeypatch.setattr(facts.Path, "read_text", missing)
    cpu = facts._cpu()
    assert (cpu.instruction_sets, cpu.machine) == ((), facts.platform.machine())
    assert cpu.cores == len(os.sched_getaffinity(0))
