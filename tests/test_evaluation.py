import pytest
import torch
from torch import nn
from torch.nn import functional as F

from conftest import MODEL_OF_TASK, small
from samebits.data.batches import load_split, model_inputs
from samebits.data.card import read_card
from samebits.evaluation import evaluate
from samebits.models.build import build_model
from samebits.numerics.fast import FastNumerics
from samebits.params import parse_params


def numerics_of(card):
    return FastNumerics(parse_params(small()).train, torch.device("cpu"), card.loss)


@pytest.mark.parametrize("batch_size", [1, 7, 64, 199, 200, 1000])
@pytest.mark.parametrize("task", list(MODEL_OF_TASK))
def test_each_sample_counts_once_whatever_the_batches(task, batch_size, data_dir):
    params = parse_params(small(task))
    folder = data_dir(params)
    card = read_card(folder / "card.json")
    model = build_model(params.model, card, 0)
    data = load_split(folder, card, "test")
    with torch.no_grad():
        outputs = model.eval()(model_inputs(data[0], card))
    if card.loss == "mse":
        expected, right = F.mse_loss(outputs.double(), data[1].double()).item(), None
    else:
        expected = F.cross_entropy(outputs.double().flatten(0, -2), data[1].flatten()).item()
        right = (outputs.argmax(-1) == data[1]).double().mean().item()
    found = evaluate(model, numerics_of(card), data, card, batch_size=batch_size, device=torch.device("cpu"))
    assert found["samples"] == 200
    assert found["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert found["accuracy"] == (right if right is None else pytest.approx(right, abs=2 / 200))
    assert found["above_floor"] == pytest.approx(expected / card.floor - 1, rel=1e-3)


def test_the_model_is_evaluated_in_its_evaluation_mode_and_left_as_it_was(data_dir):
    params = parse_params(small())
    folder = data_dir(params)
    card = read_card(folder / "card.json")
    model = nn.Sequential(nn.Dropout(0.9), nn.Linear(128, 10)).train()
    data = load_split(folder, card, "test")
    losses = {
        evaluate(model, numerics_of(card), data, card, batch_size=64, device=torch.device("cpu"))["eval_loss"]
        for _ in range(3)
    }
    assert len(losses) == 1
    assert model.training


def test_the_floor_is_reached(stage, data_dir):
    """At the repository's own params, by every strategy, end to end."""
    params = stage.write_params({})
    folder = data_dir(params)
    for strategy in ("single", "dp", "ddp"):
        done = stage("train", "--strategy", strategy, "--no-tracking", "--data-dir", str(folder))
        assert done.returncode == 0, done.stderr
        done = stage("evaluate", "--strategy", strategy, "--data-dir", str(folder))
        assert done.returncode == 0, done.stderr
        percent = float(done.stdout.split(", ")[1].split("%")[0])
        assert 0 <= percent <= 3


REACHED = [
    ("regression", {"name": "mlp", "kwargs": {"hidden": []}}, {"lr": 0.02}, 4096, 8, 6),
    ("images", {"name": "convnet", "kwargs": {"width": 8}}, {"lr": 0.05}, 4096, 3, 8),
    ("tokens", {"name": "gpt"}, {"name": "adamw", "lr": 0.003}, 2048, 6, 3),
]


@pytest.mark.parametrize(
    ("task", "model", "optimizer", "samples", "epochs", "percent"), REACHED, ids=lambda x: str(x)[:12]
)
def test_each_task_can_be_learnt_close_to_its_floor(task, model, optimizer, samples, epochs, percent, stage, tmp_path):
    stage.write_params(
        {
            "data": {"task": task, "num_samples": samples, "test_samples": 1024},
            "model": model,
            "train": {"global_batch_size": 32, "epochs": epochs, "repeats": 1, "optimizer": optimizer},
        }
    )
    single = ("--strategy", "single")
    for name, arguments in (("prepare", ()), ("train", (*single, "--no-tracking")), ("evaluate", single)):
        done = stage(name, *arguments)
        assert done.returncode == 0, done.stderr
    reached = float(done.stdout.split(", ")[1].split("%")[0])
    assert 0 <= reached <= percent
