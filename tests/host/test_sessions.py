"""On a host with GPUs, only a session of ``tests/gpu`` sees them."""

import subprocess
import sys

import pytest

from conftest import ROOT


def session(*arguments):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "120", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("paths", "host", "lines", "devices", "said"),
    [
        (["tests/gpu"], "A", (), None, "host: 4 GPUs visible"),
        (["tests/gpu/"], "A", (), "1,2", "host: 2 GPUs visible"),
        (["tests/gpu"], "E", (), "MIG-00000001-0000-5000-8000-000000000000", "host: 1 GPUs visible"),
        (["tests/gpu"], "E", (), "MIG-gone", "host: 0 GPUs visible"),
        (["tests/gpu"], "A", ("gpu 2", "fails all GPU_IS_LOST"), None, "host: no GPUs: GPU 2 cannot be read"),
        (["tests/gpu"], "A", ("driver 550.54", "cuda 12.4"), None, "driver 550.54 runs up to CUDA 12.4"),
        (["tests/gpu", "tests/training"], "A", (), None, "host: 0 GPUs visible"),
        ([], "A", ("gpu 2", "fails all GPU_IS_LOST"), None, "host: 0 GPUs visible"),
    ],
)
def test_who_sees_gpus(paths, host, lines, devices, said, gpu_host):
    gpu_host(host, *lines, devices=devices)
    done = session(*paths, "--verbose", "--verbose", "--ignore-glob=*.py")  # the header, and no test
    assert said in done.stdout, done.stdout + done.stderr
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED


def test_a_test_that_takes_a_cpu_for_granted_passes_beside_gpus(gpu_host):
    """With the GPUs visible, this test would place its references on CUDA, which is not there."""
    gpu_host("A")
    done = session("tests/measuring/test_slices.py", "-k", "test_slices_repeat")
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout
