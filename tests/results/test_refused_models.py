"""A model that exact refuses is a row of the comparison, and the pipeline goes on."""

import json

import pytest
from click.testing import CliRunner

from conftest import small
from samebits.cli.commands import main
from samebits.errors import RefusedError
from samebits.params import parse_params

NET = """
import torch
from torch import nn

class Bessel(nn.Module):
    def forward(self, x):
        return torch.special.i0(x)

def make(bessel=True):
    return nn.Sequential(nn.Linear(128, 8), Bessel() if bessel else nn.LayerNorm(8), nn.Linear(8, 10))
"""
SAID = "model.1 (Bessel): prims::bessel_i0: it has no exact version"


@pytest.fixture
def project(stage):
    """A pipeline that has run up to its trainings, with these numerics."""
    (stage.folder / "mine.py").write_text(NET)

    def make(numerics):
        raw = small(model={"name": "mine:make", "kwargs": {"bessel": True}}, numerics=numerics, strategies=["single"])
        stage.write_params(parse_params(raw).model_dump(mode="json"))
        for name in ("host", "prepare"):
            assert stage(name).returncode == 0
        return stage

    return make


def train(stage, numerics, **environ):
    return stage("train", "--strategy", "single", "--numerics", numerics, "--no-tracking", **environ)


def test_the_pipeline_goes_on_and_shows_what_was_refused(project, monkeypatch):
    stage = project(["fast", "exact"])
    assert train(stage, "fast", DVC_STAGE="train").returncode == 0
    done = train(stage, "exact", DVC_STAGE="train")
    assert done.returncode == 0, done.stderr
    assert f"single-exact: refused: exact: {SAID} (mine.py:7)" in done.stderr
    assert json.loads((stage.folder / "runs/single-exact/timing.json").read_text())["refused"] == "Bessel in model.1"
    done = stage("evaluate")
    assert done.stdout.splitlines()[1] == "single-exact: refused: Bessel in model.1"
    done = stage("compare", "--no-tracking")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((stage.folder / "reports/comparison.json").read_text())["refused"]
    assert (row["run"], row["what"]) == ("single-exact", "Bessel in model.1")
    text = (stage.folder / "reports/comparison.md").read_text()
    assert "| single-exact | – | – | – | – | – | – | – | – | refused: Bessel in model.1 | – |" in text
    answer = f"Same model in exact numerics: refused, for single-exact: {SAID} (mine.py:7). To get an answer, "
    assert answer in text
    assert answer in (stage.folder / "reports/index.html").read_text()
    assert "exact: refused, because of Bessel in model.1; " in " ".join(done.stdout.split())
    monkeypatch.chdir(stage.folder)
    done = CliRunner().invoke(main, ["compare", "runs/single-fast", "runs/single-exact"])
    assert done.exit_code == 2
    assert "runs/single-exact: exact refused this model: model.1 (Bessel)" in done.stderr


@pytest.mark.parametrize(("numerics", "environ"), [(["exact"], {"DVC_STAGE": "train"}), (["fast", "exact"], {})])
def test_exact_alone_or_trained_by_hand_is_an_error_before_any_training(numerics, environ, project):
    stage = project(numerics)
    done = train(stage, "exact", **environ)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: exact: {SAID}")
    assert not (stage.folder / "runs/single-exact/run.json").exists()


def test_what_is_older_than_the_params_is_not_shown(project, monkeypatch):
    stage = project(["fast"])
    assert train(stage, "fast").returncode == 0
    for name in ("evaluate", "compare"):
        assert stage(name, *(["--no-tracking"] if name == "compare" else [])).returncode == 0
    raw = small(model={"name": "mine:make", "kwargs": {"bessel": False}}, strategies=["single"])
    stage.write_params(parse_params(raw).model_dump(mode="json"))
    monkeypatch.chdir(stage.folder)
    for command in ("explain", "report"):
        done = CliRunner().invoke(main, [command])
        said = "was made with model.kwargs.bessel True, and the params say False. hint: run `dvc repro`, or"
        assert (done.exit_code, said in done.stderr) == (2, True), done.stderr
    assert CliRunner().invoke(main, ["report", "reports/comparison.json"]).exit_code == 0


@pytest.mark.parametrize(
    ("error", "message", "what"),
    [
        (
            RefusedError("bn: no", hint="h", at="model.stem.1", kind="BatchNorm2d"),
            "exact: model.stem.1 (BatchNorm2d): bn: no",
            "BatchNorm2d in model.stem.1",
        ),
        (RefusedError("fft: no", hint="h", kind="Net"), "exact: Net: fft: no", "Net"),
        (RefusedError("written", hint="h", at="model.seen"), "exact: model.seen: written", "model.seen"),
        (RefusedError("shard 0: no", hint="h"), "exact: shard 0: no", "shard 0"),
    ],
)
def test_a_refusal_in_few_words(error, message, what):
    assert (error.message, error.what) == (message, what)
