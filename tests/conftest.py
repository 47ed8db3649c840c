"""Shared fixtures: small parameters, prepared data, and trainings run as a user runs them."""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pynvml
import pytest
from hypothesis import settings
from ruamel.yaml import YAML

import nvml
from patience import patient
from ports import free_port
from samebits import host
from samebits.data.prepare import prepare
from samebits.errors import HostError
from samebits.host import facts
from samebits.numerics.environment import ENVIRONMENT, prepare_environment
from samebits.params import Params, parse_params
from samebits.records.provenance import versions
from samebits.records.run import Run, read_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

os.environ["SAMEBITS_RUNTIME"] = "host"  # but in tests/system/container, whether there is an engine or not
for name in ("SAMEBITS_LAUNCHER", "SAMEBITS_LAUNCH", "SLURM_STEP_ID", "PET_NNODES", "TORCHELASTIC_RUN_ID"):
    os.environ.pop(name, None)  # of the job that runs the tests: their stages would take it for their own
for name in ("MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK", "DVC_NO_ANALYTICS"):
    os.environ[name] = "true"  # no threads and processes of theirs
for signum, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(signum) == signal.SIG_IGN:  # in a job in the background: its programs would ignore it too
        signal.signal(signum, usual)

settings.register_profile("repeatable", deadline=None, derandomize=True)  # a change is judged, and not the day's luck
settings.register_profile("searching", deadline=None)
settings.load_profile("repeatable")

pytest_plugins = ["chromium", "running"]
ROOT = Path(__file__).resolve().parent.parent
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to somebody else, which root alone can")
FIRST = (
    "workers/test_rendezvous.py",  # these fork pytest's own process, which is safe while it has no other threads
    "workers/test_peers.py",
    "workers/test_connectivity.py",
    "workers/test_processes.py",
    "doctor/test_doctor_nodes.py",
    "doctor/test_doctor_memory.py",
    "system/container/test_containers.py",
    "system/test_pipeline.py",
    "system/test_browser.py",
    "system/test_page.py",
    "tracking/test_tracking.py",
    "workers/test_train.py",
    "numerics/test_exact.py",
    "workers/test_launch.py",
    "workers/test_faults.py",
    "test_running.py",
    "doctor/test_doctor.py",
    "test_cli.py",
    "training/test_evaluation.py",
    "system/test_operations.py",
    "test_architecture.py",
    "host/test_sessions.py",
    "workers/test_breakdown.py",
    "workers/test_two_launchers.py",
)
SET_HERE: set[str] = set()
"""Variables that this session has set for itself, and that stages are to set by themselves."""
MODEL_OF_TASK = {"vectors": "mlp", "regression": "mlp", "images": "convnet", "tokens": "gpt"}


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from every session but one of ``tests/gpu`` alone.

    Elsewhere tests say what happens on a CPU. A session is all or nothing, because a process that has started CUDA
    does not look again at what is visible.
    """
    paths = [Path(config.invocation_params.dir, argument.partition("::")[0]).resolve() for argument in config.args]
    if not all(path.is_relative_to(ROOT / "tests/gpu") for path in paths):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        SET_HERE.update(ENVIRONMENT.keys() - os.environ.keys())
        prepare_environment()  # before torch is imported: this process calls CUDA too, where a stage would


def pytest_collectstart() -> None:
    """Let no test file that is imported start PyTorch's threads: a fork has none of them, and waits for them."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


def visible_gpus() -> tuple[int, str]:
    """How many GPUs tests may use, in words too; none, and why, where one of them cannot be read."""
    try:
        count = host.count_gpus()
    except HostError as error:
        return 0, f"no GPUs: {error.message}"
    return count, f"{count} GPUs visible"


def pytest_report_header() -> list[str]:
    known = ", ".join(f"{name} {version}" for name, version in versions().items())
    return [known, f"host: {visible_gpus()[1]}, {host.count_cores()} cores"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs more GPUs than there are, and say so; let long modules begin first, so that workers end together.

    A worker takes a whole module, and ``--no-loadscope-reorder`` keeps them in this order. What makes a CUDA context in
    pytest's own process comes last: it would keep the stages from a GPU in exclusive mode.
    """
    order = {ROOT / "tests" / name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: (bool(item.get_closest_marker("cuda_here")), order.get(item.path, len(order))))
    gpus, said = visible_gpus()
    for item in items:
        if attack := item.get_closest_marker("attack"):
            item.user_properties += [("attacker", attack.args[0]), ("outcome", attack.kwargs.get("outcome", "held"))]
        if mark := item.get_closest_marker("gpus"):
            needed = int(mark.args[0])
            if gpus < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} NVIDIA GPUs, {said}; see `make test-gpu`"))
            elif item.get_closest_marker("shares_a_gpu") and not host.may_share_gpus():
                item.add_marker(pytest.mark.skip(reason="GPUs are in exclusive mode, nvidia-smi -c 0 ends that"))


def small(task: str = "vectors", *, model: dict[str, Any] | None = None, **train: Any) -> dict[str, Any]:
    """Parameters of a training of 8 steps, as read from YAML."""
    kwargs = {"features": 128} if task == "vectors" else {}
    return {
        "data": {"task": task, "num_samples": 512, "test_samples": 200, "kwargs": kwargs},
        "model": model or {"name": MODEL_OF_TASK[task]},
        "train": {"numerics": ["fast"], "global_batch_size": 64, "epochs": 1, "repeats": 1, "prolong_s": 0.0, **train},
    }


def copy_sources(folder: Path, *, but: tuple[str, ...] = ()) -> None:
    """Copy the files of this tree that git has or would take, but for each ``dvc.lock`` and paths that begin so."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.split("\0"):
        if name and (ROOT / name).is_file() and Path(name).name != "dvc.lock" and not name.startswith(but):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def smoke(name: str, **environ: str) -> None:
    """Run a benchmark once and small."""
    command = [sys.executable, str(ROOT / f"benchmarks/{name}.py")]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "SAMEBITS_BENCH_SMOKE": "1", **environ}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def wait_for(what: Callable[[], Any], *, seconds: float = 300) -> Any:
    """What ``what`` gives once that is true."""
    deadline = time.monotonic() + patient(seconds)
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module", autouse=True)
def torch_as_it_starts() -> None:
    """No module finds the switches that another one's trainings have set in this process.

    But one thread: threads that wait for each other over tensors as small as here take six times as long.
    """
    if torch := sys.modules.get("torch"):  # not imported for this: that takes seconds, and many tests need none
        torch.set_num_threads(1)
        torch.set_deterministic_debug_mode("default")
        torch.utils.deterministic.fill_uninitialized_memory = True
    if kernels := sys.modules.get("samebits.numerics.kernels"):
        kernels.choose_kernels(fused=True)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Params], Path]:
    """Prepare each data set once."""
    made: dict[str, Path] = {}

    def get(params: Params) -> Path:
        key = json.dumps(params.data_identity)
        if key not in made:
            made[key] = tmp_path_factory.mktemp(params.data.task)
            prepare(params, made[key])
        return made[key]

    return get


@pytest.fixture
def trainable(data_dir: Callable[[Params], Path]) -> Callable[..., Any]:
    """Make a training of 8 steps in this process: ``make_trainable`` with the data of its params."""
    from trainables import make_trainable  # which imports torch

    return partial(make_trainable, data_dir)


class StageServer:
    """Starts ``stage_server.py`` and talks to it; it ends when its stdin does."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).with_name("stage_server.py"))]
        environ = {**os.environ, "PYTHONHASHSEED": "0"}  # as a stage would have it: it cannot begin again as itself
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)

    def run(self, request: dict[str, Any]) -> int:
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, "the stage server ended"
        return int(answer)

    def close(self) -> None:
        self._process.communicate(timeout=patient(120))


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

    def well(self, name: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a stage that has to succeed."""
        done = self(name, *arguments, **environ)
        assert done.returncode == 0, done.stderr
        return done

    def train(self, data: Path, strategy: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Train untracked on prepared data, with success."""
        return self.well("train", *self._untracked(data, strategy), *arguments)

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
            env={**{name: value for name, value in os.environ.items() if name not in SET_HERE}, **environ},
            capture_output=True,
            text=True,
            timeout=patient(240),
        )

    def train_fresh(self, data: Path, strategy: str, *arguments: str, out: str = "out", **environ: str) -> Run:
        """``train`` in a new interpreter as for a user; the run."""
        done = self.fresh("train", *self._untracked(data, strategy), "--out-dir", out, *arguments, **environ)
        assert done.returncode == 0, done.stderr
        return read_run(self.folder / out)

    @staticmethod
    def _untracked(data: Path, strategy: str) -> list[str]:
        return ["--strategy", strategy, "--no-tracking", "--data-dir", str(data)]

    def write_params(self, raw: dict[str, Any]) -> Params:
        YAML().dump(raw, self.folder / "params.yaml")
        return parse_params(raw)

    def write_model(self, source: str) -> dict[str, Any]:
        """Write ``mine.py``, whose ``make`` is the factory of a model, and return the params that name it."""
        (self.folder / "mine.py").write_text(source)
        return {"name": "mine:make", "source": "mine.py"}


@pytest.fixture
def stage(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, stage_server: StageServer) -> Stage:
    return Stage(tmp_path, stage_server, tmp_path_factory.mktemp("output"))


@pytest.fixture
def port() -> int:
    """A port of loopback that nobody listens at now."""
    return free_port()


@pytest.fixture
def kernel(tmp_path: Path) -> Callable[..., dict[str, Path]]:
    """Write what a kernel says of this process's control group, by folder, and files of ``/proc``; their folders."""
    roots = {"proc": tmp_path / "proc", "groups": tmp_path / "groups"}

    def write(cgroup: str, files: dict[str, dict[str, object]], **proc: str) -> dict[str, Path]:
        (roots["proc"] / "self").mkdir(parents=True)
        for name, text in {"self/cgroup": cgroup, **proc}.items():
            (roots["proc"] / name).write_text(text)
        for folder, entries in files.items():
            (roots["groups"] / folder).mkdir(parents=True, exist_ok=True)
            for name, value in entries.items():
                (roots["groups"] / folder / name).write_text(f"{value}\n")
        return roots

    return write


@pytest.fixture
def repo(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that DVC takes for its own, which is the current one, without a server of MLflow's."""
    (stage.folder / ".dvc").mkdir()
    (stage.folder / ".dvc/config").touch()
    monkeypatch.chdir(stage.folder)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return stage.folder


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Put a shell script of that name into ``tmp_path / "bin"``, where programs are looked for first."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def write(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return write


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in for NVML, ``tools/nvml``."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler that is called cc, which the stand-in for NVML is built by")
    return nvml.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def gpu_host(nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Make this process, and those that it starts, one on a host of ``tools/nvml/hosts``, with more lines about it.

    ``devices`` is CUDA_VISIBLE_DEVICES. The build of torch says that it is for CUDA, and what it would tell of the GPUs
    is made up: it is the CPU's. Calls of NVML are written to the file that is returned.
    """

    def be(name: str, *lines: str, devices: str | None = None, cuda: str | None = nvml.CUDA, **environ: str) -> Path:
        text = nvml.HOSTS[name].read_text()
        file, calls = tmp_path / "gpu-host.txt", tmp_path / "nvml-calls.txt"
        file.write_text("\n".join([text, *lines, ""]))
        calls.unlink(missing_ok=True)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        settings = {**nvml.environ(nvml_library, file, cuda=cuda), "STAND_IN_NVML_LOG": str(calls), **environ}
        if devices is not None:
            settings["CUDA_VISIBLE_DEVICES"] = devices
        for key, value in settings.items():
            monkeypatch.setenv(key, value)
        monkeypatch.setattr(runpy, "run_path", runpy.run_path)
        runpy.run_path(str(nvml.TOLD / "sitecustomize.py"))  # as a process does that is started
        monkeypatch.setattr(facts, "_multiprocessors", lambda gpus: [108] * gpus)
        monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(nvml_library)))
        pynvml._nvmlGetFunctionPointer_cache.clear()
        return calls

    yield be
    pynvml._nvmlGetFunctionPointer_cache.clear()
