"""Whether the losses of samples depend on the samples beside them is found before a training."""

import pytest
import torch
from torch import nn

import exact_probe
from samebits.numerics.exact.numerics import ExactNumerics
from samebits.numerics.fast import FastNumerics
from samebits.numerics.interface import MicroBatch
from samebits.training.mixing import mixed_samples


class Net(nn.Module):
    def __init__(self, between):
        super().__init__()
        self.body, self.head, self.between = nn.Linear(20, 24), nn.Linear(24, 5), between

    def forward(self, x):
        return self.head(self.between(torch.relu(self.body(x))))


def of_eight(h):
    """A model that takes no fewer samples."""
    return h.view(-1, 8, 24).flatten(0, 1)


BETWEEN = {
    "mean": (lambda h: h - h.mean(0), True),
    "sorted": (lambda h: h * h.sum(1).argsort().argsort().unsqueeze(1), True),
    "alone": (lambda h: h - h.mean(1, keepdim=True), False),
    "noise": (lambda h: h + torch.randn_like(h), False),
    "batch norm": (nn.BatchNorm1d(24), False),
    "dropout": (nn.Dropout(0.5), False),
    "of eight": (of_eight, False),
}


@pytest.mark.parametrize("name", ["fast", "exact"])
@pytest.mark.parametrize("between", BETWEEN)
def test_mixed_samples(between, name):
    function, is_mixed = BETWEEN[between]
    (inputs, targets), chosen, device = exact_probe.data("mlp"), exact_probe.settings("sgd"), torch.device("cpu")
    numerics, shards = FastNumerics(chosen, device, "cross_entropy"), range(1)
    if name == "exact":
        numerics, shards = ExactNumerics(chosen, device, "cross_entropy", (), seed=0, shards=8, samples=32), range(8)
    numerics.configure()
    numerics.apart = None
    torch.manual_seed(0)
    model = Net(function).train()
    model.head.eval()  # as somebody who freezes it
    numerics.prepare(model)
    found = mixed_samples(model, numerics, MicroBatch(inputs, targets, 0, shards))
    assert [note.part for note in found] == ["shard" if name == "exact" else "device"] * is_mixed
    assert (model.training, model.head.training, numerics.apart) == (True, False, None)
