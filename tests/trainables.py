"""A training in the tests' own process."""

from types import SimpleNamespace

import torch

from conftest import small
from samebits.params import parse_params
from samebits.records.card import read_card
from samebits.training.models.build import build_model
from samebits.training.setup import Setup
from samebits.training.worker import Worker
from samples import placed


def make_trainable(data_dir, **settings):
    """A training of 8 steps in this process, with dropout and momentum, so that state has somewhere to hide."""
    model = {"name": "mlp", "kwargs": {"hidden": [16], "dropout": 0.2}}
    params = parse_params(small(model=model, clip_grad_norm=1.0, **settings))
    folder = data_dir(params)
    card = read_card(folder / "card.json")
    _, split = placed("single", params, gpus=0, cores=1)
    setup = Setup(params, "fast", card, split=split, worker=Worker([torch.device("cpu")]))
    data = setup.load(folder)
    trainable = setup.trainable(setup.place(build_model(params.model, card, params.seed)), setup.batches(data))
    return SimpleNamespace(trainable=trainable, params=params, data=data, card=card, setup=setup)
