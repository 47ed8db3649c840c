"""Trainings with a loss of the user's own, as a factory returns them."""

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from conftest import ROOT, small
from samebits import Experiment
from samebits.errors import UserError
from samebits.hashes import sha256
from samebits.models.experiment import loss_of
from samebits.numerics.interface import OwnLoss
from samebits.params import parse_params
from samebits.records.run import Evaluation, read_run
from samebits.results.verdict import compare_runs
from samebits.training.models.build import build_model

MINE = """
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from samebits import Experiment

class TwoHeads(nn.Module):
    def __init__(self, features, classes):
        super().__init__()
        self.body = nn.Linear(features, 24)
        self.mean, self.spread, self.head = nn.Linear(24, 4), nn.Linear(24, 4), nn.Linear(24, classes)

    def forward(self, x):
        x = torch.tanh(self.body(x))
        return {"logits": self.head(x), "mean": self.mean(x), "spread": self.spread(x)}

def several_tasks(outputs, targets):
    smooth = F.cross_entropy(outputs["logits"], targets, label_smoothing=0.1, reduction="none")
    divergence = -0.5 * (1 + outputs["spread"] - outputs["mean"] ** 2 - outputs["spread"].exp()).sum(1)
    return smooth + 0.1 * divergence

def tasks(card):
    return Experiment(TwoHeads(card.input_shape[0], card.num_classes), several_tasks)

def hits(outputs, targets):
    return (outputs["logits"].argmax(1) == targets).float()

def among_two(outputs, targets):
    return (outputs["logits"].topk(2, dim=1).indices == targets[:, None]).any(1)

def measured(card):
    net = TwoHeads(card.input_shape[0], card.num_classes)
    return Experiment(net, several_tasks, metrics={"accuracy": hits, "top-2": among_two})

seen = []

def noisy_hits(outputs, targets):  # keeps state, and draws
    seen.append(len(targets))
    return hits(outputs, targets) + 0.0 * torch.from_numpy(np.random.rand(len(targets)))

class Twice(nn.Module):
    def __init__(self, features, classes):
        super().__init__()
        self.net = nn.Linear(features, classes)

    def forward(self, x, again=True):
        return self.net(x) + (0.0 * self(x, again=False) if again else 0.0)

def within(card):
    net = Twice(card.input_shape[0], card.num_classes)
    return Experiment(net, metrics={
        "hits": lambda outputs, targets: noisy_hits({"logits": outputs}, targets),
        "none": lambda outputs, targets: outputs[:, 0] / 0.0,
    })

def called_twice(card):
    net = nn.Linear(card.input_shape[0], card.num_classes)
    def loss(outputs, targets):
        return F.cross_entropy(outputs + 0.0 * net(torch.zeros(1, card.input_shape[0])), targets, reduction="none")
    return Experiment(net, loss, metrics={"hits": lambda outputs, targets: targets == 0})

def badly_measured(card):
    net = TwoHeads(card.input_shape[0], card.num_classes)
    return Experiment(net, several_tasks, metrics={"hits": lambda outputs, targets: hits(outputs, targets).mean()})

def apart(outputs, targets):
    same = targets[:, None] == targets[None, :]
    distances = (outputs[:, None] - outputs[None]).pow(2).sum(-1)
    return torch.where(same, distances, F.relu(1.0 - distances)).mean()

def contrastive(card):
    net = nn.Sequential(nn.Linear(card.input_shape[0], 16), nn.Tanh(), nn.Linear(16, 3))
    return Experiment(net, apart)

class Signs(torch.optim.Optimizer):  # not one of PyTorch's
    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p].setdefault("mean", torch.zeros_like(p))
                state.mul_(0.9).add_(p.grad, alpha=0.1)
                p.sub_(state.sign(), alpha=group["lr"])

def signs(card):
    net = nn.Sequential(nn.Linear(card.input_shape[0], 16), nn.ReLU(), nn.Linear(16, card.num_classes))
    return Experiment(net, optimizer=lambda groups: Signs(groups, lr=0.004),
                      schedule=lambda step, steps: 1.0 if step < steps // 2 else 0.5)

class Last(nn.GRU):
    def forward(self, x):
        return super().forward(x.unflatten(1, (-1, self.input_size)))[1][-1]

def normed(card):
    return nn.Sequential(nn.Linear(card.input_shape[0], 16), nn.BatchNorm1d(16), Last(4, 8, 2, batch_first=True),
                         nn.Linear(8, card.num_classes))

def weighted(card):
    weights = torch.linspace(0.5, 1.5, card.num_classes)
    net = nn.Sequential(nn.Linear(card.input_shape[0], 16), nn.ReLU(), nn.Linear(16, card.num_classes))
    return Experiment(net, nn.CrossEntropyLoss(weight=weights, reduction="none"))
"""


@pytest.fixture
def mine(stage, data_dir):
    """Train one of the experiments, by its name."""
    (stage.folder / "mine.py").write_text(MINE)

    def train(factory, exact=None, **settings):
        name = factory if ":" in factory else f"mine:{factory}"
        raw = small(model={"name": name}, numerics=["fast", "exact"], **settings) | {"exact": exact or {}}
        params = stage.write_params(raw)
        data = data_dir(params)

        def run(strategy, numerics, *arguments):
            stage.train(data, strategy, "--numerics", numerics, *arguments)
            return read_run(stage.folder / f"runs/{strategy}-{numerics}")

        return SimpleNamespace(run=run, data=data)

    return train


@pytest.mark.parametrize(
    "factory", ["tasks", *(pytest.param(name, marks=pytest.mark.slow) for name in ("weighted", "signs"))]
)
def test_a_loss_of_ones_own_is_trained_alike_by_every_strategy(factory, mine, stage):
    made = mine(factory, oversubscribe=True, clip_grad_norm=1.0, optimizer={"name": "adam", "lr": 0.01})
    single = made.run("single", "fast")
    assert single.losses[-1] < single.losses[0]
    for strategy in ("dp", "ddp"):
        assert made.run(strategy, "fast").losses == pytest.approx(single.losses, rel=1e-4)
    exact = made.run("single", "exact")
    assert exact.losses == pytest.approx(single.losses, rel=1e-3)
    for strategy, count in (("dp", "2"), ("ddp", "2"), ("ddp", "3")):
        again = made.run(strategy, "exact", "--num-devices", count)
        assert (again.record.weights_sha256, again.losses) == (exact.record.weights_sha256, exact.losses)


def test_batch_norm_and_recurrent_layers_have_the_same_bits_under_every_strategy(mine, stage):
    made = mine("normed", oversubscribe=True)
    single = made.run("single", "exact")
    (note,) = [note for note in single.record.notes if note.kind == "batch_norm"]
    assert note.sentence().startswith("BatchNorm: each shard normalises by its own ")
    assert 0 < note.difference < 0.5
    for strategy, count in (("dp", "2"), ("ddp", "2"), ("ddp", "3")):
        again = made.run(strategy, "exact", "--num-devices", count)
        assert (again.record.weights_sha256, again.losses) == (single.record.weights_sha256, single.losses)
    state = load_file(stage.folder / "runs/ddp-exact/model.safetensors")
    assert state["1.num_batches_tracked"] == len(single.losses)
    assert state["1.running_mean"].abs().max() > 0
    stage.well("evaluate", "--data-dir", str(made.data), "runs/ddp-exact")


def test_batch_norm_over_the_whole_batch_is_that_of_fast_on_one_device(mine, stage):
    made = mine("normed", exact={"batch_norm": "global"}, oversubscribe=True)
    single, fast = made.run("single", "exact"), made.run("single", "fast")
    assert single.losses == pytest.approx(fast.losses, rel=1e-4)
    assert [note for note in single.record.notes if note.kind == "batch_norm"] == []
    assert single.record.arithmetic.shards_apart is None
    for strategy, count in (("dp", "2"), ("ddp", "2"), ("ddp", "3")):
        again = made.run(strategy, "exact", "--num-devices", count)
        assert (again.record.weights_sha256, again.losses) == (single.record.weights_sha256, single.losses)
    mine, theirs = (load_file(stage.folder / f"runs/{run}/model.safetensors") for run in ("ddp-exact", "single-fast"))
    assert mine["1.num_batches_tracked"] == len(single.losses)
    for name in ("1.running_mean", "1.running_var"):
        assert mine[name].tolist() == pytest.approx(theirs[name].tolist(), rel=1e-3, abs=1e-5)


def test_an_evaluation_takes_the_same_loss_and_knows_no_floor_of_it(mine, stage):
    made = mine("tasks")
    run = made.run("single", "exact")
    stage.well("evaluate", "--data-dir", str(made.data), "runs/single-exact")
    (found,) = (stage.folder / "reports/evaluation").glob("*.json")
    evaluation = json.loads(found.read_text())
    assert (evaluation["accuracy"], evaluation["floor"], evaluation["above_floor"]) == (None, None, None)
    assert evaluation["eval_loss"] == pytest.approx(run.losses[-1], rel=0.2)
    assert sha256(stage.folder / "runs/single-exact/model.safetensors") == evaluation["weights_sha256"]


@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_metrics_of_ones_own_are_means_over_the_test_data(numerics, mine, stage):
    """Exact runs a model on each shard apart, of which the last is short."""
    made = mine("measured")
    run = made.run("single", numerics)
    stage.well("evaluate", "--data-dir", str(made.data), f"runs/{run.name}")
    found = Evaluation.read(stage.folder / f"reports/evaluation/{run.name}.json", made_by="")
    namespace: dict[str, Any] = {}
    exec(MINE, namespace)
    net = namespace["TwoHeads"](128, 10).eval()
    net.load_state_dict(load_file(run.folder / "model.safetensors"))
    test = load_file(made.data / "test.safetensors")
    outputs, targets = net(test["inputs"]), test["targets"]
    assert found.accuracy == namespace["hits"](outputs, targets).double().mean().item()
    assert found.metrics == {"top-2": namespace["among_two"](outputs, targets).double().mean().item()}


@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_a_metric_may_keep_state_and_a_model_may_call_itself(numerics, mine, stage):
    made = mine("within")
    run = made.run("single", numerics)
    done = stage.well("evaluate", "--data-dir", str(made.data), f"runs/{run.name}")
    assert "metric none: left out, as it is infinite or NaN for some samples" in done.stderr
    found = Evaluation.read(stage.folder / f"reports/evaluation/{run.name}.json", made_by="")
    assert found.metrics == {"hits": found.accuracy}


def test_a_metric_of_a_model_that_its_loss_calls_again_is_refused(mine, stage):
    made = mine("called_twice")
    done = stage("train", "--data-dir", str(made.data), "--strategy", "single", "--numerics", "fast", "--no-tracking")
    assert (done.returncode, "metrics: the model is called more than once for a sample" in done.stderr) == (2, True)


def test_a_metric_of_no_use_is_named_before_the_training(mine, stage):
    made = mine("badly_measured")
    done = stage("train", "--data-dir", str(made.data), "--strategy", "single", "--numerics", "fast", "--no-tracking")
    assert done.returncode == 2
    message = (
        r"error: metric hits: it gives shape \(\), expected a tensor of a number for each of \d+ samples\. hint: leave"
    )
    assert re.search(message, done.stderr)
    assert not (stage.folder / "runs/single-fast/model.safetensors").exists()


def test_the_guides_experiment_trains(mine, stage):
    text = (ROOT / "docs/guides/your-own-model.md").read_text()
    (stage.folder / "mytask.py").write_text(text.partition("```python\n# mytask.py\n")[2].partition("```")[0])
    losses = mine("mytask:make").run("single", "exact").losses
    assert losses[-1] < losses[0]


def test_losses_under_two_micro_batches_and_bf16(mine):
    made = mine("tasks", grad_accum_steps=2, precision="bf16")
    losses = made.run("single", "fast").losses
    assert losses[-1] < losses[0]


def test_a_loss_of_several_samples_depends_on_the_devices_in_fast_and_is_told(mine):
    made = mine("contrastive", oversubscribe=True)
    runs = {name: made.run(*name) for name in (("single", "fast"), ("ddp", "fast"), ("single", "exact"))}
    told = {name: [note for note in run.record.notes if note.kind == "batch_loss"] for name, run in runs.items()}
    batch = runs["single", "fast"].record.params.train.global_batch_size
    assert told["single", "fast"] == []
    assert [(note.part, note.samples) for note in told["ddp", "fast"]] == [("device", batch // 2)]
    assert [(note.part, note.samples) for note in told["single", "exact"]] == [("shard", batch // 8)]
    verdict = compare_runs(runs["single", "fast"], runs["ddp", "fast"])
    assert (verdict.grade, verdict.apart) == (
        "not comparable", "a loss over the samples of a batch, of which each device has a part of its own"
    )  # fmt: skip
    again = made.run("ddp", "exact")
    assert again.record.weights_sha256 == runs["single", "exact"].record.weights_sha256
    assert all(run.losses[-1] < run.losses[0] for run in runs.values())


@pytest.mark.parametrize(
    ("losses", "got"),
    [(torch.ones(4, 2), r"shape \(4, 2\)"), (torch.ones(3), r"shape \(3,\)"),
     (0.5, "float"), (None, "NoneType")],
)  # fmt: skip
def test_a_loss_is_one_number_for_each_sample_or_for_all(losses, got):
    expected = rf"the loss returned {got} for 4 samples, expected a tensor of one number for each: \(4,\)"
    own = OwnLoss(F.mse_loss, torch.device("cpu"))
    with pytest.raises(UserError, match=expected) as caught:
        own.each(losses, 4)
    assert 'reduction="none"' in caught.value.hint
    assert own.each(torch.ones(4, dtype=torch.bfloat16), 4).dtype == torch.float32
    assert not own.of_batch


CARD = SimpleNamespace(task="vectors", input_shape=(4,), num_classes=3)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: Experiment(nn.Linear(2, 2), "mse"), "its loss is str, expected a function"),
        (lambda: Experiment(nn.Linear(2, 2), parameter_groups=[]), "its parameter_groups is list, expected a function"),
        (lambda: Experiment(nn.Linear(2, 2), metrics={"f1": 3}), "its metric 'f1' is int, expected a function"),
        (lambda: Experiment(nn.Linear(2, 2), metrics={"f 1": min}), "its metric 'f 1': expected up to 40 letters"),
        (lambda: Experiment(nn.Linear(2, 2), metrics={"loss": min}), "its metric 'loss': expected .* and not loss"),
        (lambda: Experiment(nn.Linear(2, 2), metrics=[min]), "its metrics is list, expected a dictionary of functions"),
        (lambda: Experiment(nn.Linear(2, 2), nn.Linear(2, 1)), "its loss has parameters of its own, which nothing"),
        (
            lambda: Experiment("net"),
            r"returned str, expected a torch\.nn\.Module\. hint: return the model, or samebits",
        ),
        (lambda: 5, r"returned int, expected a torch\.nn\.Module"),
    ],
)
def test_an_experiment_that_cannot_be_trained_is_named(made, message, monkeypatch):
    from samebits.training.models import build

    monkeypatch.setattr(build, "import_factory", lambda name, source: made)
    model = parse_params(small(model={"name": "mine:make"})).model
    with pytest.raises(UserError, match=f"model.name: mine:make:? {message}"):
        build_model(model, CARD, 0)


def test_copies_of_a_model_carry_its_loss(monkeypatch):
    import copy

    from samebits.training.models import build

    made = Experiment(nn.Linear(2, 2), F.mse_loss)
    monkeypatch.setattr(build, "import_factory", lambda name, source: lambda: made)
    model = build_model(parse_params(small(model={"name": "mine:make"})).model, CARD, 0)
    assert loss_of(copy.deepcopy(model)) is F.mse_loss
    assert [*model.state_dict()] == ["weight", "bias"]
    assert loss_of(nn.Linear(2, 2)) is None
