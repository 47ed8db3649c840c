"""Trainings and operations on CUDA tensors without a GPU: PyTorch's host code runs, its kernels do nothing."""

from pathlib import Path

import pytest

import launches
import stand_in
from conftest import ROOT
from steps_probe import BROKEN, BROKEN_CASES, CASES

pytestmark = [pytest.mark.rehearsal, pytest.mark.slow]
PAGE = ROOT / "docs" / "concepts" / "rehearsal.md"

ONE_WAIT = {"numerics/exact/windows.py:settle": 1}
"""Where the host waits for the device in an exact step: for the magnitudes that decide whether the step stands."""

FOUND = {
    "constant on the CPU: fast fp32": "RuntimeError: Expected all tensors to be on the same device",
    "constant on the CPU: exact fp32": "RuntimeError: Expected all tensors to be on the same device",
    "product of integers: fast fp32": "NotImplementedError: \"addmm_cuda\" not implemented for 'Long'",
    "product of integers: exact fp32": None,
    "adaptive pooling: fast fp32": "RuntimeError: adaptive_avg_pool2d_backward_cuda does not have a deterministic",
    "adaptive pooling: exact fp32": None,
    "reads a value: fast fp32": None,
    "reads a value: exact fp32": None,
}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if why := stand_in.why_not():
        pytest.skip(why)
    return stand_in.build(tmp_path_factory.mktemp("stand-in"))


@pytest.fixture(scope="module")
def steps(library):
    """Of each training by its case: the error or None, and where a step waited for the device."""
    return stand_in.run(library, "steps_probe.py")


@pytest.fixture(scope="module")
def operations(library):
    """Of each operation of PyTorch's database: samples that were computed, and errors; the exact versions reached."""
    return stand_in.run(library, "operations_on_cuda.py")


@pytest.mark.parametrize("case", CASES)
def test_a_training_runs(case, steps):
    assert steps[case]["error"] is None, steps[case]["trace"]


@pytest.mark.parametrize("case", [case for case in CASES if "fast" in case])
def test_a_fast_step_never_waits_for_the_device(case, steps):
    assert steps[case]["waits"] == {} == steps[case]["waits_in_new_epoch"]


@pytest.mark.parametrize("case", [case for case in CASES if "exact" in case])
def test_an_exact_step_waits_for_the_device_once(case, steps):
    assert steps[case]["waits"] == ONE_WAIT == steps[case]["waits_in_new_epoch"]


@pytest.mark.parametrize("case", BROKEN_CASES)
def test_it_finds_what_only_a_gpu_would_show(case, steps):
    error, expected = steps[case]["error"], FOUND[case.removesuffix(" single sgd")]
    assert error == expected or error.startswith(expected)


def test_a_value_that_is_read_is_a_wait(steps):
    """One in forward in each micro-batch under fast; under exact in each shard."""
    case = "reads a value: {} fp32 single sgd"
    assert sum(steps[case.format("fast")]["waits"].values()) == 1
    assert sum(steps[case.format("exact")]["waits"].values()) == 1 + 4
    assert set(BROKEN) == {entry.partition(":")[0] for entry in FOUND}


def test_operations_that_are_exact_on_the_cpu_run_on_cuda(operations):
    assert {name: entry["errors"] for name, entry in operations["operations"].items() if entry["errors"]} == {}


def test_every_exact_version_was_reached_on_cuda(operations):
    assert set(operations["known"]) - set(operations["reached"]) == set()


def test_the_list_is_what_this_pytorch_refuses(library):
    lines = (Path(__file__).parent / "refused.txt").read_text(encoding="utf-8").splitlines()
    assert stand_in.run(library, "refused_on_cuda.py") == lines


@pytest.mark.timeout(3600)  # 120 trainings, on a busy host
def test_no_launch_is_added_unnoticed(library):
    """The page says how many kernels a step launches; ``launches.py --write`` renews it."""
    table = launches.table_of(stand_in.run(library, "launches_probe.py", *launches.CASES))
    assert table in PAGE.read_text(encoding="utf-8"), table


def test_the_page_has_the_figures(steps, operations):
    page = PAGE.read_text(encoding="utf-8")
    computed = [entry["computed"] for entry in operations["operations"].values() if entry["computed"]]
    versions, ran = len(operations["reached"]), sum(steps[case]["error"] is None for case in CASES)
    for figure in (f"{ran} trainings", f"{len(computed)} operations", f"{sum(computed)} samples", f"{versions} exact"):
        assert figure in page, figure
