"""State beside the parameters that a model could keep: what is looked at, and what is not."""

import contextvars
import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn

from samebits.errors import RefusedError
from samebits.numerics.exact import kept
from samebits.numerics.exact.kept import Kept


def kept_of(state):
    model = nn.Module()
    model.state = state
    return Kept(model)


def unfinished():
    """A function whose variable has no value yet."""
    if torch is None:
        later = 0
    return lambda: later


@pytest.mark.parametrize(
    ("make", "change", "name"),
    [
        (lambda: random.Random(0), lambda dice: dice.random(), "model.state"),
        (lambda: np.random.default_rng(0), lambda numbers: numbers.random(), "model.state"),
        (lambda: np.random.RandomState(0), lambda numbers: numbers.rand(), "model.state"),
        (torch.Generator, lambda numbers: torch.rand(1, generator=numbers), "model.state"),
        (itertools.count, next, "model.state"),
        (lambda: (number for number in range(9)), next, "model.state"),
        (lambda: contextvars.ContextVar("state"), lambda state: state.set(1), "model.state"),
        (lambda: np.zeros(2), lambda array: array.__setitem__(1, 1.0), "model.state"),
        (lambda: torch.ones(2, requires_grad=True) * 2, lambda tensor: tensor.data.add_(1), "model.state"),
        (unfinished, lambda f: setattr(f.__closure__[0], "cell_contents", 1), "later of unfinished.<locals>.<lambda>"),
    ],
)
def test_a_change_is_named_by_its_place(make, change, name):
    state = make()
    before = kept_of(state)
    assert [*before.changes()] == []
    change(state)
    assert [*before.changes()] == [name]


def test_what_is_too_large_to_compare_hides_nothing_else(monkeypatch):
    monkeypatch.setattr(kept, "_MOST_BYTES", 100)
    state = [torch.zeros(99), np.zeros(99), np.zeros(1), torch.zeros(1)]
    before = kept_of(state)
    state[0][0] = state[1][0] = 1.0  # too large
    assert [*before.changes()] == []
    state[2][0] = state[3].data[0] = 1.0
    assert [*before.changes()] == ["model.state[2]", "model.state[3]"]


def test_an_iterator_whose_place_cannot_be_read_is_refused_before_it_moves():
    with pytest.raises(RefusedError, match=r"^exact: model\.state, an iterator: written in forward"):
        kept_of(iter([1, 2]))
