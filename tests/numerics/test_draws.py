"""Draws in a forward pass that follow the sample on any device."""

import pytest
import torch
from torch.nn import functional as F

from samebits.numerics.draws import SharedDraws
from samebits.numerics.interface import MicroBatch

SAMPLES = 8


def drawn(draw, first=0, last=SAMPLES, *, seed=0, step=0):
    """What a rank with these samples of a global batch draws, twice in a step, and what has no such draws."""
    shared, rows = SharedDraws(seed, SAMPLES), torch.ones(last - first, 300)
    with shared.of(MicroBatch(rows, None, step, start=first)):
        return draw(rows), draw(rows), shared.unshared


def fused(x, train=True):
    """Dropout as a GPU has it."""
    return torch.native_dropout(x, 0.25, train)[0]


@pytest.mark.parametrize("draw", [fused, lambda x: F.dropout(x, 0.25), lambda x: torch.randn(2 * len(x), 3)])
def test_a_sample_has_its_draws_on_any_device(draw):
    whole, again, unshared = drawn(draw)
    parts = [drawn(draw, *part) for part in ((0, 2), (2, 3), (3, SAMPLES))]
    assert torch.equal(torch.cat([part[0] for part in parts]), whole)
    assert torch.equal(torch.cat([part[1] for part in parts]), again)
    assert not any(torch.equal(whole, one) for one in (again, drawn(draw, seed=1)[0], drawn(draw, step=1)[0]))
    assert unshared == set()


@pytest.mark.parametrize("draw", [lambda x: torch.randn(7, 3), lambda x: torch.rand(())])
def test_what_is_not_of_the_samples_is_the_same_on_all_devices(draw):
    assert torch.equal(drawn(draw, 0, 2)[0], drawn(draw, 2, SAMPLES)[0])


def test_a_fused_dropout_scales_what_it_keeps():
    torch.testing.assert_close(drawn(fused)[0].unique(), torch.tensor([0.0, 4 / 3]))
    assert (drawn(lambda x: fused(x, train=False))[0] == 1).all()


def test_a_draw_that_cannot_be_shared_is_named():
    assert drawn(torch.bernoulli)[2] == {"aten::bernoulli"}
    assert drawn(lambda x: torch.rand(3, generator=torch.Generator()))[2] == {"aten::rand.generator"}
