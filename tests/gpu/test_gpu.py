"""Trainings, clocks, staging and messages on real GPUs. One GPU is enough for most; two are oversubscribed on it."""

import json
import math
import subprocess
import sys

import pytest
import torch

from conftest import MODEL_OF_TASK, small
from samebits.data import batches as feeding
from samebits.data.batches import Batches, equal_parts, load_split, on_device
from samebits.data.card import read_card
from samebits.files import sha256
from samebits.host import count_gpus, host_facts
from samebits.params import parse_params
from samebits.records import read_losses
from samebits.timing import StepClock

pytestmark = pytest.mark.gpus(1)


def run_stage(stage, strategy, data, *arguments, out=None):
    """In a fresh interpreter: the warm one is forked, and its children may use CUDA, but it is not how a user runs."""
    out = out or f"runs/{strategy}-fast"
    options = ["--strategy", strategy, "--no-tracking", "--data-dir", str(data), "--out-dir", out, *arguments]
    done = stage.fresh("train", *options)
    assert done.returncode == 0, done.stderr
    folder = stage.folder / out
    losses = read_losses(folder / "losses.csv")
    return losses, json.loads((folder / "run.json").read_text()), json.loads((folder / "timing.json").read_text())


@pytest.mark.parametrize("task", list(MODEL_OF_TASK))
@pytest.mark.parametrize("strategy", ["dp", "ddp"])
def test_parity_on_one_shared_gpu(task, strategy, stage, data_dir):
    """Two devices that are one: real wrappers, labelled, never a speed-up."""
    optimizer = {"name": "sgd", "lr": 0.01}
    count = count_gpus() + 1
    raw = small(task, oversubscribe=True, optimizer=optimizer, repeats=2)
    raw["train"]["global_batch_size"] = 16 * count
    params = stage.write_params(raw)
    data = data_dir(params)
    expected, _, _ = run_stage(stage, "single", data)
    losses, run, timing = run_stage(stage, strategy, data, "--num-devices", str(count))
    assert losses == pytest.approx(expected, rel=1e-4)
    assert run["placement"]["devices_used"] == count
    assert [label["kind"] for label in run["placement"]["labels"]] == ["oversubscribed"]
    assert run["placement"]["backend"] == (None if strategy == "dp" else "gloo")
    assert timing["speedup"] is None


@pytest.mark.gpus(2)
@pytest.mark.parametrize("strategy", ["dp", "ddp"])
def test_parity_on_several_gpus(strategy, stage, data_dir):
    params = stage.write_params(small(optimizer={"name": "sgd", "lr": 0.01}, repeats=2))
    data = data_dir(params)
    expected, _, _ = run_stage(stage, "single", data)
    losses, run, timing = run_stage(stage, strategy, data)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert run["placement"]["labels"] == []
    assert run["placement"]["backend"] == (None if strategy == "dp" else "nccl")
    assert timing["speedup"]["median"] > 0
    assert timing["bound"]["median"] > 0
    assert len(timing["peak_memory_gib"]) == run["placement"]["devices_used"]


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("strategy", ["single", "dp", "ddp"])
def test_every_precision_under_every_strategy(precision, strategy, stage, data_dir):
    count = count_gpus() + 1
    raw = small("tokens", precision=precision, oversubscribe=True, clip_grad_norm=1.0)
    raw["train"]["global_batch_size"] = 16 * count
    params = stage.write_params(raw)
    arguments = ["--num-devices", str(count)] if strategy != "single" else []
    losses, run, _ = run_stage(stage, strategy, data_dir(params), *arguments)
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0]
    assert run["not_applied"].get("train.precision") is None


@pytest.mark.parametrize("task", list(MODEL_OF_TASK))
def test_a_repeat_gives_the_same_bits(task, stage, data_dir):
    params = stage.write_params(small(task, repeats=2))
    for name in ("a", "b"):
        _, run, _ = run_stage(stage, "single", data_dir(params), out=name)
        assert run["first_unrepeated_step"] is None
    for file in ("losses.csv", "model.safetensors"):
        assert sha256(stage.folder / "a" / file) == sha256(stage.folder / "b" / file)


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_compile(strategy, stage, data_dir):
    params = stage.write_params(small(compile=True, optimizer={"name": "sgd", "lr": 0.01}))
    plain = stage.folder / "plain.yaml"
    plain.write_text((stage.folder / "params.yaml").read_text().replace("compile: true", "compile: false"))
    data = data_dir(params)
    expected, _, _ = run_stage(stage, strategy, data, "--params", "plain.yaml", out="plain")
    losses, _, _ = run_stage(stage, strategy, data)
    assert losses == pytest.approx(expected, rel=1e-3)


def test_out_of_memory_is_explained(stage, data_dir):
    (stage.folder / "mine.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x) + torch.empty(1 << 42, device=x.device)[0]\n"
        "def make():\n    return Net(128, 10)\n"
    )
    params = stage.write_params(small(model={"name": "mine:make", "source": "mine.py"}))
    done = stage.fresh("train", "--strategy", "single", "--no-tracking", "--data-dir", str(data_dir(params)))
    assert done.returncode == 3
    assert "out of memory on " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_on_the_wrong_device_is_named(stage, data_dir):
    (stage.folder / "mine.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x) + torch.zeros(10)\n"
        "def make():\n    return Net(128, 10)\n"
    )
    params = stage.write_params(small(model={"name": "mine:make", "source": "mine.py"}))
    done = stage.fresh("train", "--strategy", "single", "--no-tracking", "--data-dir", str(data_dir(params)))
    assert done.returncode == 2
    assert "the model and its batch are on different devices" in done.stderr


def test_the_clock_times_the_device_and_not_the_host():
    device = torch.device("cuda", 0)
    x = torch.randn(4096, 4096, device=device)
    clock = StepClock(device)
    clock.start()
    for _ in range(20):
        x @ x
        clock.lap()
    clock.stop()
    assert len(clock.step_seconds) == 20
    assert sum(clock.step_seconds) == pytest.approx(clock.seconds, rel=0.2)


def test_staged_batches_are_the_resident_ones(data_dir, monkeypatch):
    params = parse_params(small("images"))
    folder = data_dir(params)
    card, device = read_card(folder / "card.json"), torch.device("cuda", 0)

    def feed():
        data = on_device(load_split(folder, card, "train"), device)
        made = Batches(data, card, seed=0, global_batch_size=64, layout=equal_parts(64, accum=2), device=device)
        batches = [made.micro_batch(step, index) for step in range(10) for index in range(2)]
        return made.resident, [tensor.cpu() for batch in batches for tensor in (batch.inputs, batch.targets)]

    resident, expected = feed()
    monkeypatch.setattr(feeding, "_DEVICE_SHARE", 0.0)
    staged, found = feed()
    assert (resident, staged) == (True, False)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_the_host_facts_name_the_gpus():
    facts = host_facts()
    assert len(facts["gpus"]) == count_gpus() == torch.cuda.device_count()
    for index, gpu in enumerate(facts["gpus"]):
        assert gpu["name"] == torch.cuda.get_device_name(index)
        assert gpu["multiprocessors"] == torch.cuda.get_device_properties(index).multi_processor_count


def test_evaluation_runs_on_the_gpu(stage, data_dir):
    params = stage.write_params(small())
    data = data_dir(params)
    run_stage(stage, "single", data)
    done = stage.fresh("evaluate", "--strategy", "single", "--data-dir", str(data))
    assert done.returncode == 0, done.stderr
    assert json.loads((stage.folder / "runs/single-fast/evaluation.json").read_text())["samples"] == 200


def test_the_doctor_finds_the_gpus_and_tries_the_model_on_them(stage):
    stage.write_params(small())
    (stage.folder / ".dvc").mkdir()
    (stage.folder / ".dvc/config").touch()
    command = [sys.executable, "-c", "from samebits.cli import main; main()", "doctor", "--model", "--json"]
    done = subprocess.run(command, cwd=stage.folder, capture_output=True, text=True, timeout=240)
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert found["cuda"]["status"] == "ok"
    assert "GiB" in found["gpu 0"]["text"]
    assert "GPU" in found["single"]["text"]
    assert found["ddp"]["status"] == "ok"
