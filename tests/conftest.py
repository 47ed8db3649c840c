"""Shared fixtures: small parameters, prepared data, and trainings run as a user runs them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pynvml
import pytest
from ruamel.yaml import YAML

from samebits import host
from samebits.data.prepare import prepare
from samebits.params import Params, parse_params
from samebits.provenance import versions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

os.environ["SAMEBITS_RUNTIME"] = "host"  # but in tests/container, whether there is an engine or not

ROOT = Path(__file__).resolve().parent.parent
MODEL_OF_TASK = {"vectors": "mlp", "regression": "mlp", "images": "convnet", "tokens": "gpt"}


def pytest_report_header() -> list[str]:
    known = ", ".join(f"{name} {version}" for name, version in versions().items())
    return [known, f"host: {host.count_gpus()} GPUs, {host.count_cores()} cores"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs more GPUs than there are, and say so."""
    gpus = host.count_gpus()
    for item in items:
        if mark := item.get_closest_marker("gpus"):
            needed = int(mark.args[0])
            if gpus < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} NVIDIA GPU, this host has {gpus}"))


def small(task: str = "vectors", *, model: dict[str, Any] | None = None, **train: Any) -> dict[str, Any]:
    """Parameters of a training of 8 steps, as read from YAML."""
    return {
        "data": {"task": task, "num_samples": 512, "test_samples": 200},
        "model": model or {"name": MODEL_OF_TASK[task]},
        "train": {"numerics": ["fast"], "global_batch_size": 64, "epochs": 1, "repeats": 1, **train},
    }


def copy_sources(folder: Path) -> None:
    """Copy the files of this tree that git has or would take, but for ``dvc.lock``."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.split("\0"):
        if name and (ROOT / name).is_file() and name != "dvc.lock":
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def wait_for(what: Callable[[], Any], *, seconds: float = 60) -> Any:
    """What ``what`` gives once that is true."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
    return found


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Params], Path]:
    """Prepare each data set once."""
    made: dict[str, Path] = {}

    def get(params: Params) -> Path:
        key = params.data.model_dump_json()
        if key not in made:
            made[key] = tmp_path_factory.mktemp(params.data.task)
            prepare(params, made[key])
        return made[key]

    return get


class StageServer:
    """Talks to ``stage_server.py``, which is started at the first request and ends when its stdin does."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, request: dict[str, Any]) -> int:
        if self._process is None:
            script = Path(__file__).with_name("stage_server.py")
            command = [sys.executable, str(script)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, "the stage server ended"
        return int(answer)

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate(timeout=60)


@pytest.fixture(scope="session")
def stage_server() -> Iterator[StageServer]:
    server = StageServer()
    yield server
    server.close()


@dataclass
class Stage:
    """Stage scripts in a folder of their own: in a fork of a warm process, or (``fresh``) in a new interpreter."""

    folder: Path
    server: StageServer
    output: Path

    def __call__(self, name: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return self.run_script(self.script(name), *arguments, **environ)

    def script(self, name: str) -> str:
        return str(ROOT / "pipeline" / f"{name}.py")

    def run_script(self, script: Path | str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        request = {"script": str(script), "arguments": arguments, "folder": str(self.folder), "environ": environ,
                   "output": str(self.output)}  # fmt: skip
        code = self.server.run(request)
        stdout, stderr = ((self.output / stream).read_text() for stream in ("stdout", "stderr"))
        return subprocess.CompletedProcess([str(script), *arguments], code, stdout, stderr)

    def fresh(self, name: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, self.script(name), *arguments],
            cwd=self.folder,
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            timeout=240,
        )

    def write_params(self, raw: dict[str, Any]) -> Params:
        YAML().dump(raw, self.folder / "params.yaml")
        return parse_params(raw)


@pytest.fixture
def stage(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, stage_server: StageServer) -> Stage:
    return Stage(tmp_path, stage_server, tmp_path_factory.mktemp("output"))


class FakeNVML:
    """Stands in for NVML on a host without GPUs: two GPUs, one of which cannot tell its memory."""

    NVMLError = pynvml.NVMLError

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, gpus: int = 2) -> None:
        self.gpus, self.shut_down = gpus, 0
        self.init_error: int | None = None
        self.used_percent, self.utilization = 0.0, 0
        self.p2p: dict[int, int | None] = {}  # status by capability; None where NVML cannot tell
        self.links: dict[int, list[int]] = {}  # 1 for a link that is up, by GPU
        monkeypatch.setattr(host, "pynvml", self)
        monkeypatch.setattr(host, "torch_build", lambda: {"version": "2.13.0+cu130", "cuda": "13.0"})
        monkeypatch.setattr(host, "_multiprocessors", lambda gpus: [108] * gpus)

    def __getattr__(self, name: str) -> Any:
        """NVML's constants; a function that is not faked is one that this driver does not have."""
        if name.startswith("NVML_"):
            return getattr(pynvml, name)

        def missing(*_: object) -> Any:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

        return missing

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise pynvml.NVMLError(self.init_error)

    def nvmlShutdown(self) -> None:
        self.shut_down += 1

    def nvmlDeviceGetCount(self) -> int:
        return self.gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13000

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"NVIDIA Test"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        if handle == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(total=80 * 2**30, used=80 * 2**30 * self.used_percent / 100)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=self.utilization)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return (9, 0)

    def nvmlDeviceGetNumGpuCores(self, handle: int) -> int:
        return 6912

    def nvmlDeviceGetP2PStatus(self, first: int, second: int, capability: int) -> int:
        status = self.p2p.get(capability)
        if status is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return status

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        links = self.links.get(handle, [])
        if link >= len(links):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return links[link]
