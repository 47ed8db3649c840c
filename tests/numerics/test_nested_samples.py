"""Samples that are dictionaries, tuples or dataclasses of tensors."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import exact_probe
from samebits.errors import UserError
from samebits.models.experiment import Experiment, attach
from samebits.models.nested import called, leaves_of, mapped, rows_of, unbound
from samebits.numerics.exact.numerics import ExactNumerics
from samebits.numerics.fast import FastNumerics
from samebits.numerics.interface import MicroBatch
from samebits.portable.random import Stream
from samebits.strategies.replicas import Replicas

SAMPLES, SHARDS = 16, 4
X = torch.from_numpy(Stream(1, "x").normal(SAMPLES * 6)).float().view(SAMPLES, 6)
Y = torch.from_numpy(Stream(1, "y").below(3, SAMPLES))


@dataclass(frozen=True)
class Pair:
    left: torch.Tensor
    right: torch.Tensor


Named = namedtuple("Named", "left right")
NESTS = {
    "dictionary": {"left": X[:, :2], "right": X[:, 2:]},
    "tuple": (X[:, :2], X[:, 2:]),
    "list": [X[:, :2], X[:, 2:]],
    "namedtuple": Named(X[:, :2], X[:, 2:]),
    "dataclass": Pair(X[:, :2], X[:, 2:]),
    "deep": {"batch": ({"left": X[:, :2]}, [X[:, 2:], None])},
}


class TwoInputs(nn.Module):
    """Takes two arguments, or one that holds both."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 8), nn.Linear(4, 8)
        self.top = nn.Linear(8, 3)

    def joined(self, left, right):
        return self.top(torch.tanh(self.first(left) + self.second(right)))

    def forward(self, left, right):
        return self.joined(left, right)


class OneArgument(TwoInputs):
    def forward(self, pair):
        return self.joined(pair.left, pair.right)


class Deep(TwoInputs):
    def forward(self, batch):
        return self.joined(batch[0]["left"], batch[1][0])


class WithLoss(TwoInputs):
    """As models of Hugging Face: labels come with the inputs, and the loss with the outputs."""

    def forward(self, left, right, labels):
        logits = self.joined(left, right)
        return {"logits": logits, "loss": F.cross_entropy(logits, labels)}


def made(model, loss):
    def make():
        torch.manual_seed(0)
        net = model()
        attach(Experiment(net, loss))
        return net

    return make


def run(fast, factory, inputs, targets, splits):
    train = exact_probe.settings("sgd")
    if fast:
        numerics = FastNumerics(train, torch.device("cpu"), "cross_entropy")
    else:
        numerics = ExactNumerics(train, torch.device("cpu"), "cross_entropy", (), seed=0, shards=SHARDS,
                                 samples=SAMPLES)  # fmt: skip
    return exact_probe.run(numerics, factory, inputs, targets, shards=SHARDS, splits=splits, steps=3)


MODELS = {"dictionary": TwoInputs, "tuple": TwoInputs, "list": TwoInputs, "namedtuple": TwoInputs,
          "dataclass": OneArgument, "deep": Deep}  # fmt: skip


@pytest.mark.parametrize("nest", NESTS)
def test_any_nesting_gives_the_bits_of_any_other_and_of_any_split(nest):
    plain = run(False, made(TwoInputs, None), NESTS["tuple"], Y, 1)
    for splits in (1, 2, SHARDS):
        assert run(False, made(MODELS[nest], None), NESTS[nest], Y, splits) == plain
    assert run(True, made(MODELS[nest], None), NESTS[nest], Y, 1)[1] == pytest.approx(plain[1], rel=1e-4)


def of_samples(outputs, batch):
    return F.cross_entropy(outputs["logits"], batch["labels"], reduction="none")


def test_without_targets_apart_the_loss_is_that_of_the_samples_or_the_models_own():
    batch = {**NESTS["dictionary"], "labels": Y}
    ours = run(False, made(WithLoss, of_samples), batch, None, 1)
    assert run(False, made(WithLoss, of_samples), batch, None, SHARDS) == ours
    assert ours[1] == pytest.approx(run(False, made(TwoInputs, None), NESTS["tuple"], Y, 1)[1], rel=1e-6)
    for fast in (False, True):
        assert run(fast, made(WithLoss, None), batch, None, 1)[1] == pytest.approx(ours[1], rel=1e-4)
    assert run(False, made(WithLoss, None), batch, None, 2) == run(False, made(WithLoss, None), batch, None, 1)


@pytest.mark.parametrize("fast", [False, True])
def test_whole_samples_need_a_loss_from_somewhere(fast):
    with pytest.raises(UserError, match=r"the model returned Tensor without a tensor loss, for samples that are not"):
        run(fast, made(TwoInputs, None), NESTS["dictionary"], None, 1)


class Anything(nn.Module):
    def forward(self, *args, **kwargs):
        return args, kwargs


class Whole(nn.Module):
    def forward(self, batch, scale=1.0):
        return batch


@pytest.mark.parametrize(
    ("model", "inputs", "expected"),
    [
        (Anything(), {"a": 1, "b": 2}, ((), {"a": 1, "b": 2})),
        (Anything(), (1, 2), ((1, 2), {})),
        (Whole(), {"image": 1}, {"image": 1}),
        (Whole(), {1: 2}, {1: 2}),
        (Whole(), (1, 2, 3), (1, 2, 3)),
        (Whole(), {"batch": 1, "scale": 2}, 1),
    ],
)
def test_how_inputs_are_given(model, inputs, expected):
    assert called(model, inputs) == expected


@pytest.mark.parametrize("nest", NESTS)
def test_parts_and_names_of_a_nest(nest):
    found, tensors = dict(leaves_of(NESTS[nest])), [X[:, :2], X[:, 2:]]
    assert [*map(torch.Tensor.tolist, found.values())] == [*map(torch.Tensor.tolist, tensors)]
    assert rows_of(NESTS[nest]) == SAMPLES
    parts = unbound(NESTS[nest])
    assert type(parts[0]) is type(NESTS[nest])
    assert [len(parts), *(tensor.shape for _, tensor in leaves_of(parts[3]))] == [SAMPLES, (2,), (4,)]
    assert MicroBatch(NESTS[nest], Y, 0).head(3).rows == 3


def test_names_in_a_nest():
    assert [*dict(leaves_of(NESTS["deep"]))] == ["batch.0.left", "batch.1.0"]
    assert [*dict(leaves_of(NESTS["dataclass"]))] == ["left", "right"]


@pytest.mark.parametrize("nest", NESTS)
def test_dp_divides_what_is_nested(nest, monkeypatch):
    """PyTorch's own scatter gives each device the whole of a dataclass."""

    def scatter(self, inputs, kwargs, device_ids):
        halves = [tuple(v.chunk(2)[i] if isinstance(v, torch.Tensor) else v for v in inputs) for i in range(2)]
        return halves, [{}, {}]

    monkeypatch.setattr(nn.DataParallel, "scatter", scatter)
    parts, _ = Replicas(nn.Linear(1, 1)).scatter((NESTS[nest], range(4), 7), {}, [0, 1])
    for index, (half, shards, step) in enumerate(parts):
        expected = mapped(lambda tensor, index=index: tensor.chunk(2)[index], NESTS[nest])
        assert [*map(str, leaves_of(half))] == [*map(str, leaves_of(expected))]
        assert (type(half), shards, step) == (type(NESTS[nest]), range(4)[2 * index : 2 * index + 2], 7)
