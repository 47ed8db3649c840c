"""The optimizers of torch.optim: what they compute, what they take, and their state."""

import functools
import json
from typing import get_args

import pytest
import torch

import exact_probe
from conftest import ROOT, small
from samebits import Experiment
from samebits.errors import RefusedError, UserError
from samebits.models.experiment import attach
from samebits.numerics.exact import optimizers
from samebits.numerics.exact.numerics import ExactNumerics
from samebits.numerics.fast import FastNumerics
from samebits.numerics.interface import MicroBatch
from samebits.numerics.optimizers import grouped, make_optimizer, optimizer_for
from samebits.params import parse_params
from samebits.params.schema import OptimizerName
from trainables import make_trainable, train_from_start

CPU = torch.device("cpu")
GOLDEN = json.loads((ROOT / "tests/golden/exact.json").read_text())
NAMES = get_args(OptimizerName)
one_part = functools.cache(exact_probe.train)


def test_every_optimizer_is_tried():
    assert {*NAMES} == {one["name"] for one in (exact_probe.CHOSEN | exact_probe.OTHERS).values()}


def test_others_of_pytorch_are_left_out_knowingly():
    """They evaluate the loss several times in a step, need sparse gradients, or take matrices alone."""
    there = {name.lower() for name, cls in vars(torch.optim).items() if isinstance(cls, type)} - {"optimizer"}
    assert there - {*NAMES} == {"lbfgs", "sparseadam", "muon"}


@pytest.mark.parametrize("optimizer", exact_probe.OTHERS)
def test_an_optimizer_of_pytorchs_is_exact(optimizer):
    """Golden hashes, the same bits in parts of a batch, and PyTorch's own result but for its rounding."""
    digest, losses = one_part("mlp", optimizer)
    assert digest == GOLDEN[f"mlp {optimizer}"], "python tests/golden/make.py models"
    assert exact_probe.train("mlp", optimizer, 3) == (digest, losses)
    _, exact = one_part("regression", optimizer)
    _, fast = exact_probe.train("regression", optimizer, fast=True)
    assert exact == pytest.approx(fast, rel=2e-3)
    assert exact[-1] < exact[0]


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("optimizer", exact_probe.CHOSEN | exact_probe.OTHERS)
def test_a_training_goes_on_from_its_state(optimizer, numerics, data_dir):
    chosen = (exact_probe.CHOSEN | exact_probe.OTHERS)[optimizer]
    one, other = (make_trainable(data_dir, numerics, optimizer=chosen).trainable for _ in range(2))
    train_from_start(one, 4)
    tensors, numbers = one.state_dict()
    draws = one.worker.random_state()
    other.load_state_dict({name: t.clone() for name, t in tensors.items()}, json.loads(json.dumps(numbers)))
    after = []
    for trainable in (one, other):
        trainable.worker.set_random_state(draws)
        losses = [trainable.step(step, 0.01).item() for step in range(4, 8)]
        after.append((losses, [p.detach().clone() for p in trainable.model.parameters()]))
    assert after[0][0] == after[1][0]
    assert all(map(torch.equal, after[0][1], after[1][1]))
    again = train_from_start(other, 4)
    assert again.losses == train_from_start(one, 4).losses


def chosen(**optimizer):
    return parse_params(small(optimizer=optimizer)).train.optimizer


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"name": "rmsprop", "kwargs": {"alhpa": 0.9}}, r"kwargs\.alhpa: unknown key\. hint: RMSprop takes alpha, eps"),
        (
            {"name": "adam", "kwargs": {"lr": 0.1}},
            r"kwargs\.lr: unknown key\. hint: .* and others by keys of their own",
        ),
        (
            {"name": "sgd", "kwargs": {"momentum": 0.1}},
            r"kwargs\.momentum: unknown key\. hint: .* and others by keys of their own",
        ),
        ({"name": "adam", "kwargs": {"fused": True}}, r"kwargs\.fused: unknown key"),
        ({"name": "adam", "kwargs": {"betas": [2.0, 0.9]}}, r"Adam does not take .*Invalid beta parameter"),
        ({"name": "adam", "kwargs": {"eps": "x"}}, r"Adam does not take .*'eps': 'x'"),
        ({"name": "rprop", "weight_decay": 0.1}, r"weight_decay: got 0\.1, and Rprop has none\. hint: set it to 0"),
    ],
)
def test_an_argument_that_an_optimizer_does_not_take_is_named(optimizer, message):
    with pytest.raises(UserError, match=rf"train\.optimizer\.{message}|train\.optimizer\.kwargs: {message}"):
        make_optimizer(chosen(**optimizer), [{"params": [torch.nn.Parameter(torch.ones(2))]}])


def test_names_are_those_of_pytorch_in_any_case():
    assert chosen(name="RMSprop").name == "rmsprop"
    with pytest.raises(UserError, match=r"train\.optimizer\.name: got 'lbfgs': Input should be 'sgd', 'adamw', 'adam'"):
        chosen(name="LBFGS")


def test_an_operation_without_an_exact_version_is_refused_by_the_optimizers_name():
    class Odd(torch.optim.SGD):
        def step(self):
            torch.linalg.eigvals(self.param_groups[0]["params"][0])

    p = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
    stepper = optimizers.TorchOptimizer([p], Odd, [{"params": [p]}], lr=0.1, terms=1, clip=None)
    with pytest.raises(RefusedError, match=r"exact: train\.optimizer \(Odd\): linalg_eig") as caught:
        stepper.step()
    assert caught.value.hint == "choose another optimizer, or set train.numerics: [fast]"


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))


def no_decay_of_vectors(model):
    """As most recipes have it; the head learns twice as fast."""
    body = [p for name, p in model.named_parameters() if p.ndim > 1 and not name.startswith("2")]
    return [
        {"params": body, "weight_decay": 0.1},
        {"params": (p for p in model.parameters() if p.ndim < 2), "weight_decay": 0.0},
        {"params": [model[2].weight], "lr": 0.02},
    ]


@pytest.mark.parametrize("name", ["adamw", "sgd", "adam"])
def test_groups_of_parameters_have_settings_of_their_own(name):
    """As PyTorch trains them, but for the rounding of exact."""
    settings = parse_params(small(optimizer={"name": name, "lr": 0.01, "weight_decay": 0.05})).train
    inputs, targets = torch.randn(16, 4, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 3
    plain = net()
    made = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adam": torch.optim.Adam}[name]
    more = {"momentum": 0.9} if name == "sgd" else {}
    optimizer = made(no_decay_of_vectors(plain), lr=0.01, weight_decay=0.05, **more)
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(plain(inputs), targets).backward()
        optimizer.step()
    split = {"seed": 0, "shards": 4, "samples": 16}
    for numerics in (FastNumerics(settings, CPU, "cross_entropy"),
                     ExactNumerics(settings, CPU, "cross_entropy", (), **split)):  # fmt: skip
        model = net()
        attach(Experiment(model, parameter_groups=no_decay_of_vectors))
        numerics.prepare(model)
        module, stepper = numerics.module(model), numerics.optimizer(model)
        for step in range(3):
            while True:
                stepper.zero_grad()
                batch = MicroBatch(inputs, targets, step, range(4))
                numerics.backward(numerics.loss(numerics.forward(module, batch), batch.targets))
                if numerics.accepts_grads(lambda values: values):
                    break
            numerics.step(stepper)
        for path, p in model.named_parameters():
            assert torch.allclose(p.float(), plain.get_parameter(path), rtol=1e-5, atol=1e-6), (numerics.name, path)
        assert [group["lr"] for group in stepper.param_groups] == [0.01, 0.01, 0.02]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda model: [{"params": [model[0].weight]}], r"model\.0\.bias, model\.1\.weight.* is not in one group"),
        (lambda model: [{"params": model.parameters()}, {"params": [model[0].bias]}], r"model\.0\.bias is not in one"),
        (
            lambda model: [{"params": [*model.parameters(), torch.ones(1)]}],
            "a tensor that is no parameter to train is in",
        ),
        (lambda model: [{"parameters": [*model.parameters()]}], r"KeyError: 'params'"),
        (lambda model: [model.nowhere], "AttributeError: .*nowhere"),
        (
            lambda model: [{"params": model.parameters(), "decay": 0.1}],
            r"decay: unknown key of a group\. hint: SGD takes lr",
        ),
    ],
)
def test_groups_that_leave_something_out_are_named(function, message):
    model = net()
    attach(Experiment(model, parameter_groups=function))
    with pytest.raises(UserError, match=f"parameter_groups: {message}"):
        make_optimizer(chosen(name="sgd"), grouped(model))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("grouping", [None, no_decay_of_vectors])
def test_an_optimizer_of_ones_own_takes_the_place_of_the_params(exact, grouping):
    """With the learning rate that it begins with."""
    settings = parse_params(small(optimizer={"name": "sgd", "lr": 0.5})).train
    split = {"seed": 0, "shards": 4, "samples": 16}
    numerics = ExactNumerics(settings, CPU, "cross_entropy", (), **split) if exact else \
        FastNumerics(settings, CPU, "cross_entropy")  # fmt: skip
    model = net()
    attach(Experiment(model, parameter_groups=grouping, optimizer=lambda groups: torch.optim.Adam(groups, lr=0.03)))
    numerics.prepare(model)
    rates = [group["lr"] for group in numerics.optimizer(model).param_groups]
    assert rates == ([0.03, 0.03, 0.02] if grouping else [0.03])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda groups: groups, "it returned list, expected a torch.optim.Optimizer"),
        (lambda groups: torch.optim.SGD(groups[:1], lr="x"), "ValueError|TypeError"),
        (lambda groups: torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1), "its groups are not those"),
        (lambda groups: torch.optim.LBFGS(groups[0]["params"]), "LBFGS calls the model several times in a step"),
    ],
)
def test_what_is_no_optimizer_of_these_parameters_is_said(function, message):
    model = net()
    attach(Experiment(model, optimizer=function))
    with pytest.raises(UserError, match=f"^optimizer: ({message})"):
        optimizer_for(model, chosen(name="sgd"), grouped(model))
