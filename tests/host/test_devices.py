"""The devices that CUDA would show, and errors before a training starts, by the stand-in for NVML."""

import os
import shutil
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

from conftest import ROOT
from samebits import host
from samebits.errors import HostError
from samebits.host.devices import ListedGpu, visible
from samebits.params import parse_params
from samebits.strategies.placement import Devices
from samebits.training.placement import place

A_SLICE = "MIG-00000001-0000-5000-8000-000000000000"
LOST = ("gpu 2", "fails all GPU_IS_LOST")
OLD = ("driver 550.54.14", "cuda 12.4")


# -- CUDA_VISIBLE_DEVICES ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, [0, 1, 2]), ("", []), ("1", [1]), ("2,0", [2, 0]), ("0,9,1", [0]), ("-1", []), ("0,0", []),
        ("GPU-b", [1]), ("GPU-", []), ("GPU-c, GPU-a", [2, 0]), ("x", []), ("MIG-1", []), ("1,MIG-1,2", [1]),
    ],
)  # fmt: skip
def test_whole_gpus(setting, expected):
    gpus = [ListedGpu(f"GPU-{letter}") for letter in "abc"]
    assert visible(gpus, setting) == [(index, None) for index in expected]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, [(1, 0)]), ("", []), ("MIG-x", [(1, 0)]), ("MIG-y", [(1, 1)]), ("MIG-", []), ("MIG-y,MIG-x", [(1, 1)]),
        ("1", [(1, 0)]), ("GPU-b", [(1, 0)]), ("0", [(0, None)]), ("0,1", [(1, 0)]), ("0,MIG-y", [(1, 1)]),
        ("2", []), ("2,0", [(0, None)]), ("MIG-gone", []), ("MIG-y,MIG-y", []),
    ],
)  # fmt: skip
def test_slices_and_whole_gpus(setting, expected):
    """One whole GPU, one with two slices, and one in MIG mode without slices."""
    gpus = [ListedGpu("GPU-a"), ListedGpu("GPU-b", dict.fromkeys(["MIG-x", "MIG-y"])), ListedGpu("GPU-c", {})]
    assert visible(gpus, setting) == expected


# -- the hosts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "lines", "devices", "count"),
    [
        ("A", (), None, 4),
        ("B", (), None, 1),
        ("C", (), "2,3", 2),
        ("C", (), "", 0),
        ("D", (), None, 2),
        ("E", (), None, 1),
        ("E", (), A_SLICE, 1),
        ("E", (), f"{A_SLICE},MIG-00000000", 1),
        ("F", (), None, 2),
        ("F", (), "0,1", 2),  # as Slurm sets it, counted among those of the job
        ("A", LOST, "0,1", 2),
        ("A", LOST, "GPU-00000003,GPU-00000001", 2),
    ],
)
def test_gpus_are_counted_as_cuda_would_show_them(name, lines, devices, count, gpu_host):
    gpu_host(name, *lines, devices=devices)
    assert host.count_gpus() == host.count_visible() == len(host.driver_facts().gpus) == count
    placement, _ = place("ddp", parse_params({}), "fast", Devices(gpus=host.count_gpus(), cores=2))
    assert (placement.device_type, placement.num_devices) == ("cuda" if count else "cpu", count or 2)


@pytest.mark.parametrize(
    ("lines", "devices", "message"),
    [
        (LOST, None, "GPU 2 cannot be read: GPU is lost"),
        (("gpu 2", "fails uuid UNKNOWN"), "2", "GPU 2 cannot be read: Unknown Error"),
        (LOST, "0,2", "GPU 2 cannot be read: GPU is lost"),
    ],
)
def test_a_gpu_that_is_dead_and_chosen_is_named(lines, devices, message, gpu_host):
    gpu_host("A", *lines, devices=devices)
    with pytest.raises(HostError, match=message) as caught:
        host.count_gpus()
    assert "nvidia-smi -L" in caught.value.hint
    assert host.count_present() == 4


@pytest.mark.parametrize(
    ("name", "lines", "devices", "uuids"),
    [
        ("D", (), None, ["GPU-00000000", "GPU-00000001"]),
        ("D", (), "1", ["GPU-00000001"]),
        ("E", (), A_SLICE, [A_SLICE[:12]]),
        ("A", LOST, "2,3", ["", "GPU-00000003"]),
    ],
)
def test_devices_have_names(name, lines, devices, uuids, gpu_host):
    gpu_host(name, *lines, devices=devices)
    found = host.visible_uuids()
    assert [uuid[: len(start)] for uuid, start in zip(found, uuids, strict=True)] == uuids


def test_gpus_that_cannot_be_counted_are_told(gpu_host):
    gpu_host("A", "count_fails UNKNOWN")
    with pytest.raises(HostError) as caught:
        host.count_gpus()
    assert str(caught.value) == "GPUs cannot be counted: Unknown Error. hint: see what nvidia-smi says"


def test_a_cpu_build_of_torch_has_no_gpus(gpu_host):
    gpu_host("A", cuda=None)
    assert (host.count_gpus(), host.count_visible()) == (0, 4)


def test_a_build_for_rocm_has_no_gpus(gpu_host):
    gpu_host("A", cuda=None, STAND_IN_HIP="7.1")
    build = host.torch_build()
    assert (build.cuda, build.hip, host.count_gpus()) == (None, "7.1", 0)


def test_hidden_gpus_are_hidden_from_rocm_too(monkeypatch):
    """torch's own count for each; a ROCm library takes an empty list for none given."""
    monkeypatch.setattr(os, "environ", {"HIP_VISIBLE_DEVICES": "0,1", "ROCR_VISIBLE_DEVICES": "3"})
    host.hide_gpus()
    assert all(value.startswith("-") for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES")
    for hip in (None, "7.1"):
        monkeypatch.setattr(torch.version, "hip", hip)
        assert torch.cuda._parse_visible_devices() == []


def test_a_host_without_a_driver(gpu_host):
    gpu_host("A", STAND_IN_NVML="/nowhere")
    assert (host.count_gpus(), host.count_visible(), host.count_present()) == (0, 0, 0)
    assert "Driver Not Loaded" in host.driver_facts().problem
    assert (host.gpu_peers(), host.gpu_links(), host.gpu_counters([0]), host.caution()) == ([], [], {}, None)


def test_a_driver_that_does_not_answer_is_no_host_without_one(gpu_host):
    """Otherwise trainings would silently use the CPU, in a container in the middle of a pipeline."""
    gpu_host("A", "init_fails UNKNOWN")
    with pytest.raises(HostError, match="the NVIDIA driver here does not answer: NVMLError_Unknown: Unknown Error"):
        host.count_gpus()
    gpu_host("A", "init_fails UNKNOWN", devices="")
    assert host.count_gpus() == 0
    gpu_host("A", "init_fails UNKNOWN", cuda=None)
    assert (host.count_gpus(), host.driver_facts().silent) == (0, True)
    gpu_host("A", "init_fails DRIVER_NOT_LOADED")
    assert (host.count_gpus(), host.driver_facts().silent) == (0, False)


@pytest.mark.parametrize(
    ("name", "lines", "may"),
    [("A", (), True), ("A", ("gpu 1", "mode exclusive"), False), ("E", (), True)],
)
def test_whether_processes_may_share_gpus(name, lines, may, gpu_host):
    gpu_host(name, *lines)
    assert host.may_share_gpus() == may


# -- an older driver ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "cuda", "fits"),
    [
        (OLD, "13.0", False),
        (OLD, "12.8", True),  # the same major version is enough
        (("driver 580.65.06", "cuda 13.0"), "13.2", True),
        (("driver 550.54.14", "cuda 13.0"), "13.0", True),  # with NVIDIA's package for forward compatibility
        (("driver 470.1", "cuda 11.4"), "12.8", False),
        (OLD, "14.0", True),  # not known here: torch will tell
        ((*OLD, "driver of somebody's own"), "13.0", True),  # no number, so that torch will tell
        ((*OLD, "driver_fails UNKNOWN"), "13.0", True),
    ],
)
def test_the_driver_is_compared_with_torchs_cuda(lines, cuda, fits, gpu_host):
    gpu_host("B", *lines, cuda=cuda)
    driver, newest = lines[0].split()[1], lines[1].split()[1]
    text = rf"built for CUDA {cuda}, and driver {driver} runs up to CUDA {newest}"
    hint = r"make repro TORCH=cpu, or install a driver from \d+ on, or a torch for an older CUDA, by samebits's docs"
    with nullcontext() if fits else pytest.raises(HostError, match=rf"{text}.* hint: {hint}"):
        assert host.count_gpus() == 1


def test_an_older_driver_matters_to_nobody_who_hides_its_gpus(gpu_host):
    gpu_host("B", *OLD, devices="")
    assert host.count_gpus() == 0


@pytest.mark.parametrize("script", ["host", "train"])
def test_an_older_driver_ends_a_stage_in_one_line(script, stage, gpu_host):
    gpu_host("B", *OLD)
    shutil.copy(ROOT / "params.yaml", stage.folder)
    done = stage.fresh(script, *(["--strategy", "single"] if script == "train" else []))
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("error: torch ")
    assert "driver 550.54.14 runs up to CUDA 12.4. hint: install PyTorch's build for CPUs, or " in done.stderr
    assert done.stderr.count("\n") == 1


# -- what may not happen in a process that forks -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "from samebits import host; host.count_gpus(), host.count_visible(), host.caution(), host.gpu_counters([0])",
        "from samebits import host; assert host.driver_facts(ask_cuda=True).cuda == '13.0'",
        "from samebits.doctor.checks import host_findings; from pathlib import Path\n"
        "assert len(list(host_findings(Path('params.yaml')))) > 12",
    ],
)
def test_the_drivers_cuda_is_asked_for_in_another_process(code, gpu_host, tmp_path):
    """NVML opens CUDA's library to answer."""
    calls = gpu_host("A")
    command = [sys.executable, "-c", f"{code}\nimport os; print(os.getpid())"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ)
    assert done.returncode == 0, done.stderr
    process = done.stdout.split()[-1]
    lines = [line.split() for line in calls.read_text().splitlines()]
    assert {"nvmlInitWithFlags", "nvmlDeviceGetUUID"} <= {function for pid, function in lines if pid == process}
    assert [pid for pid, function in lines if function == "nvmlSystemGetCudaDriverVersion" and pid == process] == []


ASKING = """
import os
from samebits import host

def ask():
    host.caution(), host.count_visible(), host.allowed_gpus(), host.count_gpus(), host.visible_uuids()

ask()
if os.fork() == 0:
    ask()
    os._exit(0)
os.wait()
ask()
print(os.getpid())
"""


def test_the_driver_is_opened_once_and_by_each_process_for_itself(gpu_host, tmp_path):
    """Without persistence mode, each opening may take seconds. What a fork inherits of NVML is its parent's."""
    gpu_host("A")
    calls = tmp_path / "calls-of-these"  # pytest's own process may call NVML beside them
    environ = {**os.environ, "STAND_IN_NVML_LOG": str(calls)}
    done = subprocess.run([sys.executable, "-c", ASKING], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    parent, users, opened = done.stdout.strip(), {}, []
    for process, function in map(str.split, calls.read_text().splitlines()):
        if function in ("nvmlInitWithFlags", "nvmlShutdown"):
            users[process] = users.get(process, 0) + (1 if function == "nvmlInitWithFlags" else -1)
            if users[process] == 1 and function == "nvmlInitWithFlags":
                opened.append(process)
                assert process == parent or users[parent] == 0
    assert [process == parent for process in opened] == [True, False, True]


# -- what CUDA_VISIBLE_DEVICES and MIG take away -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "devices", "text"),
    [
        ("A", None, None),
        ("A", "", None),
        ("A", "-1", None),
        ("A", "1,3", None),
        ("A", "7", "CUDA_VISIBLE_DEVICES is 7, which names no GPU of the 4 here: trainings run on the CPU"),
        ("A", "1,1", "CUDA_VISIBLE_DEVICES is 1,1, which names a GPU twice: trainings run on the CPU"),
        ("A", "0, 9,1", "CUDA_VISIBLE_DEVICES is 0, 9,1: CUDA takes what stands before '9', which names no GPU here"),
        ("E", "MIG-gone", "CUDA_VISIBLE_DEVICES is MIG-gone, which names no GPU of the 2 here"),
        ("E", A_SLICE, None),
        ("E", f"{A_SLICE},MIG-00000000", "one slice of a GPU (MIG), and the first of 2 is taken"),
        ("E", None, "one slice of a GPU (MIG), and the first of 4 is taken"),
        ("A in MIG mode", None, "the 4 GPUs here can be used in slices alone (MIG), and there are none"),
    ],
)
def test_what_is_taken_away_is_said(name, devices, text, gpu_host):
    gpu_host(name[0], *["mig on"] * (len(name) > 1), devices=devices)
    found = host.caution()
    assert (found is None) == (text is None)
    if found and text:
        assert text in found[0]
        assert "nvidia-smi " in found[1]
