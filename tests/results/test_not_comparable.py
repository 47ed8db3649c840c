"""A difference that follows from the split of a batch is named, and is told from another training."""

import json

import pytest
from click.testing import CliRunner

from conftest import Stage, small
from samebits.cli.commands import main

NET = """
import torch
from torch import nn

class Noisy(nn.Module):
    def forward(self, x):
        return x + 0.1 * torch.randn_like(x) if self.training else x

LAYERS = {
    "dropout": lambda: nn.Dropout(0.2),
    "noise": Noisy,
    "norm": lambda: nn.BatchNorm1d(16),
    "none": nn.Identity,
}

def make(kind):
    return nn.Sequential(nn.Linear(128, 16), LAYERS[kind](), nn.ReLU(), nn.Linear(16, 10))
"""


@pytest.fixture(scope="module")
def compared(tmp_path_factory, stage_server, data_dir):
    """The folder of a kind of layer, with three runs: one device, two devices, and two with another learning rate."""
    found = {}

    def compare(kind):
        if kind in found:
            return found[kind]
        stage = Stage(tmp_path_factory.mktemp(kind), stage_server, tmp_path_factory.mktemp("output"))
        (stage.folder / "mine.py").write_text(NET)
        for name, strategy, lr in (("single", "single", 0.1), ("ddp", "ddp", 0.1), ("other", "ddp", 0.101)):
            rate = {"name": "sgd", "lr": lr, "momentum": 0.9}
            settings = {"num_devices": 2, "oversubscribe": True, "repeats": 2, "optimizer": rate}
            params = stage.write_params(small(model={"name": "mine:make", "kwargs": {"kind": kind}}, **settings))
            arguments = ["--strategy", strategy, "--data-dir", str(data_dir(params)), "--out-dir", name]
            done = stage("train", *arguments, "--no-tracking")
            assert done.returncode == 0, done.stderr
        found[kind] = stage.folder
        return stage.folder

    return compare


WHY = {
    "none": "",
    "dropout": "random draws in forward (Dropout in model.1), other ones on each",
    "noise": "random draws in forward (Noisy in model.1), other ones on each",
    "norm": "BatchNorm (BatchNorm1d in model.1), which normalises by each device's",
}


@pytest.mark.parametrize(
    ("kind", "other", "grade", "same_draws"),
    [
        ("none", "ddp", "within tolerance", {None}),
        ("none", "other", "diverged", {None}),
        ("dropout", "ddp", "not comparable", {"within tolerance", "bitwise"}),
        ("dropout", "other", "diverged", {"diverged"}),
        ("noise", "ddp", "not comparable", {"within tolerance", "bitwise"}),
        ("noise", "other", "diverged", {"diverged"}),
        ("norm", "ddp", "not comparable", {None}),
    ],
)
def test_two_devices_against_one(kind, other, grade, same_draws, compared, monkeypatch):
    monkeypatch.chdir(compared(kind))
    found = json.loads(CliRunner().invoke(main, ["compare", "single", other, "--json"]).stdout)
    assert found["grade"] == grade
    assert (found["apart"] or "").startswith(WHY[kind])
    assert (found["apart"] is None) == (kind == "none")
    assert (found["same_draws"] and found["same_draws"]["grade"]) in same_draws
    done = CliRunner().invoke(main, ["compare", "single", other, "--require", "tolerance"])
    assert done.exit_code == (0 if grade == "within tolerance" else 1)
    lines = done.stdout.splitlines()
    assert lines[0].split(" ", 1)[1] == grade
    assert any(line.strip().removeprefix("not comparable: ").startswith(WHY[kind]) for line in lines)
    said = "with the same draws for the same samples, the first 8 steps: "
    assert any(said in line for line in lines) == (None not in same_draws)
