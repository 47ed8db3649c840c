"""What `samebits doctor` finds, by check; models with a mistake go through the command line."""

import base64
import json
import os
import resource
import runpy
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from contextlib import nullcontext, suppress
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from conftest import ROOT, needs_root, small
from patience import patient
from samebits import host
from samebits.doctor import machine, model, model_trial, repository, software
from samebits.doctor import store as mlflow_store
from samebits.doctor.checks import visit
from samebits.doctor.finding import Finding, check, ok
from samebits.doctor.store import store
from samebits.errors import HostError, Interrupted, UserError
from samebits.models.experiment import Experiment, attach, is_carried
from samebits.params import parse_params
from samebits.records.log import EndEvent
from samebits.strategies.placement import Devices
from samebits.tracking.delivery import State
from samebits.tracking.store import tracking_uri
from samebits.training.models import attributes
from samples import GPU
from standins import Handler, commit_all, git, raising, serving

GIB = 2**30
CPU = host.TorchBuild(version="2.13.0+cpu", cuda=None)
CUDA = host.TorchBuild(version="2.13.0+cu130", cuda="13.0")
ROCM = host.TorchBuild(version="2.13.0+rocm7.1", cuda=None, hip="7.1")
CUDA_12 = host.TorchBuild(version="2.13.0+cu126", cuda="12.6")
NO_DRIVER = host.DriverFacts(problem="NVML Shared Library Not Found")
SILENT = host.DriverFacts(problem="NVMLError_Unknown: Unknown Error", silent=True)


def nvidia(cuda="13.0", gpus=2, **changed):
    return host.DriverFacts(driver="580.1", cuda=cuda, gpus=[host.Gpu(**{**GPU, **changed})] * gpus)


def one(found):
    assert len(found) == 1, found
    return found[0]


def expect(finding, status, text, hint=None):
    assert finding.status == status, finding
    assert text in finding.text, finding
    assert (finding.hint is not None) == (status in ("warning", "failed"))
    if hint:
        assert hint in finding.hint, finding


# -- a check never raises --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "text", "hint", "code"),
    [
        (ZeroDivisionError("by zero.\nmore"), "the check itself broke: ZeroDivisionError: by zero", "report it", 3),
        (UserError("wrong", hint="mend it"), "wrong", "mend it", 2),
        (HostError("too small", hint="buy one"), "too small", "buy one", 3),
    ],
)
def test_an_exception_in_a_check_is_a_finding(error, text, hint, code):
    @check("thing")
    def thing():
        raise error

    finding = one(thing())
    assert (finding.name, finding.text, finding.exit_code) == ("thing", text, code)
    expect(finding, "failed", text, hint)


def test_a_finding_is_printable():
    finding = Finding(name="thing", status="warning", text="a\x1b[2J\x9bb\nc", hint="run \x07")
    assert (finding.text, finding.hint) == (r"a\x1b[2J\x9bb c", r"run \x07")


def test_a_failure_without_a_hint_cannot_be_made():
    with pytest.raises(AssertionError):
        Finding(name="thing", status="warning", text="text")
    with pytest.raises(AssertionError):
        Finding(name="thing", status="failed", text="text", hint="hint")  # without an exit code


# -- Python, packages, torch -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "status"), [("3.10.9", "failed"), ("3.11.0", "ok"), ("3.14.0", "failed")])
def test_python(version, status, monkeypatch):
    monkeypatch.setattr(software.platform, "python_version", lambda: version)
    expect(one(software.python()), status, version, "make .venv PYTHON=" if status == "failed" else None)


def test_the_gpu_lock_has_no_torch_but_cudas():
    pins = [line for line in (ROOT / "requirements.gpu.lock").read_text().splitlines() if line.startswith("torch==")]
    assert len(pins) == 1
    assert "+cpu" not in pins[0]
    assert ";" not in pins[0]  # for every Python


def test_whether_exact_has_compiled_kernels_is_told(monkeypatch, tmp_path):
    expect(one(software.kernels()), "ok", "exact has compiled kernels on a CPU")
    monkeypatch.setenv("SAMEBITS_KERNELS", "python")
    expect(one(software.kernels()), "warning", "SAMEBITS_KERNELS is set to python", "unset it")
    monkeypatch.delenv("SAMEBITS_KERNELS")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    package = tmp_path / "site" / "ziglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("raise SystemExit('no such processor')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")]))
    finding = one(software.kernels())
    why = "ziglang cc cannot compile the kernels of exact: no such processor"
    expect(finding, "warning", why, "install gcc or clang, or pip install ziglang")
    assert finding.text.endswith(why)  # the hint stands in its own place
    expect(one(software.kernels(timeout=0.01)), "warning", "took longer than 0 s")


def test_the_locks_of_this_repository_are_what_is_installed():
    expect(one(software.locks(host.torch_build(), ROOT)), "ok", "packages are as requirements.")


NUMPY, CLICK = metadata.version("numpy"), metadata.version("click")
OTHER_SYSTEM = 'no-such-package==1 ; sys_platform == "win32" \\\n    --hash=sha256:00\n'


@pytest.mark.parametrize(
    ("lock", "status", "text"),
    [
        (f"numpy=={NUMPY} \\\n    --hash=sha256:00\nclick=={CLICK} \\\n    --hash=sha256:00\n", "ok", "2 packages are"),
        (f"# by hand\n{OTHER_SYSTEM}Click=={CLICK}\n", "ok", "1 packages are"),
        ("numpy==1.0 \\\n    --hash=sha256:00\n", "failed", f": numpy {NUMPY} for ==1.0"),
        ("no-such-package==1\n", "failed", "no-such-package is missing"),
        ("".join(f"no-such-{n}==1\n" for n in range(7)), "failed", "no-such-4 is missing and 2 more"),
        ("numpy=>1\n", "failed", "requirements.cpu.lock is damaged"),
    ],
)
def test_a_lock_against_what_is_installed(lock, status, text, tmp_path):
    (tmp_path / "requirements.cpu.lock").write_text(lock)
    expect(one(software.locks(CPU, tmp_path)), status, text)


def test_the_hint_about_another_version_depends_on_the_environment(tmp_path, monkeypatch):
    (tmp_path / "requirements.gpu.lock").write_text("numpy==1.0\n")
    expect(
        one(software.locks(CUDA, tmp_path)), "failed", "numpy", "make .venv TORCH=gpu, then .venv/bin/samebits doctor"
    )
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    expect(one(software.locks(CUDA, tmp_path)), "failed", "numpy", "rm -f .venv/.installed-*; make .venv TORCH=gpu")


@pytest.mark.parametrize(
    ("stamps", "build", "lock"),
    [([], CPU, "cpu"), ([], CUDA, "gpu"), (["gpu"], CPU, "gpu"), (["cpu", "gpu"], CUDA, "gpu")],
)
def test_the_lock_is_chosen_by_the_stamp_or_else_by_the_build(stamps, build, lock, tmp_path):
    (tmp_path / ".venv").mkdir()
    for stamp in stamps:
        (tmp_path / f".venv/.installed-{stamp}").touch()
    assert software.which_lock(build, tmp_path) == lock


@pytest.mark.parametrize(
    ("build", "driver", "status", "text", "hint"),
    [
        (CPU, NO_DRIVER, "ok", "a CPU build, and no GPU to use", None),
        (CPU, nvidia(gpus=0), "ok", "a CPU build, and no GPU to use", None),
        (CPU, nvidia(), "failed", "2.13.0+cpu is a CPU build, and the driver shows 2 GPUs", "make repro TORCH=gpu"),
        (ROCM, NO_DRIVER, "warning", "2.13.0+rocm7.1 is built for ROCm, which the kit does not use", "TORCH=cpu"),
        (CUDA, nvidia(), "ok", "for CUDA 13.0, driver 580.1 runs up to 13.0", None),
        (CUDA, nvidia("13.2"), "ok", "runs up to 13.2", None),
        (CUDA, nvidia("12.8"), "failed", "needs CUDA 13.0, driver 580.1 runs up to 12.8", "a driver for CUDA 13"),
        (CUDA, nvidia(None), "ok", "an unknown one", None),
        (CUDA, NO_DRIVER, "warning", "no driver answers: NVML Shared Library Not Found", "--gpus all"),
        (
            CUDA,
            SILENT,
            "failed",
            "2.13.0+cu130, and the NVIDIA driver here does not answer: NVMLError_Unknown",
            "a restart of",
        ),
        (
            CPU,
            SILENT,
            "warning",
            "does not answer: NVMLError_Unknown: Unknown Error; a CPU build does not use it",
            "nvidia-smi",
        ),
        (
            CUDA,
            nvidia(compute_capability="7.0"),
            "failed",
            "no kernels for GPU, of compute capability 7.0; it needs 7.5",
            "by ",
        ),
        (CUDA_12, nvidia("12.8", compute_capability="7.0"), "ok", "for CUDA 12.6", None),
        (CUDA, nvidia(compute_capability="unavailable: Unknown Error"), "ok", "for CUDA 13.0", None),
        (host.TorchBuild(version=None, cuda=None), nvidia(), "failed", "not installed", "make .venv"),
    ],
)
def test_torch_against_the_driver(build, driver, status, text, hint):
    expect(one(software.torch_against_driver(build, driver)), status, text, hint)


@pytest.mark.parametrize(
    ("probe", "status", "text"),
    [
        ("print('[null, null]')", "ok", "2 GPUs multiplied matrices"),
        ("print('noise\\n[null, \"no kernel image\"]')", "failed", "GPU 1: no kernel image"),
        ("print('[null]')", "failed", "torch finds 1 of 2 GPUs"),
        ("import sys; sys.exit('a library is missing')", "failed", "torch ended with 1: a library is missing"),
        ("import os; os.abort()", "failed", "torch ended with -6"),
        ("import time; time.sleep(3600)", "failed", "took longer than 2 s"),
    ],
)
def test_cuda_is_tried_in_a_process_of_its_own(probe, status, text, monkeypatch):
    monkeypatch.setattr(software, "PROBE", probe)
    expect(one(software.cuda(2, timeout=2 if "sleep" in probe else patient(120))), status, text)


MIG_TORCH = """
class ones(float):
    def __new__(cls, *shape, device):
        if device != "cuda:0":
            raise RuntimeError("CUDA error: invalid device ordinal")
        return float.__new__(cls, 64**3)
    __matmul__ = lambda one, other: one
    sum = lambda self: self
class cuda:
    count = 2
    is_available = lambda: True
    device_count = lambda: cuda.count
    def init():
        cuda.count = 1
"""


def test_the_real_probe_where_cuda_has_one_slice_of_two_gpus(tmp_path):
    """As torch counts: by NVML before CUDA has started, then by CUDA."""
    (tmp_path / "torch.py").write_text(MIG_TORCH)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    expect(one(software.cuda(1, environ=environ)), "ok", "1 GPU multiplied matrices")


TORCH_OF_TWO = """
class Numbers:
    def __init__(self, arrived=True):
        self.arrived = arrived
    __matmul__ = lambda one, other: one
    sum = lambda self: 64**3
    to = lambda self, device: Numbers(device != "cuda:ZEROS")
    cpu = lambda self: self
ones = arange = lambda *shape, device: Numbers()
equal = lambda one, other: one.arrived == other.arrived
class cuda:
    is_available = lambda: True
    device_count = lambda: 2
    init = lambda: None
"""


@pytest.mark.parametrize(
    ("zeros_on", "status", "text", "hint"),
    [
        ("1", "failed", "GPU 1: a copy from GPU 0 brought other numbers", "IOMMU"),
        ("0", "failed", "GPU 0: a copy from GPU 1 brought other numbers", "IOMMU"),
        ("none", "ok", "2 GPUs multiplied matrices and copied to each other", None),
    ],
)
def test_the_real_probe_where_zeros_arrive_from_another_gpu(zeros_on, status, text, hint, tmp_path):
    (tmp_path / "torch.py").write_text(TORCH_OF_TWO.replace("ZEROS", zeros_on))
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    expect(one(software.cuda(2, environ=environ)), status, text, hint)


def test_the_real_probe_on_a_host_where_torch_finds_nothing():
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    expect(one(software.cuda(1, environ=environ)), "failed", "torch finds 0 of 1 GPU", "nvidia-smi")
    expect(one(software.cuda(0)), "skipped", "no GPU")


# -- the machine -----------------------------------------------------------------------------------------------


def devices_found():
    return machine.devices(host.driver_facts().gpus)


NO_MEMORY = ("gpu 1", "fails memory NOT_SUPPORTED")
CHOSEN = "MIG-00000001-0000-5000-8000-000000000001"


@pytest.mark.parametrize(
    ("name", "lines", "chosen", "expected"),
    [
        ("D", ("used_mib 1536", *NO_MEMORY), None,
         [("gpu 0", "ok", "Tesla T4, 15.0 GiB"), ("gpu 1", "ok", "Tesla T4, memory unavailable: Not Supported")]),
        ("D", ("used_mib 7680", *NO_MEMORY), None,
         [("gpu 0", "warning", "50% of it and 0% of its time taken by others", "nvidia-smi"), ("gpu 1", "ok", "")]),
        ("D", ("utilization 98",), None, [("gpu 0", "warning", "98% of its time"), ("gpu 1", "warning", "98% of its")]),
        ("A", ("gpu 1", "name NVIDIA A100-PCIE-40GB"), "0,1",
         [("gpu 0", "ok", ""), ("gpu 1", "ok", ""), ("devices", "warning", "the GPUs differ", "CUDA_VISIBLE_DEVICES")]),
        ("A", (), "", [("devices", "ok", "CUDA_VISIBLE_DEVICES hides them")]),
        ("A", (), "9", [("devices", "warning", "which names no GPU of the 4 here", "nvidia-smi -L")]),
        ("A", (), "1,0", [("gpu 0", "ok", "80.0 GiB, GPU 1 of nvidia-smi"), ("gpu 1", "ok", ", GPU 0 of nvidia-smi")]),
        ("E", (), None,
         [("devices", "warning", "one slice of a GPU (MIG), and the first of 4 is taken", "by its UUID"),
          ("gpu 0", "ok", "NVIDIA H100 80GB HBM3 MIG 3g.40gb, 39.5 GiB")]),
        ("E", (), CHOSEN, [("gpu 0", "ok", "MIG 3g.40gb, 39.5 GiB")]),
    ],
    ids=["as they are", "memory taken", "time taken", "not alike", "hidden", "not there", "in another order", "a slice",
         "a chosen slice"],
)  # fmt: skip
def test_devices(name, lines, chosen, expected, gpu_host):
    gpu_host(name, *lines, **({} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}))
    found = devices_found()
    assert [finding.name for finding in found] == [one for one, *_ in expected]
    for finding, (_, *told) in zip(found, expected, strict=True):
        expect(finding, *told)


@pytest.mark.parametrize(
    ("reasons", "said"),
    [
        ("0x1", None),  # it idles
        ("0x4", None),  # its power limit
        ("0x20", "it is too hot"),
        ("0x48", "it is much too hot"),
        ("0xa0", "it is too hot and its power supply asks for it"),
    ],
)
def test_a_gpu_whose_clocks_are_held_down(reasons, said, gpu_host):
    gpu_host("D", "gpu 0", "fails reasons NOT_SUPPORTED", "gpu 1", f"reasons {reasons}")
    found = devices_found()
    assert [f.name for f in found] == ["gpu 0", "gpu 1", *(["gpu 1"] if said else [])]
    if said:
        expect(found[-1], "warning", f"its clocks are held down, because {said}", "cooling")


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        (["8.0", "8.0"], [("ok", "1/2 of float32's rate: exact is estimated to take 1.5 to 8 times as long as fast")]),
        (["7.5"], [("warning", "1/32 of float32's rate: exact is estimated to take 20 to 45 times as long")]),
        (["9.0", "12.0"], [("ok", "1/2 of"), ("warning", "1/64 of")]),
        (["10.3"], [("warning", "1/64 of")]),
        (["99.0", "unavailable: Unknown Error"], []),
        ([], []),
    ],
)
def test_the_rate_of_float64(capabilities, expected):
    found = machine.float64([host.Gpu(**{**GPU, "compute_capability": one}) for one in capabilities])
    assert [finding.name for finding in found] == ["float64"] * len(expected)
    for finding, (status, text) in zip(found, expected, strict=True):
        expect(finding, status, text, "make gpu-check ONLY=cost" if status == "warning" else None)


def test_gpus_that_start_anew_each_time_are_warned_of(gpu_host):
    gpu_host("A", "gpu 1", "persistence off", "gpu 2", "persistence off", "gpu 3", "fails persistence NOT_SUPPORTED")
    assert host.gpus_without_persistence() == [1, 2]
    expect(
        devices_found()[-1],
        "warning",
        "persistence mode is off on 2 GPUs: the driver takes seconds",
        "nvidia-smi -pm 1",
    )


PAIRS = "ok", "between all 3 pairs"


@pytest.mark.parametrize(
    ("lines", "access", "nvlink"),
    [
        (("p2p_nvlink 0", "nvlinks 18"), PAIRS, ("ok", "18 links up on each GPU")),
        (("p2p_nvlink 1",), PAIRS, ("warning", "none: gradients cross PCIe")),
        (("p2p_nvlink 1", "nvlinks 4"), PAIRS, ("warning", "not between 0 and 1, 0 and 2, 1 and 2, with 4 links")),
        (("p2p_write 1", "p2p_nvlink 1"), ("warning", "not between 0 and 1, 0 and 2, 1 and 2"), ("warning", "none")),
        (("fails p2p NOT_SUPPORTED", "nvlinks 18"), ("warning", "2 (unavailable: Not Sup"), ("warning", "18 links up")),
    ],
)
def test_how_gpus_reach_each_other(lines, access, nvlink, gpu_host):
    gpu_host("B", *[line for gpu in range(3) for line in ("gpus 1" if gpu else "gpu 0", "capability 9.0", *lines)])
    found = machine.peers()
    assert [finding.name for finding in found] == ["peer access", "nvlink"]
    for finding, told in zip(found, (access, nvlink), strict=True):
        expect(finding, *told)


def test_peer_access_turned_off_or_not_needed(gpu_host):
    gpu_host("A")
    expect(machine.peers({"NCCL_P2P_DISABLE": "1"})[0], "warning", "NCCL_P2P_DISABLE", "unset NCCL_P2P_DISABLE")
    assert [f.status for f in machine.peers({"CUDA_VISIBLE_DEVICES": "0"})] == ["skipped", "skipped"]


@pytest.mark.parametrize(
    ("cores", "gpus", "status", "text"),
    [
        (8, 8, "ok", "8 of 16 usable"),
        (7, 8, "warning", "for 8 GPUs"),
        (2, 0, "ok", "2 of"),
        (1, 0, "warning", "nothing to"),
    ],
)
def test_cores(cores, gpus, status, text, monkeypatch):
    monkeypatch.setattr(machine, "count_cores", lambda: cores)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    expect(one(machine.cores(gpus)), status, text, "--cpus" if status == "warning" else None)


@pytest.mark.parametrize(
    ("free", "gpus", "status"),
    [(GIB - 1, 2, "warning"), (64 * 2**20, 0, "ok"), (GIB, 2, "ok")],
)
def test_shared_memory(free, gpus, status, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=free, free=free))
    expect(one(machine.shared_memory(gpus, tmp_path)), status, "free of", "--shm-size" if status == "warning" else None)


def test_no_shared_memory_at_all(tmp_path):
    found = [one(machine.shared_memory(gpus, tmp_path / "none")).status for gpus in (0, 1)]
    assert found == ["skipped", "warning"]


@pytest.mark.parametrize(
    ("limits", "status", "hint"),
    [
        ((4095, 4096), "warning", "ulimit -n 4096"),
        ((1024, 4095), "warning", "--ulimit nofile=4096"),
        ((4096, 4096), "ok", None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), "ok", None),
    ],
)
def test_open_files(limits, status, hint, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    expect(one(machine.open_files()), status, "", hint)


@pytest.mark.parametrize(
    ("free", "name", "status", "hint"),
    [
        (GIB - 1, "disk", "failed", "dvc gc"),
        (GIB - 1, "temporary files", "failed", "TMPDIR"),
        (GIB, "disk", "warning", "free some space"),
        (10 * GIB, "disk", "ok", None),
    ],
)
def test_disk(free, name, status, hint, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    finding = one(machine.disk(tmp_path, name=name))
    assert finding.name == name
    expect(finding, status, "free", hint)


def test_a_folder_that_cannot_be_written_or_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    expect(one(machine.disk(tmp_path, name="disk")), "failed", "cannot be written", "owner")
    monkeypatch.undo()
    expect(one(machine.disk(tmp_path / "none", name="disk")), "failed", "")


# -- MLflow ----------------------------------------------------------------------------------------------------


@pytest.fixture
def server(monkeypatch):
    """A server on the loopback interface that gives every request ``answer``, a status and a body."""

    class Answers(Handler):
        def do_POST(self):
            self.read_body()
            self.server.requests.append((self.path, self.headers.get("Authorization")))
            code, body = self.server.answer
            self.server.may_answer.wait()
            with suppress(BrokenPipeError):  # of a client that did not wait
                self.answer(body.encode(), code)

    with serving(Answers, answer=(200, "{}"), requests=[], may_answer=threading.Event()) as listening:
        listening.may_answer.set()
        listening.host = f"127.0.0.1:{listening.server_port}"
        yield listening


@pytest.fixture
def ask(monkeypatch):
    """Ask a server in this process, where MLflow is imported once, with the limits of the doctor's own."""
    for name, value in {"no_proxy": "*", "HTTP_REQUEST_MAX_RETRIES": "0", "HTTP_REQUEST_TIMEOUT": "60"}.items():
        monkeypatch.setenv(name if name.islower() else f"MLFLOW_{name}", value)
    return mlflow_store.ask


@pytest.mark.parametrize(
    ("code", "body", "status", "text", "hint"),
    [
        (200, '{"experiments": []}', "ok", "answers", None),
        (200, "<html>hello</html>", "failed", "something else than MLflow", "correct MLFLOW_TRACKING_URI"),
        (200, "[]", "failed", "something else than MLflow", None),
        (403, "Invalid Host header - possible DNS ...", "failed", "403 Invalid Host", "--allowed-hosts 127"),
        (403, "no", "failed", "refuses access (403)", "MLFLOW_TRACKING_USERNAME"),
        (401, "who?", "failed", "refuses access (401)", "MLFLOW_TRACKING_TOKEN"),
        (404, "what?", "failed", "no MLflow API (404)", "correct MLFLOW_TRACKING_URI"),
        (405, "how?", "failed", "something else than MLflow", "correct MLFLOW_TRACKING_URI"),
        (500, "oh", "failed", "an error of its own: too many 500", "server's log"),
        (503, "oh", "failed", "an error of its own: too many 503", "server's log"),
    ],
)
def test_a_server_is_asked_on_a_route_of_its_api(code, body, status, text, hint, server, ask):
    server.answer = (code, body)
    expect(ask(f"http://{server.host}/"), status, text, hint)
    assert server.requests == [("/api/2.0/mlflow/experiments/search", None)]


BASIC = "Basic " + base64.b64encode(b"me:s3cr@t").decode()


@pytest.mark.parametrize("code", [200, 401])
def test_credentials_are_used_and_never_shown(code, server, ask, monkeypatch):
    server.answer = (code, "{}")
    finding = ask(f"http://me:s3cr%40t@{server.host}")
    assert "s3cr" not in f"{finding.text}{finding.hint}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://{server.host}")
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "you")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "too")
    ask(f"http://{server.host}")
    monkeypatch.delenv("MLFLOW_TRACKING_USERNAME")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "abc")
    ask(f"http://{server.host}")
    assert [authorization for _, authorization in server.requests] == [BASIC, "Basic eW91OnRvbw==", "Bearer abc"]


def test_a_server_is_asked_once_by_a_process_of_its_own(server, monkeypatch):
    """Without the settings of this process, and with one try where MLflow's client makes eight."""
    monkeypatch.setattr(mlflow_store, "CLIENT_SECONDS", patient(600))
    monkeypatch.setattr(mlflow_store, "REQUEST_SECONDS", 120)
    server.answer = (503, "oh")
    finding = one(store(f"http://me:s3cr%40t@{server.host}", {**os.environ, "no_proxy": "*"}))
    assert finding.name == "mlflow"
    expect(finding, "failed", f"http://{server.host} answers with an error of its own", "server's log")
    assert server.requests == [("/api/2.0/mlflow/experiments/search", BASIC)]


def test_a_client_that_does_not_end_or_breaks(monkeypatch):
    monkeypatch.setattr(mlflow_store, "CLIENT_SECONDS", 0.01)
    expect(one(store("http://me:s3cret@127.0.0.1:9")), "failed", "MLflow's client took longer than 0 s", "unset MLFLOW")
    monkeypatch.undo()
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    finding = one(store("http://me:s3cret@127.0.0.1:9"))
    expect(finding, "failed", "the check itself broke: CalledProcessError")
    assert "s3cret" not in finding.text


UNKNOWN = socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_a_server_that_does_not_answer(server, ask, monkeypatch):
    expect(ask("http://127.0.0.1:9"), "failed", "127.0.0.1:9 does not answer: Connection refused", "unset MLFLOW")
    with monkeypatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", raising(UNKNOWN))
        text = f"mlflow.invalid does not answer: {UNKNOWN.strerror}"
        expect(ask("http://mlflow.invalid"), "failed", text, "unset MLFLOW_TRACKING_URI")
    expect(ask(f"https://{server.host}"), "failed", "does not answer: [SSL")
    server.may_answer.clear()
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    expect(ask(f"http://{server.host}"), "failed", "no answer within")
    server.may_answer.set()


@pytest.mark.parametrize(
    ("says", "text"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "something else than MLflow answers at http://127.0.0.1:"),
        (b"", "closes the connection without an answer"),
    ],
)
def test_something_that_is_no_web_server(says, text, ask):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def talk():
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(says)

        thread = threading.Thread(target=talk)
        thread.start()
        expect(ask(f"http://127.0.0.1:{listener.getsockname()[1]}"), "failed", text)
        thread.join()


def test_an_address_without_a_port_number(ask):
    expect(ask("http://127.0.0.1:port"), "failed", "something else than MLflow answers", "correct MLFLOW")


def make_store(path, table="experiments"):
    with sqlite3.connect(path) as database:
        database.execute(f"CREATE TABLE {table} (name TEXT)")
    database.close()


@pytest.mark.parametrize(
    ("make", "status", "text"),
    [
        (lambda path: None, "ok", "will be made by the first run"),
        (make_store, "ok", "can be read and written"),
        (lambda path: make_store(path, "recipes"), "failed", "not a store of MLflow's"),
        (lambda path: path.write_bytes(b"SQLite format 3\0" + bytes(range(200))), "failed", "cannot be read"),
        (lambda path: path.write_text("nothing like it " * 100), "failed", "file is not a database"),
    ],
)
def test_a_local_store(make, status, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "mlflow.db")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    expect(one(store(tracking_uri({}))), status, text)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before  # looked at, not touched


@pytest.mark.parametrize("exists", [True, False])
def test_a_local_store_of_someone_else(exists, tmp_path, monkeypatch):
    if exists:
        make_store(tmp_path / "mlflow.db")
    monkeypatch.setattr(os, "access", lambda *_: False)
    expect(one(store(f"sqlite:///{tmp_path}/mlflow.db")), "failed", "cannot be", "owner")


@pytest.mark.parametrize(
    ("uri", "status"),
    [
        ("file:///runs", "failed"),
        ("mlruns", "failed"),
        ("http://[", "failed"),
        ("postgresql://u:p@db/x", "skipped"),
        ("databricks", "skipped"),
    ],
)
def test_other_stores(uri, status):
    finding = one(store(uri, {}))
    assert finding.status == status
    assert "u:p" not in finding.text
    assert "broke" not in finding.text


# -- git, DVC, params.yaml, logs -------------------------------------------------------------------------------


def test_git(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    expect(one(repository.git()), "warning", "not a git repository", "`git init`, and commit")
    (tmp_path / "a").write_text("a")
    commit_all(tmp_path)
    assert one(repository.git()).status == "ok"
    (tmp_path / "a").write_text("b")
    expect(one(repository.git()), "warning", "with changes", "commit them")
    monkeypatch.setenv("PATH", "")
    expect(one(repository.git()), "warning", "git is not installed", "install git")


@needs_root
def test_a_repository_of_somebody_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    git(tmp_path, "init")
    expect(one(repository.git()), "warning", "results cannot name their commit", "there is no commit yet")
    for path in (tmp_path, tmp_path / ".git"):
        os.chown(path, 4321, 4321)
    expect(one(repository.git()), "warning", "results cannot name their commit", "safe.directory")


@pytest.fixture
def dvc(tmp_path):
    """A folder that DVC takes for its own."""
    (tmp_path / ".dvc/tmp").mkdir(parents=True)
    (tmp_path / ".dvc/config").touch()
    return tmp_path


SOUND = (None, "{}", '{"read": {}, "write": {}}')


@pytest.mark.parametrize("lock", [*SOUND, "", '{"wri', "[]"])
def test_dvc_and_its_own_lock(lock, dvc):
    if lock is not None:
        (dvc / ".dvc/tmp/rwlock").write_text(lock)
    expected = ("ok", "can run stages", None) if lock in SOUND else ("failed", "is damaged", "rm .dvc/tmp/rwlock")
    expect(one(repository.dvc(dvc)), *expected)


def test_a_torn_dvc_lock_file_is_found(dvc):
    """DVC writes the file in place: a kill leaves nothing of it, or some of it."""
    whole = (ROOT / "dvc.lock").read_bytes()
    in_a_key = whole.index(b"outs:") + 2
    for kept, said in ((0, "the file: "), (6, "the file: "), (12, "cannot be read: "), (in_a_key, "cannot be read: ")):
        (dvc / "dvc.lock").write_bytes(whole[:kept])
        expect(one(repository.dvc(dvc)), "failed", f"dvc.lock: {said}", f"git checkout {dvc}/dvc.lock")
    (dvc / "dvc.lock").write_bytes(whole)
    expect(one(repository.dvc(dvc)), "ok", "can run stages")


def test_dvc_that_is_not_here_or_not_installed(tmp_path, monkeypatch):
    expect(one(repository.dvc(tmp_path)), "failed", "no .dvc/config", "root of the repository")
    monkeypatch.setattr(repository.importlib.util, "find_spec", lambda name: None)
    expect(one(repository.dvc(tmp_path)), "failed", "not installed", "make .venv")


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ((ROOT / "params.yaml").read_text(), "ok", "mlp on vectors"),
        ("sed: 0\n", "failed", "sed: unknown key"),
        (None, "failed", "no such file"),
    ],
)
def test_params(text, status, said, tmp_path):
    path = tmp_path / "params.yaml"
    if text:
        path.write_text(text)
    finding = one(repository.params(path))
    expect(finding, status, said)
    assert finding.exit_code == (2 if status == "failed" else 0)


def test_what_is_asked_inside_a_container(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["inside", "0", "http://127.0.0.1:9"])
    runpy.run_module("samebits.doctor.inside", run_name="__main__")
    memory, mlflow = (Finding(**answer) for answer in json.loads(capsys.readouterr().out))
    assert (memory.name, mlflow.name, mlflow.status) == ("shared memory", "mlflow", "failed")


def test_logs_that_mlflow_does_not_have(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert one(repository.logs()).status == "ok"
    folder = tmp_path / ".samebits/runs"
    folder.mkdir(parents=True)
    for name, delivered in (("one", True), ("two", False)):
        line = EndEvent(status="FAILED").model_dump_json() + "\n"
        (folder / f"{name}.jsonl").write_text(line)
        State(ended=delivered, offset=len(line) if delivered else 0).write(folder / f"{name}.state.json")
    expect(one(repository.logs()), "warning", "1 run not delivered to MLflow in full, two", "samebits track sync")
    (folder / "one.state.json").write_text('{"schema": 99}')
    expect(one(repository.logs()), "warning", "one.jsonl cannot be delivered: ", "move it away")
    for name, make in (("pipe", os.mkfifo), ("loop", lambda path: path.symlink_to(path)), ("folder", Path.mkdir)):
        make(folder / f"{name}.jsonl")
        expect(one(repository.logs()), "warning", f"{name}.jsonl is not a file, and no log", "move it away")


# -- the command -----------------------------------------------------------------------------------------------


def test_the_command_without_torch(repo):
    """Lines to stdout, one summary to stderr; neither torch nor MLflow nor DVC is imported."""
    (repo / "params.yaml").write_text("sed: 0\n")
    code = (
        "import sys\nfrom samebits.cli.commands import main\n"
        "try:\n    main(['doctor'])\n"
        "finally:\n    assert {'torch', 'mlflow', 'dvc'}.isdisjoint(sys.modules), 'a heavy import'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr == "error: failed: params. hint: below each of these lines stands what to do\n"
    lines = done.stdout.splitlines()
    *lines, empty, ready = lines
    assert (empty, ready[:21]) == ("", "not ready: 1 failure,")
    assert all(len(line) <= 100 or " " not in line.strip() for line in lines)
    names = [line[9:25].strip() for line in lines]
    assert {"python", "torch", "open files", "disk", "mlflow", "git", "dvc", "params", "logs"} <= set(names)
    statuses = [line.split()[0] for line in lines if line[:1] != " "]
    assert set(statuses) <= {"ok", "warning", "failed", "skipped"}
    hints = sum(line.startswith(f"{'':26}hint: ") for line in lines)
    assert hints == statuses.count("warning") + statuses.count("failed")


@pytest.mark.parametrize(
    ("broken", "code", "error"),
    [(None, 0, None), ("params", 2, UserError), ("rwlock", 3, HostError), ("both", 3, HostError)],
)
def test_json_and_exit_codes(broken, code, error, repo, capsys):
    (repo / "params.yaml").write_text("sed: 0\n" if broken in ("params", "both") else "seed: 0\n")
    if broken in ("rwlock", "both"):
        (repo / ".dvc/tmp").mkdir()
        (repo / ".dvc/tmp/rwlock").touch()

    with pytest.raises(error) if error else nullcontext() as caught:
        visit(Path("params.yaml"), data_dir=Path("data"), with_model=False, checkpoint=None, as_json=True)
    assert error is None or caught.value.exit_code == code
    report = json.loads(capsys.readouterr().out)
    assert (set(report), report["exit_code"]) == ({"samebits", "exit_code", "findings"}, code)
    assert all(set(finding) == {"name", "status", "text", "hint", "exit_code"} for finding in report["findings"])
    assert {"python", "locks", "torch", "cuda", "mlflow", "dvc"} <= {finding["name"] for finding in report["findings"]}


def test_a_gpu_that_cannot_be_read_hides_no_other_check(repo, gpu_host, capsys):
    gpu_host("A", "gpu 1", "fails all GPU_IS_LOST")
    (repo / "params.yaml").write_text("seed: 0\n")
    with pytest.raises(HostError, match="failed: driver"):
        visit(Path("params.yaml"), data_dir=Path("data"), with_model=False, checkpoint=None, as_json=True)
    findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert findings["driver"]["text"] == "GPU 1 cannot be read: GPU is lost"
    assert findings["dvc"]["status"] == "ok"


# -- a model's anatomy -----------------------------------------------------------------------------------------


class Net(nn.Module):
    """A layer, and what a test adds to it."""

    def __init__(self, forward=None, **attributes):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("steps", torch.zeros(1))
        for name, value in attributes.items():
            setattr(self, name, value)
        self.more = forward or (lambda net, x, y: y)

    def forward(self, x):
        return self.more(self, x, self.layer(x))


@pytest.mark.parametrize(
    ("net", "tensors", "modules"),
    [
        (Net(), [], []),
        (nn.LSTM(2, 2), [], []),  # keeps a list of its parameters
        (Net(norm=nn.BatchNorm1d(2), free=nn.Parameter(torch.ones(2))), [], []),
        (Net(scale=torch.ones(2)), ["scale"], []),
        (Net(parts=[torch.ones(2), {"a": nn.Parameter(torch.ones(2))}]), ["parts[0]", "parts[1]['a']"], []),
        (nn.Sequential(Net(scale=torch.ones(2))), ["0.scale"], []),
        (Net(blocks=(nn.Linear(2, 2), nn.ReLU())), [], ["blocks[0]", "blocks[1]"]),
        (Net(blocks=nn.ModuleList([nn.Linear(2, 2)])), [], []),
    ],
)
def test_unregistered_tensors_and_modules_are_found(net, tensors, modules):
    assert attributes.unregistered(net) == (tensors, modules)


def test_a_registered_parameter_in_a_list_is_not_reported():
    net = Net()
    net.all = [net.layer.weight, net.layer]
    assert attributes.unregistered(net) == ([], [])


class OwnNorm(nn.BatchNorm1d):
    """A class of the user's."""


def add(name, value):
    def forward(net, x, y):
        setattr(net, name, getattr(net, name) + value)
        return y

    return forward


def append(net, x, y):
    net.seen.append(1)
    return y


def in_place(net, x, y):
    net.steps.data += 1
    return y


def remember(net, x, y):
    net.last = y
    return y


@pytest.mark.parametrize(
    ("net", "names"),
    [
        (Net(), []),
        (Net(norm=nn.BatchNorm1d(2), forward=lambda net, x, y: net.norm(y)), []),
        (Net(norm=OwnNorm(2), forward=lambda net, x, y: net.norm(y)), []),
        (Net(calls=0, forward=add("calls", 1)), ["calls"]),
        (Net(label="", forward=add("label", "x")), ["label"]),
        (Net(seen=[1], forward=append), ["seen"]),
        (Net(forward=in_place), ["steps"]),
        (Net(forward=remember), ["last"]),
        (nn.Sequential(Net(calls=0, forward=add("calls", 1))), ["0.calls"]),
    ],
)
def test_attributes_that_forward_writes_are_found(net, names):
    before = attributes.state(net)
    assert attributes.written(before, attributes.state(net)) == []
    net(torch.randn(3, 4))
    assert attributes.written(before, attributes.state(net)) == names


@pytest.mark.parametrize(
    ("forward", "mixes"),
    [
        (lambda net, x, y: y, False),
        (lambda net, x, y: y + torch.zeros(2), True),
        (lambda net, x, y: y + torch.zeros(2, device=x.device), False),
        (lambda net, x, y: y * torch.tensor(2.0), False),  # CUDA takes single numbers of the CPU
        (lambda net, x, y: y[:, torch.tensor([0, 1])], False),  # and indices
        (lambda net, x, y: y + torch.zeros(2).to(y.device), False),
        (lambda net, x, y: y + net.steps, False),
        (lambda net, x, y: y @ torch.ones(2, 2), True),
        (lambda net, x, y: y if x.sum().item() > 0 else -y, False),  # cannot be followed
    ],
)
def test_the_line_that_mixes_devices(forward, mixes):
    place = model_trial.mixes_devices(Net(forward=forward), torch.randn(3, 4))
    assert (place is not None) == mixes
    if mixes:
        assert "test_doctor.py:" in place


# -- the model -------------------------------------------------------------------------------------------------

NET = """import os
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(128, 10)
        {init}

    def forward(self, x):
        {before}
        y = self.layer(x)
        return {result}

def make():
    return Net()
"""


@pytest.fixture
def doctor(repo, stage):
    """Run ``samebits doctor --model --json`` on a model with such lines; ``alone`` without checks of the host."""
    script = repo / "command.py"
    alone_lines = "from samebits.doctor import checks\nchecks.host_findings = lambda params_file: iter(())\n"

    def run(*arguments, init="pass", before="pass", result="y", data=None, alone=True, **train):
        script.write_text(f"{alone_lines if alone else ''}from samebits.cli import main\nmain()\n")
        (repo / "net.py").write_text(NET.format(init=init, before=before, result=result))
        params = small(model={"name": "net:make", "source": "net.py"}, **train)
        stage.write_params(params | ({"data": data} if data else {}))
        done = stage.run_script(script, "doctor", "--model", "--json", *arguments)
        report = json.loads(done.stdout)
        assert done.returncode == report["exit_code"], done.stderr
        findings = [Finding(**finding) for finding in report["findings"]]
        start = next(i for i, finding in enumerate(findings) if finding.name == "data")
        return done.returncode, findings[start:]

    return run


def told(findings, status):
    return [(finding.name, finding.text, finding.hint) for finding in findings if finding.status == status]


def test_a_model_without_mistakes(doctor):
    code, findings = doctor(before="print('noise on stdout')", alone=False)
    assert (code, told(findings, "warning"), told(findings, "failed")) == (0, [], [])
    texts: dict[str, str] = {}
    for finding in findings:
        texts.setdefault(finding.name, finding.text)
    assert texts["data"] == "64 samples of vectors, drawn for this: there is none yet"
    assert texts["model"] == "net:make, 1,290 parameters"
    assert texts["single"].startswith("2 steps of 2 samples on 1 ")
    assert "loss 2." in texts["single"]
    assert "DataParallel" in texts["dp"]
    assert texts["ddp"].startswith("2 steps of 4 samples on 2 ")
    assert not (Path.cwd() / "data").exists()


def test_images_whose_channels_may_come_last_are_warned_of(doctor, repo):
    np.save(repo / "x.npy", np.zeros((128, 8, 6, 3), np.float32))
    np.save(repo / "y.npy", np.arange(128) % 10)
    kwargs = {"inputs": "x.npy", "targets": "y.npy"}
    data = {"task": "file", "num_samples": 64, "test_samples": 64, "kwargs": kwargs}
    _, findings = doctor(init="self.layer = nn.Linear(144, 10)", before="x = x.flatten(1)", data=data)
    assert [(name, hint) for name, text, hint in told(findings, "warning") if "channels came last" in text] == [
        ("data", "transpose the file if they do: inputs.transpose(0, 3, 1, 2)")
    ]
    assert [finding.text for finding in findings if "taken for this" in finding.text]


def test_what_forward_makes_on_the_device_of_its_batch_and_keeps_mixes_no_devices(doctor):
    before = "self.mask = self.mask if hasattr(self, 'mask') else torch.ones(128, device=x.device); x = x * self.mask"
    assert [text for _, text, _ in told(doctor(before=before)[1], "warning") if "would mix" in text] == []


SEVERAL = (
    "self.scale = torch.ones(10); self.blocks = {'a': [nn.Linear(2, 2)]}; self.calls = 0; self.spare = nn.Linear(2, 2)"
)


def test_mistakes_that_are_warned_of(doctor):
    before = "self.calls += 1"
    code, findings = doctor(init=SEVERAL, before=before, result="y + torch.zeros(10)", strategies=["single", "dp"])
    assert (code, told(findings, "failed")) == (0, [])
    expected = [
        ("model", "scale: tensors beside the parameters", 'self.register_buffer("scale", ...)'),
        ("model", "blocks['a'][0]: modules in a plain container", "nn.ModuleList"),
        ("model", "forward writes calls: under dp", "return it from forward"),
        (
            "single",
            "no gradient reaches spare.weight, spare.bias: ranks, as those of ddp, would wait",
            "use it in forward",
        ),
        ("model", "net.py:14: on a GPU, forward would mix", "device=x.device"),
        ("ddp", "no gradient reaches spare.weight", "keep to single and dp"),
    ]
    found = told(findings, "warning")
    assert [name for name, _, _ in found] == [name for name, _, _ in expected], found
    for (_, text, hint), (_, got_text, got_hint) in zip(expected, found, strict=True):
        assert (text in got_text, hint in got_hint) == (True, True), (got_text, got_hint)


def test_batch_norm_is_warned_of_once(doctor):
    code, findings = doctor(init="self.layer = nn.Sequential(nn.Linear(128, 10), nn.BatchNorm1d(10))")
    assert code == 0
    (name, text, hint), *others = told(findings, "warning")
    assert (others, "each of 2 devices" in text, "nn.GroupNorm" in hint) == ([], True, True)
    assert name in ("dp", "ddp")


@pytest.mark.parametrize(
    ("layer", "code", "text"),
    [
        ("nn.Linear(128, 10)", 0, "the same bits in either order, of 4 samples on 1 CPU device, in one pass"),
        ("nn.Sequential(nn.Linear(128, 10), nn.BatchNorm1d(10))", 0, "the same bits in either order, of 4 samples on"),
        ("nn.Sequential(nn.Linear(128, 10), nn.RReLU(inplace=True))", 2, "RReLU in model.layer.1: rrelu_with_noise_: "),
    ],
)
def test_exact_is_tried_where_it_is_wanted(layer, code, text, doctor):
    got, findings = doctor(init=f"self.layer = {layer}", numerics=["fast", "exact"])
    *notes, found = [finding for finding in findings if finding.name == "exact"]
    assert [note.text.partition(":")[0] for note in notes] == (["BatchNorm"] if "BatchNorm" in layer else [])
    assert (got, found.status) == (code, "failed" if code else "ok")
    assert text in found.text
    assert "exact" not in {finding.name for finding in doctor()[1]}


MANY = """
        self.first = nn.Sequential(nn.Linear(128, 10), nn.RReLU(inplace=True))
        self.second = nn.Sequential(nn.Linear(10, 10), nn.RReLU(inplace=True))
        self.rows = nn.SyncBatchNorm(10)
        self.calls = 0
        self.start = torch.linalg.inv(torch.eye(10) * 2)"""
PASS = """
        import time
        self.began = time.time()
        self.calls += 1
        y = self.second(self.first(x))
        y = y + torch.polygamma(1, y)  # whose derivative is one of them, too
        return torch.special.i0e(y) + self.start[0]
"""


def test_where_exact_alone_is_trained_fast_is_tried_and_stops_nothing(doctor):
    kwargs = {"init": "self.spare = nn.Linear(2, 2)", "numerics": ["exact"]}
    code, findings = doctor(**kwargs, strategies=["single", "dp"])
    by_name = {finding.name: finding for finding in findings}
    assert (code, by_name["exact"].status) == (0, "ok")
    assert ", in fast, loss" in by_name["single"].text
    assert (by_name["ddp"].status, by_name["ddp"].text.rpartition("; ")[2]) == (
        "warning", "it is not in train.strategies"
    )  # fmt: skip
    code, findings = doctor(**kwargs)
    assert code == 2
    assert [(name, text.partition(";")[0]) for name, text, _ in told(findings, "failed")] == [
        ("exact", "no gradient reaches spare.weight, spare.bias")
    ]


ROUNDED = """rounded(y)

class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad

rounded = Round.apply"""


def test_an_autograd_function_under_a_name_of_the_users_runs_in_one_pass(doctor):
    _, findings = doctor(result=ROUNDED, numerics=["exact"])
    assert [(finding.name, finding.status) for finding in findings if finding.name == "exact"] == [("exact", "ok")]


def test_all_that_exact_refuses_is_told_at_once_with_its_places(doctor):
    code, findings = doctor(init=MANY, before=PASS, result="y", numerics=["exact"])
    said = {text: hint for name, text, hint in told(findings, "failed") if name == "exact"}
    assert code == 2
    for text, hint in [
        ("SyncBatchNorm in model.rows: it normalises by the batch of all ranks", "use nn.BatchNorm"),
        ("RReLU in model.first.1, RReLU in model.second.1: rrelu_with_noise_: ", "docs/concepts/exact.md"),
        ("Net in model: prims::bessel_i0e: it has no exact version (net.py:", "docs/concepts/exact.md"),
        ("Net in model: time.time is asked for (net.py:", "give it to the factory"),
        ("in the construction of Net: linalg_inv_ex: ", "use torch.linalg.qr"),
        ("model.calls, model.began: written in forward", "keep such state out"),
        ("(in the backward pass) (net.py:", "docs/concepts/exact.md"),
    ]:
        assert any(text in one and hint in said[one] for one in said), "\n".join([text, *said])
    assert sum("polygamma" in one for one in said) == 1


@pytest.mark.parametrize(
    ("body", "code", "name", "text", "hint"),
    [
        ({"result": "(y, x)"}, 2, "single", "the model returned tuple", "return the logits alone"),
        ({"init": "self.spare = nn.Linear(2, 2)"}, 2, "ddp", "no gradient reaches spare.weight", "use it in forward"),
        ({"result": "y / 0 * 0"}, 2, "single", "the loss of the first batch is nan", "division by zero"),
        ({"before": "os.abort()"}, 4, "single", "the worker of rank 0 was ended by SIGABRT", ""),
        (
            {"before": "raise KeyError('k')"},
            2,
            "single",
            "net.py:12: the model or its loss raised KeyError",
            "samebits stage train",
        ),
    ],
    ids=["tuple", "unused", "nan", "crash", "raises"],
)
def test_a_mistake_that_fails(body, code, name, text, hint, doctor):
    got, findings = doctor(**body)
    assert got == code
    found = told(findings, "failed")
    assert [(n, text in t, hint in h) for n, t, h in found] == [(name, True, True)]
    if name == "single":
        assert [f.name for f in findings if f.status == "skipped"] == ["dp", "ddp"]


@pytest.fixture
def placed(tmp_path, monkeypatch):
    """What a strategy gives on a host with so many devices, without running it."""

    def run(strategy, gpus=0, **train):
        monkeypatch.setattr(model, "this_machine", lambda: Devices(gpus=gpus, cores=2))
        launched = []
        monkeypatch.setattr(model, "launch", lambda function, workers: launched.append(workers))
        params = parse_params(small(**train))
        folders = {"data_dir": tmp_path, "out": tmp_path, "checkpoint": None}
        tried = model_trial.Trial(params=params, strategy=strategy, numerics="fast", **folders, seconds=9)
        return model._try(tried)[0], launched

    return run


ANOTHER_BATCH = "make train.global_batch_size over train.grad_accum_steps a multiple of the devices"
ONE_PROCESS = "ok", "ddp ran with a world size of 1: one process, nothing to reduce"


@pytest.mark.parametrize(
    ("strategy", "gpus", "train", "expected", "launched"),
    [
        ("ddp", 2, {}, [("ok", "NCCL is held to its ring algorithm")], [2]),  # no other batch would change that
        ("ddp", 3, {}, [("warning", "2 of 3 devices, the most that divide 64", ANOTHER_BATCH),
                        ("ok", "NCCL is held to its ring")], [2]),
        ("ddp", 1, {}, [("ok", "2 workers share 1 GPU")], [2]),  # if the batch has two halves
        ("ddp", 1, {"global_batch_size": 7}, [ONE_PROCESS], [1]),
        ("ddp", 0, {"global_batch_size": 7},
         [("warning", "1 of 2 devices, the most that divide 7 samples", ANOTHER_BATCH), ONE_PROCESS], [1]),
        ("dp", 1, {}, [("ok", "one GPU is used, so DataParallel ran the plain module")], []),
        ("dp", 5, {"global_batch_size": 8, "num_devices": 5, "strategies": ["dp"]},
         [("warning", "cuts 8 samples into 4 chunks, so 1 of 5 devices get none", ANOTHER_BATCH)], [1]),
        ("dp", 0, {"num_devices": 4},
         [("failed", "train.num_devices: got 4, this host has 2 CPU cores", "lower it")], []),
    ],
)  # fmt: skip
def test_what_a_placement_says_is_a_warning_where_another_batch_would_help(
    strategy, gpus, train, expected, launched, placed
):
    findings, workers = placed(strategy, gpus, **train)
    assert (workers, len(findings)) == (launched, len(expected)), findings
    for finding, told in zip(findings, expected, strict=True):
        expect(finding, *told)
        assert finding.exit_code == (3 if finding.status == "failed" else 0)


def test_a_signal_ends_the_trials(placed, monkeypatch):
    monkeypatch.setattr(model, "place", raising(Interrupted(signal.SIGTERM)))
    with pytest.raises(Interrupted):
        placed("dp")


def test_the_data_that_is_there_is_used_if_it_fits(tmp_path, data_dir):
    params, larger = parse_params(small()), parse_params({"train": {"global_batch_size": 1024}})
    folder, spare = data_dir(params), tmp_path / "spare"
    chosen, finding = model.data_to_try(params, folder, spare)
    assert (chosen, finding.text, spare.exists()) == (folder, f"{folder}, vectors, 512 samples", False)
    for other, there, why in [
        (larger, folder, f"{folder} is another set than that of the params"),
        (parse_params(small("images")), folder, f"{folder} is another set than that of the params"),
        (params, tmp_path / "none", "there is none yet"),
    ]:
        chosen, finding = model.data_to_try(other, there, spare)
        assert (chosen, why in finding.text, (spare / "card.json").exists()) == (spare, True, True)


def test_a_key_that_dvc_would_miss_is_told(tmp_path):
    (tmp_path / "params.yaml").write_text("seed: 0\n")
    said = one(repository.params(tmp_path / "params.yaml"))
    expect(said, "warning", "params.yaml: data: missing, and DVC follows every key: `dvc repro` fails", "add `data: ")


@pytest.mark.parametrize(
    ("params", "expected", "code"),
    [
        ("seed: 0\n", ("failed", "card.json: cannot be read", "pipeline/prepare.py"), 2),
        ("sed: 0\n", ("skipped", "params.yaml is wrong"), 0),
    ],
    ids=["damaged data", "wrong params"],
)
def test_what_keeps_a_model_from_being_tried(params, expected, code, tmp_path):
    (tmp_path / "params.yaml").write_text(params)
    (tmp_path / "card.json").write_text("{")
    finding = one(list(model.model_findings(tmp_path / "params.yaml", data_dir=tmp_path)))
    expect(finding, *expected)
    assert finding.exit_code == code


@pytest.mark.parametrize(
    ("wrap", "code", "status", "text", "hint"),
    [
        (nn.DataParallel, 0, "warning", "the prefix 'module.' was taken off", "model.module.state_dict()"),
        (lambda net: nn.Linear(2, 2), 2, "failed", "not the weights of this model", "use the model and kwargs"),
        (None, 2, "failed", "not a safetensors file", "name another file"),
    ],
    ids=["wrapped", "other", "missing"],
)
def test_a_checkpoint(wrap, code, status, text, hint, doctor, repo):
    if wrap:
        weights = nn.Sequential()
        weights.layer = nn.Linear(128, 10)
        save_file(wrap(weights).state_dict(), repo / "file.safetensors")
    got, findings = doctor("--checkpoint", "file.safetensors")
    assert got == code
    found = [finding for finding in findings if finding.name == "checkpoint"]
    expect(found[0], status, text, hint)
    assert (found[-1].text == "file.safetensors fits the model") == (code == 0)
    assert [finding.status for finding in findings if finding.name == "single"] == ["ok"]


def test_a_model_in_an_endless_loop(repo, stage):
    script = repo / "endless.py"
    script.write_text(
        "import json\nfrom dataclasses import asdict\nfrom pathlib import Path\n"
        "from samebits.doctor.model import model_findings\n"
        "found = model_findings(Path('params.yaml'), data_dir=Path('data'), seconds=2)\n"
        "print(json.dumps([asdict(one) for one in found]))\n"
    )
    (repo / "net.py").write_text(NET.format(init="pass", before="\n        while True: pass", result="y"))
    stage.write_params(small(model={"name": "net:make", "source": "net.py"}))
    done = stage.run_script(script)
    assert done.returncode == 0, done.stderr
    failure = next(Finding(**item) for item in json.loads(done.stdout) if item["status"] == "failed")
    assert (failure.name, failure.exit_code) == ("single", 2)
    expect(failure, "failed", "the model took longer than 2 s", "endless loop")


@pytest.mark.slow
def test_the_whole_command_in_a_new_interpreter(repo, stage):
    """As a user calls it, on the kit's own model with BatchNorm-free layers and tokens."""
    stage.write_params(small("tokens", global_batch_size=16))
    command = [str(Path(sys.executable).with_name("samebits")), "doctor", "--model"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    *lines, _, ready = done.stdout.splitlines()
    said = [tuple(line.split()[:2]) for line in lines if line[:1] != " "]
    assert said[-6:] == [("ok", name) for name in ("logs", "data", "model", "single", "dp", "ddp")]
    assert ready.startswith("ready")
    assert "failed" not in dict(said)


def test_trials_whose_process_ends_fail(tmp_path, monkeypatch):
    """As by what a model does in C; there they are tried beside exact's, where there is no GPU."""
    trials = [SimpleNamespace(name=name, numerics=name, out=tmp_path / name) for name in ("exact", "fast")]
    monkeypatch.setattr(model, "count_gpus", lambda: 0)
    monkeypatch.setattr(
        model, "_try", lambda trial: os._exit(3) if trial.numerics == "fast" else ([ok("", name="exact")], False)
    )
    told = [(one.name, one.status, one.text) for one in model._all(trials)]
    assert told == [("exact", "ok", ""), ("model", "failed", "the process that tries the model ended with exit code 3")]


def test_a_loss_that_a_model_carries_is_no_module_in_a_plain_container():
    class Net(nn.Module):
        pass

    net = Net()
    attach(Experiment(net, nn.CrossEntropyLoss(weight=torch.ones(2), reduction="none")))
    found = [name for names in attributes.unregistered(net) for name in names]
    assert found
    assert all(map(is_carried, found))
