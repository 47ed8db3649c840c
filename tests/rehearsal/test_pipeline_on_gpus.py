"""The whole pipeline as on a host with two GPUs: NVML's stand-in lists them, and CUDA's runs PyTorch's host code."""

import json
import os
import subprocess
import sys
from itertools import product

import pytest
from ruamel.yaml import YAML

import nvml
import stand_in
from conftest import ROOT, small
from samebits.params import parse_params
from samebits.records.run import read_run
from samebits.results.comparison import Comparison

pytestmark = [pytest.mark.rehearsal, pytest.mark.slow]
STRATEGIES, NUMERICS = ("single", "dp", "ddp"), ("fast", "exact")


@pytest.fixture(scope="module")
def call(tmp_path_factory):
    """Run one of the kit's scripts, or its command, on that host."""
    if why := stand_in.why_not():
        pytest.skip(why)
    folder, built = tmp_path_factory.mktemp("pipeline"), tmp_path_factory.mktemp("libraries")
    cuda, listing = stand_in.build(built), nvml.build(built)
    environ = {
        **os.environ,
        **stand_in.SETTINGS,
        "LD_PRELOAD": str(cuda),
        "LD_LIBRARY_PATH": str(listing.parent),
        "STAND_IN_NVML": str(nvml.HOSTS["A"]),
        "CUDA_VISIBLE_DEVICES": "0,1",
        "PYTHONPATH": f"{stand_in.NO_RESULTS}:{ROOT / 'src'}",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
    }
    params = parse_params(small(numerics=list(NUMERICS), repeats=2))
    YAML().dump(params.model_dump(mode="json"), folder / "params.yaml")
    (folder / ".dvc").mkdir()
    (folder / ".dvc/config").touch()

    def call(name, *arguments):
        script = [str(ROOT / "pipeline" / f"{name}.py")]
        command = ["-c", "from samebits.cli import main; main()", name] if name == "doctor" else script
        return subprocess.run(
            [sys.executable, *command, *arguments], cwd=folder, env=environ, capture_output=True, text=True
        )

    call.folder = folder
    return call


@pytest.fixture(scope="module")
def pipeline(call):
    """The folder of a pipeline that has run to its end."""
    trainings = [("train", "--strategy", strategy, "--numerics", numerics, "--no-tracking")
                 for numerics, strategy in product(NUMERICS, STRATEGIES)]  # fmt: skip
    for command in [("host",), ("prepare",), *trainings, ("evaluate",), ("compare",)]:
        done = call(*command)
        assert done.returncode == 0, (command, done.stderr)
        assert "Traceback" not in done.stderr
    return call.folder


def test_the_host_is_described(pipeline):
    facts = json.loads((pipeline / "host.json").read_text())
    assert [gpu["multiprocessors"] for gpu in facts["gpus"]] == [108, 108]
    assert {gpu["name"] for gpu in facts["gpus"]} == {"NVIDIA A100-SXM4-80GB"}


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize(
    ("strategy", "devices", "backend"), [("single", (0,), None), ("dp", (0, 1), None), ("ddp", (0, 1), "nccl")]
)
def test_both_gpus_are_used(strategy, numerics, devices, backend, pipeline):
    run = read_run(pipeline / "runs" / f"{strategy}-{numerics}")
    placement = run.record.placement
    assert (placement.device_type, placement.devices, placement.backend) == ("cuda", devices, backend)
    assert placement.labels == ()
    assert [note.kind for note in placement.notes] == (["ring"] if (strategy, numerics) == ("ddp", "fast") else [])
    assert len(run.timing.peak_memory_gib) == len(devices)
    assert (run.timing.speedup is None) == (strategy == "single")
    assert (run.timing.bound is None) == (strategy == "single")
    usage = run.record.usage
    assert [device.index for device in usage.training.devices] == list(devices)
    assert (usage.roof is None) == (numerics == "exact")
    assert usage.roof is None or usage.roof.problem is None


def test_the_comparison_has_every_run(pipeline):
    rows = Comparison.read(pipeline / "reports/comparison.json", made_by="compare").rows
    assert [(row.name, row.devices_used) for row in rows] == [
        (f"{strategy}-{numerics}", 1 if strategy == "single" else 2)
        for numerics, strategy in product(NUMERICS, STRATEGIES)
    ]
    assert (pipeline / "reports/index.html").exists()


def test_the_doctor_tries_the_model_on_them(pipeline, call):
    done = call("doctor", "--model", "--json")
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    for name in ("gpu 0", "gpu 1", "peer access", "single", "dp", "ddp", "exact"):
        assert findings[name]["status"] == "ok", findings[name]
    assert "GPU 1: 64 x 64 ones times themselves gave 0.0" in findings["cuda"]["text"]  # and so it sees through this
