"""What a launcher sees of its workers, and what a worker makes of an end that is nobody's failure."""

import errno
import faulthandler
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from conftest import wait_for
from samebits.errors import HostError, Interrupted, WorkerError
from samebits.workers.processes import Ranks, _is_stopped, launch
from samebits.workers.rank import Reports, failures_reported


def test_a_process_is_running_stopped_or_gone():
    process = subprocess.Popen(["sleep", "60"])
    assert not _is_stopped(process)
    os.kill(process.pid, signal.SIGSTOP)
    wait_for(lambda: _is_stopped(process))
    process.kill()
    process.wait()
    assert not _is_stopped(process)


@pytest.mark.parametrize(
    ("raised", "expected"), [(KeyboardInterrupt(), KeyboardInterrupt), (Interrupted(signal.SIGTERM), SystemExit)]
)
def test_a_signal_is_no_failure(raised, expected):
    reporter = SimpleNamespace(failure=lambda error: pytest.fail("it was reported"))
    with pytest.raises(expected) as caught, failures_reported(reporter, lambda error: error):
        raise raised
    if expected is SystemExit:
        assert caught.value.code == 143


def test_a_worker_that_cannot_be_started_is_the_hosts_fault(monkeypatch):
    def refuse():
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    with pytest.raises(HostError, match="a worker cannot be started: Resource temporarily unavailable"):
        launch(lambda reporter: None, 2)


@pytest.mark.parametrize(
    ("signum", "name", "hint"),
    [
        (signal.SIGSEGV, "SIGSEGV", "--shm-size or --ipc=host, or set NCCL_CUMEM_HOST_ENABLE=0"),
        (signal.SIGBUS, "SIGBUS", "--shm-size or --ipc=host"),
        (40, "signal 40", "--debug"),
    ],
)
def test_a_worker_may_be_ended_by_any_signal(signum, name, hint):
    with pytest.raises(WorkerError, match=f"the worker of rank 0 was ended by {name}.* hint: .*{hint}"):
        launch(lambda reporter: (faulthandler.disable(), os.kill(os.getpid(), signum)), 1)


@pytest.mark.parametrize(
    ("given", "several", "expected"),
    [
        ({}, False, {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}),
        ({}, True, {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": None, "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}),
        (dict.fromkeys(["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"], ""), False,
         {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}),
        (MINE := {"NCCL_SOCKET_IFNAME": "eth1", "GLOO_SOCKET_IFNAME": "eth2", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
                  "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, False, MINE),
        (MINE, True, MINE),
    ],
)  # fmt: skip
def test_what_a_worker_is_told_of_its_network(given, several, expected, tmp_path, monkeypatch):
    """One machine needs no other interface than loopback."""
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    told = tmp_path / "told"

    def work(reporter):
        told.write_text(json.dumps({name: os.environ.get(name) for name in expected}))

    launch(work, Ranks(range(1), 1, {"GLOO_SOCKET_IFNAME": "eth0"} if several else None))
    assert json.loads(told.read_text()) == expected


DRIVER = """
static int started;
int cuInit(unsigned flags) { started = 1; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return started ? 0 : 3; }
"""
FORKING = """
import ctypes, sys
from samebits.errors import HostError
from samebits.host import cuda_has_started
from samebits.workers.processes import launch

def work(reporter):
    print("a worker", cuda_has_started(), flush=True)

launch(work, 1)
driver = ctypes.CDLL(sys.argv[1])
launch(work, 1)
driver.cuInit(0)
try:
    launch(work, 1)
except HostError as error:
    print(error.message)
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler that is called cc")
@pytest.mark.parametrize("devices", [None, "0", ""])
def test_workers_are_not_forked_where_cuda_has_started(devices, tmp_path, monkeypatch):
    """Some package may have called the driver, which torch does not know; without GPUs that does no harm."""
    (tmp_path / "driver.c").write_text(DRIVER)
    library = tmp_path / "libcuda.so.580.95.05"
    options = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library)]
    subprocess.run(["cc", *options, str(tmp_path / "driver.c")], check=True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if devices is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    done = subprocess.run([sys.executable, "-c", FORKING, str(library)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    last = "a worker True" if devices == "" else "CUDA has started in the process that forks the workers, which then"
    assert done.stdout.splitlines()[:2] == ["a worker False"] * 2
    assert done.stdout.splitlines()[2].startswith(last)


def test_a_failure_that_cannot_be_written_is_said(tmp_path, capsys):
    """As on a full disk for temporary files; the launcher sees the exit code alone."""
    reports = Reports(tmp_path / "gone", 1)
    reporter = reports.of(0)
    reporter.failure(WorkerError("what happened", hint="what to do"))
    reporter.show_stacks()
    first, second = capsys.readouterr().err.splitlines()
    assert first == "rank 0: what happened. hint: what to do"
    assert second == f"rank 0: {tmp_path / 'gone'}: No such file or directory"
    assert reports.failed() == {}


@pytest.mark.parametrize(
    ("steps", "blamed"),
    [
        ((5, 3), "the worker of rank 1 did not answer the others at step 3: NCCL ended a rank that waited too long"),
        ((5, 5), "the worker of rank 0 was ended by SIGABRT at step 5"),
        ((3, 5), "the worker of rank 0 was ended by SIGABRT at step 3"),
    ],
)
def test_whom_an_abort_is_put_down_to(steps, blamed, tmp_path):
    """NCCL aborts the rank that waits; the one to blame is behind."""

    there = tmp_path / "there"

    def work(reporter):
        rank = int(os.environ["RANK"])
        reporter.at("training", steps[rank])
        if rank == 0:
            wait_for(there.exists)
            faulthandler.disable()  # pytest's
            os.abort()
        there.touch()
        time.sleep(600)

    with pytest.raises(WorkerError) as caught:
        launch(work, 2)
    assert caught.value.message == blamed
