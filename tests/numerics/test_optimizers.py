"""The optimizers of torch.optim: what they compute, what they take, and their state."""

import functools
import json
from typing import get_args

import pytest
import torch

import exact_probe
from conftest import ROOT, small
from samebits.errors import RefusedError, UserError
from samebits.numerics.exact import optimizers
from samebits.numerics.optimizers import make_optimizer
from samebits.params import parse_params
from samebits.params.schema import OptimizerName
from trainables import make_trainable, train_from_start

GOLDEN = json.loads((ROOT / "tests/golden/exact.json").read_text())
NAMES = get_args(OptimizerName)
one_part = functools.cache(functools.partial(exact_probe.train, whole=False))


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
    assert digest == GOLDEN[f"mlp {optimizer} by shards"], "python tests/golden/make.py models"
    assert exact_probe.train("mlp", optimizer, 3, whole=False) == (digest, losses)
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
        ({"name": "adam", "kwargs": {"lr": 0.1}}, r"kwargs\.lr: unknown key\. hint: .* by keys of its own"),
        ({"name": "sgd", "kwargs": {"momentum": 0.1}}, r"kwargs\.momentum: unknown key\. hint: .* by keys of its own"),
        ({"name": "adam", "kwargs": {"fused": True}}, r"kwargs\.fused: unknown key"),
        ({"name": "adam", "kwargs": {"betas": [2.0, 0.9]}}, r"Adam does not take .*Invalid beta parameter"),
        ({"name": "adam", "kwargs": {"eps": "x"}}, r"Adam does not take .*'eps': 'x'"),
        ({"name": "rprop", "weight_decay": 0.1}, r"weight_decay: got 0\.1, and Rprop has none\. hint: set it to 0"),
    ],
)
def test_an_argument_that_an_optimizer_does_not_take_is_named(optimizer, message):
    with pytest.raises(UserError, match=rf"train\.optimizer\.{message}|train\.optimizer\.kwargs: {message}"):
        make_optimizer(chosen(**optimizer), [torch.nn.Parameter(torch.ones(2))])


def test_names_are_those_of_pytorch_in_any_case():
    assert chosen(name="RMSprop").name == "rmsprop"
    with pytest.raises(UserError, match=r"train\.optimizer\.name: got 'lbfgs': Input should be 'sgd', 'adamw', 'adam'"):
        chosen(name="LBFGS")


def test_an_operation_without_an_exact_version_is_refused_by_the_optimizers_name():
    class Odd(torch.optim.SGD):
        def step(self):
            torch.linalg.eigvals(self.param_groups[0]["params"][0])

    p = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
    stepper = optimizers.TorchOptimizer([[p]], Odd, lr=0.1, terms=1, clip=None)
    with pytest.raises(RefusedError, match=r"exact: train\.optimizer \(Odd\): linalg_eig") as caught:
        stepper.step()
    assert caught.value.hint == "choose another optimizer, or set train.numerics: [fast]"
