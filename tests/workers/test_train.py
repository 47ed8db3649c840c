"""Trainings run as a user runs them: the stage's script in a folder of its own."""

import json
import shutil
import subprocess
import sys
from typing import get_args

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from conftest import MODEL_OF_TASK, ROOT, small
from samebits.cli.commands import main
from samebits.hashes import sha256
from samebits.params.schema import NumericsName
from samebits.records.card import read_card
from samebits.records.run import read_losses
from samebits.strategies import STRATEGIES
from samebits.training.models.build import build_model
from samebits.training.weights import load_weights


def losses(folder):
    return read_losses(folder / "losses.csv")


def record(folder):
    return json.loads((folder / "run.json").read_text())


@pytest.mark.parametrize("task", list(MODEL_OF_TASK))
def test_parity_of_single_and_ddp(task, stage, data_dir):
    # A small learning rate: differences in the last bit must not have time to grow.
    optimizer = {"name": "sgd", "lr": 0.01}
    params = stage.write_params(small(task, grad_accum_steps=2, oversubscribe=True, optimizer=optimizer))
    data = data_dir(params)
    stage.train(data, "single")
    reference = losses(stage.folder / "runs/single-fast")
    assert len(reference) == 8
    for devices in (2, 4) if task == "vectors" else (2,):
        out = stage.folder / f"ddp{devices}"
        stage.train(data, "ddp", "--num-devices", str(devices), "--out-dir", str(out))
        assert losses(out) == pytest.approx(reference, rel=1e-5)
        run = record(out)
        assert run["placement"]["world_size"] == devices
        weights = 4 * run["model_parameters"]
        assert run["memory"]["samples"] == 64
        assert [device["weights"] for device in run["memory"]["devices"]] == [weights] * devices
        assert all(device["gradients"] >= weights for device in run["memory"]["devices"])  # in buckets, which stay


@pytest.mark.parametrize("numerics", get_args(NumericsName))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_loss_falls_under_every_strategy(strategy, numerics, stage, data_dir):
    """A wrapper whose optimizer trains nothing would give plausible figures otherwise."""
    params = stage.write_params(small(oversubscribe=True, epochs=4))
    stage.train(data_dir(params), strategy, "--numerics", numerics)
    values = losses(stage.folder / f"runs/{strategy}-{numerics}")
    assert values[-1] < 0.7 * values[0]


def test_dp_falls_back_without_cuda_and_says_so(stage, data_dir):
    if torch.cuda.is_available():
        pytest.skip("dp does not fall back on a host with CUDA")
    params = stage.write_params(small(repeats=2))
    data = data_dir(params)
    stage.train(data, "single")
    done = stage.train(data, "dp")
    assert "no CUDA device is visible" in done.stdout
    run = record(stage.folder / "runs/dp-fast")
    timing = json.loads((stage.folder / "runs/dp-fast/timing.json").read_text())
    assert [label["kind"] for label in run["placement"]["labels"]] == ["fallback"]
    assert run["placement"]["devices_used"] == 1
    assert timing["speedup"] is None
    single = record(stage.folder / "runs/single-fast")
    measured = [(run["measurement"]["chunk_seconds"], run["rounding"], run["breakdown"]) for run in (single, run)]
    assert all(measured[0])
    assert measured[1] == ({}, None, None)
    explained = CliRunner().invoke(main, ["explain", str(stage.folder / "runs/dp-fast")], prog_name="samebits")
    assert explained.exit_code == 2
    assert "PyTorch ran the plain module" in explained.stderr
    assert f"samebits explain {stage.folder}/runs/single-fast" in explained.stderr
    first, second = (sha256(stage.folder / f"runs/{name}-fast/model.safetensors") for name in ("single", "dp"))
    assert first == second


def test_a_repeat_gives_the_same_files(stage, data_dir):
    """Whether timed slices come after it or not."""
    for name, repeats in (("a", 2), ("b", 1)):
        model = {"name": "gpt", "kwargs": {"dropout": 0.1}}
        params = stage.write_params(small("tokens", model=model, repeats=repeats))
        stage.train(data_dir(params), "ddp", "--out-dir", name)
    for file in ("losses.csv", "model.safetensors"):
        assert sha256(stage.folder / "a" / file) == sha256(stage.folder / "b" / file)
    run = record(stage.folder / "a")
    assert run["first_unrepeated_step"] is None
    assert run["weights_sha256"] == sha256(stage.folder / "a/model.safetensors")
    assert set(run["measurement"]["chunk_seconds"]) == {"strategy", "single", "share", "together"}


NOISY_MODEL = """
import random, time
from torch import nn
from samebits.measuring import prolonging

prolonging.NARROW, prolonging.MOST_REPEATS = -1.0, 3  # it is never known well enough, however fast the host is

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(128, 10)

    def forward(self, x):
        time.sleep(0.01 * random.random())
        return self.inner(x)
"""


def test_ranks_prolong_a_noisy_measurement_together(stage, data_dir):
    (stage.folder / "noisy.py").write_text(NOISY_MODEL)
    model = {"name": "noisy:Net", "source": "noisy.py"}
    params = stage.write_params(small(model=model, num_devices=2, repeats=2, prolong_s=3600.0))
    done = stage.train(data_dir(params), "ddp")
    assert "note: slices were timed" in done.stdout
    measurement = record(stage.folder / "runs/ddp-fast")["measurement"]
    repeats = measurement["repeats"]
    assert (repeats["planned"], repeats["count"], repeats["stopped"]) == (1, 3, "most")
    assert {len(chunks) for chunks in measurement["chunk_seconds"].values()} == {3}


CPU_SETTINGS = [
    small("vectors", model={"name": "wide_mlp", "kwargs": {"hidden": [64, 64], "dropout": 0.1}}),
    small("vectors", optimizer={"name": "adamw", "lr": 0.01, "weight_decay": 0.1}),
    small("vectors", schedule={"name": "constant", "warmup_steps": 3}),
    small("vectors", clip_grad_norm=0.1, precision="bf16"),
    small("vectors", clip_grad_norm=0.1, precision="fp16"),
    small("tokens", precision="bf16"),
    small("images", precision="tf32"),
]


PLAIN = {}
"""Losses without a setting, by model."""


def plain_losses(raw, stage, data_dir):
    name = raw["model"]["name"]
    if name not in PLAIN:
        kwargs = {key: value for key, value in raw["model"].get("kwargs", {}).items() if key != "dropout"}
        params = stage.write_params({**small(raw["data"]["task"]), "model": {"name": name, "kwargs": kwargs}})
        stage.train(data_dir(params), "ddp")
        PLAIN[name] = losses(stage.folder / "runs/ddp-fast")
    return PLAIN[name]


@pytest.mark.parametrize("raw", CPU_SETTINGS, ids=[str(raw["train"]) for raw in CPU_SETTINGS])
def test_settings_that_a_cpu_can_do_change_the_losses(raw, stage, data_dir):
    plain = plain_losses(raw, stage, data_dir)
    params = stage.write_params(raw)
    stage.train(data_dir(params), "ddp")
    found = losses(stage.folder / "runs/ddp-fast")
    assert [loss > 0 for loss in found] == [True] * 8
    not_applied = record(stage.folder / "runs/ddp-fast")["not_applied"]
    assert ("train.precision" in not_applied) == (params.train.precision == "tf32")
    assert (found != plain) == (params.train.precision != "tf32")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_compile_trains_the_same_model_and_is_not_applied_under_dp(stage, data_dir):
    params = stage.write_params(small(compile=True))
    data = data_dir(params)
    for strategy in ("single", "dp", "ddp"):
        stage.train(data, strategy)
    dp = stage.folder / "runs/dp-fast"
    assert record(dp)["not_applied"] == {"train.compile": "dp_is_not_compiled"}
    for folder in (stage.folder / "runs/single-fast", stage.folder / "runs/ddp-fast"):
        assert losses(folder) == pytest.approx(losses(dp), rel=1e-4)
        assert record(folder)["not_applied"] == {}


def test_the_checkpoint_is_plain(stage, data_dir):
    params = stage.write_params(small("tokens"))
    data = data_dir(params)
    stage.train(data, "ddp")
    path = stage.folder / "runs/ddp-fast/model.safetensors"
    model = build_model(params.model, read_card(data / "card.json"), params.seed)
    model.load_state_dict(load_file(path), strict=True)
    assert model.head.weight is model.tokens.weight
    assert load_weights(model, path) == []


USER_MODEL = """
import torch
from torch import nn

class Output:
    def __init__(self, logits):
        self.logits = logits

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(128, width)
        self.outer = nn.Linear(width, 10)
        self.idle = nn.Parameter(torch.randn(3)) if width == 7 else None

    def forward(self, x):
        if self.inner.out_features == 5:
            return "nothing"
        if self.inner.out_features == 6:
            return self.inner(x)
        return Output(self.outer(self.inner(x).relu()))

def make(width):
    return Net(width)
"""


def user(width, **more):
    return {"name": "mine:make", "kwargs": {"width": width, **more}, "source": "mine.py"}


def test_a_users_factory(stage, data_dir):
    stage.write_model(USER_MODEL)
    data = data_dir(stage.write_params(small(model=user(32))))
    for strategy in ("single", "dp", "ddp"):
        stage.train(data, strategy)
    reference = losses(stage.folder / "runs/single-fast")
    assert losses(stage.folder / "runs/ddp-fast") == pytest.approx(reference, rel=1e-5)


@pytest.mark.parametrize(
    ("raw", "arguments", "code", "message"),
    [
        (small(model=user(7)), "ddp", 2, "no gradient reaches idle"),
        (small(model=user(5)), "single", 2, "the model returned str, expected a tensor"),
        (small(model=user(6)), "single", 2, "the model returned shape (64, 6) for 64 samples, expected (64, 10)"),
        (small(model=user(8, depth=2)), "single", 2,
         "model.kwargs.depth: unknown key, mine:make takes width. hint: remove it"),
        (small(model={"name": "mine:other", "source": "mine.py"}), "single", 2, "mine:other cannot be imported"),
        (small(model={"name": "mine:make", "source": "theirs.py"}), "single", 2,
         "model.source: theirs.py: no such file or folder"),
        (small(model={"name": "numpy:array", "source": "mine.py"}), "single", 2, "model.source: mine.py does not hold"),
        (small("regression", optimizer={"name": "sgd", "lr": 1e9}), "single", 2, "expected a finite number"),
        (small(), "ddp --num-devices 64", 3, "got 64, this host has"),
    ],
)  # fmt: skip
def test_mistakes_are_named(raw, arguments, code, message, stage, data_dir):
    stage.write_model(USER_MODEL)
    data = data_dir(stage.write_params(raw))
    done = stage("train", "--no-tracking", "--data-dir", str(data), "--strategy", *arguments.split())
    assert done.returncode == code
    assert message in done.stderr
    assert ". hint: " in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


TAKES_ROOTS = """
import torch
from torch import nn

class Roots(nn.Module):
    def forward(self, x):
        return (x * (x > 0)).sqrt()  # whose gradient is infinite at zero

def make(card):
    width = card.input_shape[0]
    return nn.Sequential(nn.Linear(width, 16), Roots(), nn.Linear(16, card.output_shape[0]))
"""


def test_exact_names_what_makes_infinity_on_each_rank(stage, data_dir):
    params = stage.write_params(small(model=stage.write_model(TAKES_ROOTS), numerics=["exact"], num_devices=2))
    done = stage("train", "--strategy", "ddp", "--numerics", "exact", "--data-dir", str(data_dir(params)))
    assert done.returncode == 2, done.stderr
    assert "infinite or not a number" in done.stderr
    assert "Roots in model.1: " in done.stderr
    assert "makes infinity of finite numbers (in the backward pass) (mine.py:7)" in done.stderr
    assert "hint: keep what it divides by" in done.stderr


def test_wrong_parameters_end_before_anything_is_made(stage):
    (stage.folder / "params.yaml").write_text("train: {epochs: 0}\n")
    stages = {file.stem for file in (ROOT / "pipeline").glob("*.py")} - {"host"}  # which asks the host alone
    for name in sorted(stages):
        done = stage(name, *(["--strategy", "single"] if name == "train" else []))
        assert done.returncode == 2
        assert done.stderr.startswith("error: params.yaml: train.epochs: got 0")
        assert len(done.stderr.splitlines()) == 1
    assert [path.name for path in stage.folder.iterdir()] == ["params.yaml"]


def test_static_graph_gives_way_to_accumulation(stage, data_dir):
    raw = small(grad_accum_steps=2, num_devices=2, oversubscribe=True, ddp={"static_graph": True})
    stage.train(data_dir(stage.write_params(raw)), "ddp")
    assert list(record(stage.folder / "runs/ddp-fast")["not_applied"]) == ["train.ddp.static_graph"]


RANDOM_MODEL = """
import random, numpy as np, torch
from torch import nn

def make():
    model = nn.Linear(128, 10)
    with torch.no_grad():
        model.bias += torch.from_numpy(np.random.randn(10)).float() + random.random() + {unseeded}
    return model
"""


@pytest.mark.parametrize(("unseeded", "same"), [("0", True), ("float(np.random.default_rng().random())", False)])
def test_numpys_and_pythons_own_draws_are_seeded_and_others_are_found(unseeded, same, stage, data_dir):
    params = stage.write_params(small(model=stage.write_model(RANDOM_MODEL.format(unseeded=unseeded))))
    for strategy in ("single", "dp"):
        stage.train(data_dir(params), strategy)
    first, second = (record(stage.folder / f"runs/{strategy}-fast")["initial_sha256"] for strategy in ("single", "dp"))
    assert (first == second) == same


WRITES_WEIGHTS = """
import os
import numpy as np
import torch
from pathlib import Path
from torch import nn

class Net(nn.Linear):
    def forward(self, x):
        Path(f"rank{os.environ['RANK']}.txt").write_text(repr(self.weight.double().sum().item()))
        return super().forward(x)

def make():
    model = Net(128, 10)
    with torch.no_grad():
        model.weight += float(np.random.default_rng().random())
    return model
"""


def test_ranks_train_one_model_whatever_each_ones_factory_gives(stage, data_dir):
    """Here it draws numbers of its own, as it may load weights that differ between machines."""
    model = stage.write_model(WRITES_WEIGHTS)
    params = stage.write_params(small(model=model, num_devices=2, oversubscribe=True, repeats=1))
    stage.train(data_dir(params), "ddp")
    first, second = ((stage.folder / f"rank{rank}.txt").read_text() for rank in (0, 1))
    assert first == second


CHANNELS_LAST = """
import torch
from torch import nn

def make():
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)
"""


def test_exact_trains_parameters_of_any_memory_format_to_the_same_bits(stage, data_dir):
    hashes = []
    for source in (CHANNELS_LAST, CHANNELS_LAST.replace(".to(memory_format=torch.channels_last)", "")):
        params = stage.write_params(small("images", model=stage.write_model(source)))
        stage.train(data_dir(params), "single", "--numerics", "exact", "--no-checkpoints")
        hashes.append(record(stage.folder / "runs/single-exact")["weights_sha256"])
    assert hashes[0] == hashes[1]


TIED = """
import torch
from torch import nn

class Net(nn.Module):  # as BERT's head: a bias under two names of which forward reads one, and a tied weight

    def __init__(self, tokens):
        super().__init__()
        self.embedding, self.decoder = nn.Embedding(tokens, 8), nn.Linear(8, tokens)
        self.decoder.weight = self.embedding.weight
        self.bias = self.decoder.bias

    def forward(self, x):
        return self.decoder(self.embedding(x).tanh())

def make(card):
    return Net(card.num_classes)
"""


def test_tied_parameters_train_to_the_same_bits_in_ranks(stage, data_dir):
    given = {"num_devices": 2, "oversubscribe": True, "repeats": 2}  # so that one device is timed beside the ranks
    params = stage.write_params(small("tokens", model=stage.write_model(TIED), **given))
    data, hashes = data_dir(params), set()
    for strategy in ("single", "ddp"):
        command = [sys.executable, stage.script("train"), "--strategy", strategy, "--numerics", "exact",
                   "--data-dir", data, "--no-tracking"]  # fmt: skip
        # A process of its own, which has imported no more of PyTorch than a user's has.
        done = subprocess.run(command, cwd=stage.folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        run = record(stage.folder / f"runs/{strategy}-exact")
        assert run["placement"]["world_size"] == (2 if strategy == "ddp" else 1)
        hashes.add(run["weights_sha256"])
    assert len(hashes) == 1


@pytest.mark.parametrize(("arguments", "steps"), [(("1000",), 8), (("3",), 3), (("3", "--no-checkpoints"), 3)])
def test_a_training_may_end_early_and_leaves_no_checkpoint(arguments, steps, stage, data_dir):
    params = stage.write_params(small(checkpoint_every_steps=1))
    done = stage.train(data_dir(params), "single", "--steps", *arguments)
    assert len(losses(stage.folder / "runs/single-fast")) == steps
    assert not (stage.folder / ".samebits/resume").exists()
    assert done.stdout.startswith("single-fast: ")
