"""A training in the tests' own process."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from conftest import small
from samebits.params import parse_params
from samebits.records.card import read_card
from samebits.training.loop import Tracker, train
from samebits.training.models.build import build_model
from samebits.training.setup import Setup
from samebits.training.worker import Worker
from samples import placed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from samebits.params import Params
    from samebits.params.schema import NumericsName
    from samebits.training.checkpoints import PeriodicCheckpointer
    from samebits.training.loop import Trainable, TrainResult


def make_trainable(
    data_dir: Callable[[Params], Path], numerics: NumericsName = "fast", **settings: Any
) -> SimpleNamespace:
    """A training of 8 steps in this process, with dropout and momentum, so that state has somewhere to hide."""
    model = {"name": "mlp", "kwargs": {"hidden": [16], "dropout": 0.2}}
    params = parse_params(small(model=model, clip_grad_norm=1.0, **settings))
    folder = data_dir(params)
    card = read_card(folder / "card.json")
    _, split = placed("single", params, gpus=0, cores=1, numerics=numerics)
    setup = Setup(params, numerics, card, split=split, worker=Worker([torch.device("cpu")]))
    data = setup.load(folder)
    untrained = build_model(params.model, card, params.seed)
    trainable = setup.trainable(setup.place(copy.deepcopy(untrained)), setup.batches(data))
    return SimpleNamespace(trainable=trainable, untrained=untrained, params=params, data=data, card=card, setup=setup)


def train_from_start(
    trainable: Trainable,
    steps: int = 8,
    *,
    step_seconds: float = 1,
    tracker: Tracker | None = None,
    checkpointer: PeriodicCheckpointer | None = None,
) -> TrainResult:
    """The result of a training that starts anew."""
    trainable.reset()
    return train(trainable, steps, step_seconds=step_seconds, tracker=tracker or Tracker(), checkpointer=checkpointer)
