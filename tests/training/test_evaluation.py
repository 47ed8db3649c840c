import os
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from conftest import MODEL_OF_TASK, small
from samebits.errors import UserError
from samebits.files import write_json
from samebits.hashes import sha256
from samebits.numerics.fast import FastNumerics
from samebits.params import parse_params
from samebits.records.card import read_card
from samebits.records.run import Evaluation
from samebits.training.batches import Pair, load_data, model_inputs
from samebits.training.evaluation import evaluate_run
from samebits.training.metrics import evaluate
from samebits.training.models.build import build_model
from samples import PARAMS, card, run_record

CPU = torch.device("cpu")


@pytest.fixture
def task_data(data_dir):
    """The params of a task, its card and its test split, and a function that evaluates a model on that."""

    def make(task="vectors"):
        params = parse_params(small(task))
        card = read_card(data_dir(params) / "card.json")
        data = load_data(data_dir(params), card, "test")
        numerics = FastNumerics(params.train, CPU, card.loss)
        classes = card.loss == "cross_entropy"

        def evaluated(model, batch_size):
            pieces = zip(*(tensor.split(batch_size) for tensor in data), strict=True)
            batches = (Pair(model_inputs(inputs, card), targets) for inputs, targets in pieces)
            return evaluate(model, numerics, batches, classes=classes, device=CPU)

        return params, card, data, evaluated

    return make


@pytest.mark.parametrize("batch_size", [1, 7, 64, 199, 200, 1000])
@pytest.mark.parametrize("task", list(MODEL_OF_TASK))
def test_each_sample_counts_once_whatever_the_batches(task, batch_size, task_data):
    params, card, data, evaluated = task_data(task)
    model = build_model(params.model, card, 0)
    with torch.no_grad():
        outputs = model.eval()(model_inputs(data[0], card))
    if card.loss == "mse":
        expected, right = F.mse_loss(outputs.double(), data[1].double()).item(), None
    else:
        expected = F.cross_entropy(outputs.double().flatten(0, -2), data[1].flatten()).item()
        right = (outputs.argmax(-1) == data[1]).double().mean().item()
    loss, accuracy, metrics = evaluated(model, batch_size=batch_size)
    assert metrics == {}
    assert loss == pytest.approx(expected, rel=1e-5)
    assert accuracy == (right if right is None else pytest.approx(right, abs=2 / 200))


def test_the_model_is_evaluated_in_its_evaluation_mode_and_left_as_it_was(task_data):
    *_, evaluated = task_data()
    model = nn.Sequential(nn.Dropout(0.9), nn.Linear(128, 10)).train()
    assert len({evaluated(model, batch_size=64)[0] for _ in range(3)}) == 1
    assert model.training


def test_the_floor_is_reached(stage, data_dir):
    """At the repository's own params, end to end; the slices that are timed after a training teach nothing."""
    params = stage.write_params({"train": {"repeats": 1}})
    folder = data_dir(params)
    strategies = ("single", "ddp")
    for strategy in strategies:
        stage.train(folder, strategy)
    stage.well("evaluate", *(f"runs/{strategy}-fast" for strategy in strategies), "--data-dir", str(folder))
    for strategy in strategies:
        evaluation = Evaluation.read(stage.folder / f"reports/evaluation/{strategy}-fast.json", made_by="")
        assert evaluation.samples == params.data.test_samples
        assert evaluation.above_floor == pytest.approx(evaluation.eval_loss / evaluation.floor - 1)
        assert 0 <= evaluation.above_floor <= 0.03


def test_weights_with_another_bit_are_refused(stage, data_dir):
    data = data_dir(stage.write_params(small()))
    stage.train(data, "single")
    weights = stage.folder / "runs/single-fast/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    done = stage("evaluate", "runs/single-fast", "--data-dir", str(data))
    assert (done.returncode, "expected the" in done.stderr) == (2, True)
    assert not (stage.folder / "reports").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (None, "no such file"),
        (lambda path: path.write_bytes(b"other weights"), "SHA-256 [0-9a-f]{12}, expected the abc of run.json"),
        (os.mkfifo, "cannot be read: expected a regular file"),
        (os.mkdir, "cannot be read: expected a regular file"),
    ],
)
def test_weights_that_are_not_the_runs_are_refused(make, message, tmp_path):
    write_json(tmp_path / "card.json", card().model_dump(mode="json"))
    run_record().write(tmp_path / "run.json")
    if make:
        make(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=rf"model\.safetensors: {message}\. hint: "):
        evaluate_run(PARAMS, data_dir=tmp_path, run_dir=tmp_path, at=lambda phase: None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": PARAMS.train.model_copy(update={"precision": "bf16"})},
         r"run\.json: was made with train\.precision fp32, and the params say bf16\. hint: train again"),
        ({}, r"run\.json: trained on other data: SHA-256 0{12}, and data/ holds [0-9a-f]{12}\. hint: train again"),
    ],
)  # fmt: skip
def test_a_run_of_something_else_is_not_evaluated_as_if_it_were_of_this(changes, message, tmp_path):
    write_json(tmp_path / "card.json", card().model_dump(mode="json"))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    data = card() if changes else card().model_copy(update={"sha256": "0" * 64})
    run_record(weights_sha256=sha256(weights), params=PARAMS, data=data).write(tmp_path / "run.json")
    with pytest.raises(UserError, match=message):
        evaluate_run(PARAMS.model_copy(update=changes), data_dir=tmp_path, run_dir=tmp_path, at=lambda phase: None)


def test_two_runs_of_one_name_are_not_evaluated_into_one_file(stage):
    stage.write_params(small())
    done = stage("evaluate", "a/ddp-fast", "b/ddp-fast")
    assert (done.returncode, "would write one file, ddp-fast.json" in done.stderr) == (2, True), done.stderr


def test_weights_that_overflowed_in_the_last_update_are_named(stage, data_dir):
    """No loss of the training is behind that update."""
    params = stage.write_params(small(optimizer={"lr": 1e38, "momentum": 0.0}, schedule={"name": "constant"}))
    stage.train(data_dir(params), "single", "--steps", "1")
    done = stage("evaluate", "runs/single-fast", "--data-dir", str(data_dir(params)))
    assert (done.returncode, "ValidationError" in done.stderr) == (2, False), done.stderr
    assert re.search(
        r"error: runs/single-fast/model\.safetensors: the loss on the test split is (nan|inf)", done.stderr
    )


def test_what_a_model_raises_in_its_evaluation_alone_is_named(stage, data_dir):
    model = stage.write_model(
        "from torch import nn\n"
        "class Net(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x if self.training else x[:, :3])\n"
        "def make():\n    return Net(128, 10)\n"
    )
    data = data_dir(stage.write_params(small(model=model)))
    stage.train(data, "single")
    done = stage("evaluate", "runs/single-fast", "--data-dir", str(data))
    assert (done.returncode, (stage.folder / "reports").exists()) == (2, False)
    assert done.stderr.startswith(
        "error: mine.py:4: the model or its loss raised RuntimeError: mat1 and mat2 shapes cannot be mul"
    )


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
    stage.well("prepare")
    stage.train(stage.folder / "data", "single")
    done = stage.well("evaluate", "runs/single-fast")
    reached = float(done.stdout.split(", ")[1].split("%")[0])
    assert 0 <= reached <= percent
