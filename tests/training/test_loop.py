"""The loop: what a step makes of a model under a strategy."""

import copy

import pytest
import torch

from samebits.errors import UserError
from trainables import train_from_start


def test_a_step_without_a_gradient_for_each_parameter_is_an_error_where_there_are_ranks(trainable):
    """DDP has reduced nothing that shares a bucket with it, and would say so at the next step, if there were one."""
    made = trainable().trainable
    made.reset()
    spare = torch.nn.Parameter(torch.ones(1))
    made._trained.append(("spare", spare))
    made.step(0, 0.1)
    made.worker.ranks.world_size = 2
    with pytest.raises(UserError, match="no gradient reaches spare at step 2, and the ranks wait for it"):
        made.step(1, 0.1)
    made._trained.pop()
    made.step(1, 0.1)


def test_a_training_ends_with_what_a_next_step_would_have_said(trainable, monkeypatch):
    def unfinished(module):
        assert module is made.module
        raise RuntimeError("Expected to have finished reduction in the prior iteration")

    made = trainable().trainable
    monkeypatch.setattr(made.worker, "require_reduced", unfinished)
    with pytest.raises(RuntimeError, match="finished reduction"):
        train_from_start(made)


def test_a_wrapper_that_replaces_parameters_is_an_error(trainable, monkeypatch):
    """As sharded ones do: an optimizer of the former parameters trains nothing, and the figures look as usual."""
    made = trainable()
    setup, batches = made.setup, made.trainable.batches

    def replace(module, **_):
        for layer in module.modules():
            for name, p in list(layer.named_parameters(recurse=False)):
                setattr(layer, name, torch.nn.Parameter(p.detach().clone()))
        return module

    wrapped = []
    monkeypatch.setattr(setup.worker, "wrap", lambda module, **_: wrapped.append(copy.deepcopy(module)) or wrapped[0])
    with pytest.raises(RuntimeError, match="the optimizer's parameters are not those of the wrapped module"):
        setup.trainable(made.trainable.model, batches)
    monkeypatch.setattr(setup.worker, "wrap", replace)
    setup.trainable(made.trainable.model, batches)  # in place: the optimizer is made of what is there then


def test_frozen_parameters_stay(trainable):
    made = trainable()
    first, *others = made.trainable.model.parameters()
    first.requires_grad_(False)
    frozen = made.setup.trainable(made.trainable.model, made.trainable.batches)
    before = [p.detach().clone() for p in (first, *others)]
    train_from_start(frozen)
    assert [torch.equal(a, b) for a, b in zip(before, (first, *others), strict=True)] == [True] + [False] * len(others)
