"""Readings of real GPUs beside a training, and their roof."""

import os
import time
from contextlib import closing

import pytest
import torch

from conftest import small
from samebits.host import TOTALS, GpuMeters
from samebits.measuring.roofline import multiply_fast

pytestmark = pytest.mark.gpus(1)


def test_what_nvml_reads_of_the_first_gpu():
    with closing(GpuMeters([0])) as meters:
        first = meters.read([os.getpid()], slow=True)[0]
        time.sleep(1.0)
        last = meters.read([os.getpid()])[0]
    assert "device" not in first.unreadable
    assert first.values["memory_used_mib"] > 0  # of a slice too
    print(first)
    for name in TOTALS:
        if name in first.values:
            assert last.values[name] >= first.values[name]
    if "energy_j" in first.values:
        watts = last.values["energy_j"] - first.values["energy_j"]
        assert 1 < watts < 2000


@pytest.mark.cuda_here
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_roof_of_a_gpu(dtype):
    device = torch.device("cuda", 0)
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) < (8, 0):
        pytest.skip("this GPU has no tensor cores for bf16, and may refuse such products")
    torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)  # CUDA's start
    began = time.perf_counter()
    best = multiply_fast(device, dtype)
    seconds = time.perf_counter() - began
    print(f"{dtype}: {best / 1e12:.0f} TFLOP/s in {seconds:.2f} s")
    assert 0.5e12 < best < 5e15


def test_the_usage_of_a_training(stage, data_dir):
    raw = small(repeats=2)
    raw["data"]["num_samples"] = 64 * 4000
    params = stage.write_params(raw)
    usage = stage.train_fresh(data_dir(params), "single").record.usage
    (device,) = usage.training.devices
    assert device.readings >= 1
    assert "memory_used_mib" in device.counters
    assert (usage.training.energy_j is None) == bool(usage.training.energy_unavailable)
    assert usage.roof.problem is None
    assert usage.roof.flops_per_step > 0
    assert usage.roof.roof_flops > 0.5e12
    assert 0 < usage.sampler_share < 1
    assert device.shared is None or 0 <= device.shared <= 1
