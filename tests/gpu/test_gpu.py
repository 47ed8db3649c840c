"""Trainings, clocks, staging and messages on real GPUs. One GPU is enough for most; two are oversubscribed on it."""

import json
import math
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import warnings
from pathlib import Path

import pytest
import torch

from conftest import MODEL_OF_TASK, small
from samebits.batch_split import BatchSplit
from samebits.hashes import sha256
from samebits.host import count_gpus, driver_facts, host_facts
from samebits.params import parse_params
from samebits.records.card import read_card
from samebits.records.run import Evaluation
from samebits.strategies.placement import Devices
from samebits.training import batches as feeding
from samebits.training.batches import Batches, load_data, on_device
from samebits.training.loop import warm_up
from samebits.training.meters import StepClock
from samebits.training.placement import place
from samebits.training.setup import Setup
from samebits.training.worker import make_worker

pytestmark = pytest.mark.gpus(1)


def params_of_net(stage, *, first="pass", added="0", **train):
    """Params of a model of one layer, with a statement before it and a term that is added to its result."""
    (stage.folder / "mine.py").write_text(
        "import os, sys, time, torch\nfrom torch import nn\n"
        "class Net(nn.Linear):\n"
        "    calls = 0\n"
        "    def forward(self, x):\n"
        "        Net.calls += 1\n"
        f"        {first}\n"
        f"        return super().forward(x) + {added}\n"
        "def make():\n    return Net(128, 10)\n"
    )
    return stage.write_params(small(model={"name": "mine:make", "source": "mine.py"}, **train))


@pytest.mark.shares_a_gpu
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
    single = stage.train_fresh(data, "single")
    run = stage.train_fresh(data, strategy, "--num-devices", str(count))
    placement = run.record.placement
    assert run.losses == pytest.approx(single.losses, rel=1e-4)
    assert placement.devices_used == count
    assert [label.kind for label in placement.labels] == ["oversubscribed"]
    assert placement.backend == (None if strategy == "dp" else "gloo")
    assert run.timing.speedup is None


@pytest.mark.gpus(2)
@pytest.mark.parametrize("task", list(MODEL_OF_TASK))
@pytest.mark.parametrize("strategy", ["dp", "ddp"])
def test_parity_on_several_gpus(task, strategy, stage, data_dir):
    params = stage.write_params(small(task, optimizer={"name": "sgd", "lr": 0.01}, repeats=2))
    data = data_dir(params)
    single = stage.train_fresh(data, "single")
    run = stage.train_fresh(data, strategy)
    placement, timing = run.record.placement, run.timing
    assert run.losses == pytest.approx(single.losses, rel=1e-4)
    assert placement.labels == ()
    assert placement.backend == (None if strategy == "dp" else "nccl")
    assert timing.speedup.median > 0
    assert timing.bound.median > 0
    assert run.record.first_unrepeated_step is None  # as NCCL is held to its ring
    assert len(timing.peak_memory_gib) == placement.devices_used
    assert all(peak and 0 < peak < 4 for peak in timing.peak_memory_gib.values())  # GiB, of models of a few MiB


NORMED = "from torch import nn\ndef make():\n    return nn.Sequential(nn.Linear(128, 10), nn.BatchNorm1d(10))\n"


@pytest.mark.gpus(2)
@pytest.mark.parametrize("synced", [True, False])
def test_batch_norms_over_several_gpus(synced, stage, data_dir):
    (stage.folder / "normed.py").write_text(NORMED)
    slow = {"name": "sgd", "lr": 0.01}
    params = small(model={"name": "normed:make"}, optimizer=slow, ddp={"sync_batchnorm": synced}, repeats=2)
    data = data_dir(stage.write_params(params))
    single, run = (stage.train_fresh(data, strategy) for strategy in ("single", "ddp"))
    assert [note.kind for note in run.record.notes if note.kind == "batch_norm"] == ([] if synced else ["batch_norm"])
    assert (run.losses == pytest.approx(single.losses, rel=1e-4)) is synced
    assert run.timing.speedup.median > 0


@pytest.mark.shares_a_gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("strategy", ["single", "dp", "ddp"])
def test_every_precision_under_every_strategy(precision, strategy, stage, data_dir):
    count = count_gpus() + 1
    raw = small("tokens", precision=precision, oversubscribe=True, clip_grad_norm=1.0)
    raw["train"]["global_batch_size"] = 16 * count
    raw["data"]["num_samples"] = 16 * 16 * count  # 16 steps on any host
    params = stage.write_params(raw)
    arguments = ["--num-devices", str(count)] if strategy != "single" else []
    run = stage.train_fresh(data_dir(params), strategy, *arguments)
    assert all(math.isfinite(loss) for loss in run.losses)
    assert run.losses[-1] < run.losses[0]
    older = float(driver_facts().gpus[0].compute_capability) < 8
    assert ("train.precision" in run.record.not_applied) == (precision == "tf32" and older)


@pytest.mark.parametrize("task", list(MODEL_OF_TASK))
def test_a_repeat_gives_the_same_bits(task, stage, data_dir):
    params = stage.write_params(small(task, repeats=2))
    for name in ("a", "b"):
        run = stage.train_fresh(data_dir(params), "single", out=name)
        assert run.record.first_unrepeated_step is None
    for file in ("losses.csv", "model.safetensors"):
        assert sha256(stage.folder / "a" / file) == sha256(stage.folder / "b" / file)


HAS_COMPILER = bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))  # where Triton looks
HAS_HEADERS = Path(sysconfig.get_path("include"), "Python.h").exists()


@pytest.mark.gpus(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_precisions_over_nccl(precision, stage, data_dir):
    """On GPUs of their own: with workers that share one, gloo takes NCCL's place."""
    params = stage.write_params(small("tokens", precision=precision, clip_grad_norm=1.0, repeats=2))
    run = stage.train_fresh(data_dir(params), "ddp")
    assert run.record.placement.backend == "nccl"
    assert run.losses[-1] < run.losses[0]
    assert run.record.first_unrepeated_step is None


@pytest.mark.gpus(2)
def test_a_rank_that_does_not_come_is_named(stage, data_dir):
    """NCCL ends the rank that waits."""
    # After the trial, ten steps of warm-up and two more.
    stays_away = "if Net.calls == 14 and os.environ.get('RANK') == '1': time.sleep(200)"
    params = params_of_net(stage, first=stays_away, timeout_s=10, num_devices=2)
    done = stage.fresh("train", "--strategy", "ddp", "--no-tracking", "--data-dir", str(data_dir(params)))
    assert done.returncode == 4, done.stderr
    assert "the worker of rank 1 did not answer the others" in done.stderr


@pytest.mark.skipif(not (HAS_COMPILER and HAS_HEADERS), reason="Triton needs gcc or clang, and Python's headers")
@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_compile(strategy, stage, data_dir):
    params = stage.write_params(small(compile=True, optimizer={"name": "sgd", "lr": 0.01}))
    plain = stage.folder / "plain.yaml"
    plain.write_text((stage.folder / "params.yaml").read_text().replace("compile: true", "compile: false"))
    data = data_dir(params)
    eager = stage.train_fresh(data, strategy, "--params", "plain.yaml", out="plain")
    assert stage.train_fresh(data, strategy).losses == pytest.approx(eager.losses, rel=1e-3)


@pytest.mark.parametrize(
    ("added", "code", "said"),
    [
        ("torch.empty(1 << 42, device=x.device)[0]", 3, "out of memory on "),
        ("torch.zeros(10)", 2, "the model and its batch are on different devices"),
    ],
)
def test_what_a_gpu_does_not_take_is_explained(added, code, said, stage, data_dir):
    params = params_of_net(stage, added=added)
    done = stage.fresh("train", "--strategy", "single", "--no-tracking", "--data-dir", str(data_dir(params)))
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.cuda_here
def test_the_clock_times_the_device_and_not_the_host():
    device = torch.device("cuda", 0)
    x = torch.randn(4096, 4096, device=device)
    x @ x  # or the first step is cuBLAS's start, in which a fast GPU's twenty steps are lost
    clock = StepClock(device)
    clock.start()
    began = time.perf_counter()
    for _ in range(20):
        x @ x
        clock.lap()
    launched = time.perf_counter() - began
    clock.stop()
    assert len(clock.step_seconds) == 20
    assert launched < 0.5 * clock.seconds  # the host waited for nothing
    assert sum(clock.step_seconds) == pytest.approx(clock.seconds, rel=0.2)


@pytest.mark.cuda_here
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_a_step_waits_for_the_device_as_seldom_as_the_rehearsal_says(numerics, data_dir):
    params = parse_params(small("images", numerics=[numerics]))
    folder = data_dir(params)
    placement, split = place("single", params, numerics, Devices(gpus=1, cores=1))
    worker = make_worker(placement, params.train)
    setup = Setup(params, numerics, read_card(folder / "card.json"), split=split, worker=worker)
    setup.enter_process()
    trainable = setup.trainable(setup.place(setup.build()), setup.batches(setup.load(folder)))
    warm_up(trainable, 3)
    trainable.step(0, 0.01)
    trainable.step(1, 0.01)
    made_again = trainable.numerics.state_dict().get("widened", 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            trainable.step(2, 0.01)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            torch.set_deterministic_debug_mode("default")
    waits = [str(one.message) for one in caught if "synchronizing CUDA operation" in str(one.message)]
    made_again = trainable.numerics.state_dict().get("widened", 0) - made_again
    assert len(waits) == (0 if numerics == "fast" else 1 + made_again), waits


@pytest.mark.cuda_here
def test_staged_batches_are_the_resident_ones(data_dir, monkeypatch):
    params = parse_params(small("images"))
    folder = data_dir(params)
    card, device = read_card(folder / "card.json"), torch.device("cuda", 0)
    split = BatchSplit(samples=64, shards=None, grad_accum_steps=2)

    def feed():
        data = on_device(load_data(folder, card, "train"), device)
        batches = Batches(data, card, split, rank=0, seed=0, device=device)
        fed = [batches.micro_batch(step, index) for step in range(10) for index in range(2)]
        return batches.resident, [tensor.cpu() for batch in fed for tensor in (batch.inputs, batch.targets)]

    resident, expected = feed()
    monkeypatch.setattr(feeding, "_DEVICE_SHARE", 0.0)
    staged, tensors = feed()
    assert (resident, staged) == (True, False)
    assert all(torch.equal(a, b) for a, b in zip(expected, tensors, strict=True))


@pytest.mark.cuda_here
def test_the_host_facts_name_the_gpus():
    facts = host_facts()
    assert len(facts.gpus) == count_gpus() == torch.cuda.device_count()
    for index, gpu in enumerate(facts.gpus):
        assert torch.cuda.get_device_name(index).startswith(gpu.name)  # CUDA may add the profile of a slice
        assert gpu.multiprocessors == torch.cuda.get_device_properties(index).multi_processor_count


def test_evaluation_runs_on_the_gpu(stage, data_dir):
    params = params_of_net(stage, first="sys.stderr.write(f'on {x.device} {self.training}\\n')")
    data = data_dir(params)
    stage.train_fresh(data, "single")
    done = stage.fresh("evaluate", "out", "--data-dir", str(data))
    assert done.returncode == 0, done.stderr
    evaluation = Evaluation.read(stage.folder / "reports/evaluation/out.json", made_by="evaluate.py")
    assert evaluation.samples == 200
    assert "on cuda:0 False" in done.stderr


def test_the_doctor_finds_the_gpus_and_tries_the_model_on_them(stage):
    stage.write_params(small())
    (stage.folder / ".dvc").mkdir()
    (stage.folder / ".dvc/config").touch()
    command = [sys.executable, "-c", "from samebits.cli import main; main()", "doctor", "--model", "--json"]
    done = subprocess.run(command, cwd=stage.folder, capture_output=True, text=True, timeout=240)
    listed = json.loads(done.stdout)["findings"]
    findings = {finding["name"]: finding for finding in listed}  # the last of each name
    assert findings["cuda"]["status"] == "ok"
    assert any(finding["name"] == "gpu 0" and "GiB" in finding["text"] for finding in listed)  # it may be hot as well
    assert "GPU" in findings["single"]["text"]
    assert findings["ddp"]["status"] == "ok"
