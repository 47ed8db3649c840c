"""The CTC loss in the exact numerics, beside PyTorch's own in float64."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from samebits.errors import RefusedError
from samebits.numerics.exact.batch_norm import ShardNorms
from samebits.numerics.exact.engine import Engine
from samebits.numerics.exact.forms import OneForm
from samebits.numerics.exact.forward_draws import Draws
from samebits.portable.random import Stream

SAMPLES = 6


def scores(steps, classes, *, samples=SAMPLES):
    numbers = torch.from_numpy(Stream(steps, "scores").normal(samples * steps * classes)).float()
    return numbers.mul_(3).view(steps, samples, classes).log_softmax(2)


def labels(most, classes, *, samples=SAMPLES):
    return torch.arange(samples * most).mul_(7).remainder_(5).remainder_(classes - 1).add_(1).view(samples, most)


def exactly(compute, x, *, together=False):
    """What ``compute`` gives of ``x`` under exact, and the gradient for ``x`` of its sum."""
    engine = Engine(Draws(0, 0, [0]))
    x = x.clone().requires_grad_()
    with engine, OneForm(engine, ShardNorms(nn.Module(), engine), together=torch.empty(0) if together else None):
        found = compute(x)
        total = found.sum()
    with Engine():
        return found.detach(), torch.autograd.grad(total, x)[0]


def truly(compute, x):
    x = x.double().requires_grad_()
    found = compute(x)
    return found.detach(), torch.autograd.grad(found.sum(), x)[0]


CASES = {
    "repeated labels": (12, 3, 5, [12] * SAMPLES, [5, 4, 3, 2, 1, 0]),
    "shorter sequences": (16, 6, 4, [16, 9, 12, 4, 8, 10], [4, 4, 3, 0, 1, 2]),
    "one step": (1, 4, 1, [1] * SAMPLES, [1, 0, 1, 0, 1, 1]),
    "no labels": (7, 5, 0, [7, 6, 5, 4, 3, 2], [0] * SAMPLES),
}


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("case", CASES)
def test_losses_and_slopes_are_what_pytorch_computes_in_float64(case, reduction):
    steps, classes, most, *lengths = CASES[case]
    given = (labels(most, classes), *map(torch.tensor, lengths))

    def compute(x):
        return F.ctc_loss(x, *given, reduction=reduction, zero_infinity=True)

    for got, expected in zip(
        exactly(compute, scores(steps, classes)), truly(compute, scores(steps, classes)), strict=True
    ):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected.float(), rtol=1e-6, atol=1e-7)


def test_labels_may_stand_behind_each_other_or_be_padded_by_what_is_no_class():
    x, lengths = scores(9, 5), [3, 1, 2, 3, 0, 2]
    rows = labels(3, 5)
    behind = torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])
    padded = rows.masked_fill(torch.arange(3) >= torch.tensor(lengths).unsqueeze(1), -1)
    found = [
        exactly(lambda x, given=given: F.ctc_loss(x, given, [9] * SAMPLES, lengths), x) for given in (behind, padded)
    ]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_one_sample_needs_no_axis_of_samples():
    x, row = scores(9, 5), labels(3, 5)
    whole, _ = exactly(lambda x: F.ctc_loss(x, row, [9] * SAMPLES, [3] * SAMPLES, reduction="none"), x)
    one, _ = exactly(lambda x: F.ctc_loss(x, row[2], torch.tensor(9), torch.tensor(3), reduction="none"), x[:, 2])
    assert one.dim() == 0
    assert torch.equal(one, whole[2])


@pytest.mark.parametrize("left_out", [False, True])
def test_a_sample_without_a_path_has_no_gradient_but_where_it_is_left_out(left_out):
    rows, lengths = torch.tensor([[1, 1, 1], [1, 2, 3]]), torch.tensor([3, 3])

    def compute(x):
        return F.ctc_loss(x, rows, torch.tensor([4, 4]), lengths, reduction="none", zero_infinity=left_out)

    losses, slopes = exactly(compute, scores(4, 4, samples=2))
    expected, _ = truly(compute, scores(4, 4, samples=2))
    assert losses[0] == (0.0 if left_out else math.inf)
    torch.testing.assert_close(losses, expected.float(), rtol=1e-6, atol=0)
    assert bool(slopes[:, 0].isnan().any()) != left_out
    assert left_out <= bool((slopes[:, 0] == 0).all())
    assert slopes[:, 1].isfinite().all()


def test_samples_do_not_change_each_other_and_shards_have_their_bits_in_one_pass():
    x, rows = scores(10, 5), labels(4, 5)
    lengths, sizes = torch.tensor([10, 9, 8, 10, 7, 10]), torch.tensor([4, 3, 2, 1, 0, 4])
    whole = exactly(lambda x: F.ctc_loss(x, rows, lengths, sizes, reduction="none"), x)

    def shards(x):
        def one(x, *given):
            return F.ctc_loss(x, *given, reduction="none")

        parts = (given.view(3, 2, *given.shape[1:]) for given in (rows, lengths, sizes))
        return torch.func.vmap(one, in_dims=(1, 0, 0, 0))(x.view(10, 3, 2, 5), *parts).flatten()

    assert all(torch.equal(one, other) for one, other in zip(exactly(shards, x, together=True), whole, strict=True))
    alone = exactly(lambda x: torch.ctc_loss(x, rows[:1], lengths[:1], sizes[:1], 0, 0, False), x[:, :1])
    assert torch.equal(alone[0], whole[0][:1])
    assert torch.equal(alone[1], whole[1][:, :1])


def test_lengths_that_are_no_lengths_are_named():
    with pytest.raises(ValueError, match="input_lengths: got 4 to 10, expected 0 to 9"):
        exactly(lambda x: F.ctc_loss(x, labels(3, 5), [10, 4] * 3, [3] * SAMPLES), scores(9, 5))
    with pytest.raises(ValueError, match="target_lengths: got -1 to 3, expected 0 to 3"):
        exactly(lambda x: F.ctc_loss(x, labels(3, 5), [9] * SAMPLES, [3, -1] * 3), scores(9, 5))


@pytest.mark.parametrize("wrong", [5, -1])
def test_a_label_that_is_no_class_is_named(wrong):
    rows = labels(3, 5)
    rows[1, 2] = wrong
    with pytest.raises(ValueError, match=rf"targets: got {min(wrong, 0)} to {max(wrong, 4)}, expected classes below 5"):
        exactly(lambda x: F.ctc_loss(x, rows, [9] * SAMPLES, [3] * SAMPLES), scores(9, 5))


def test_double_precision_is_refused_by_name():
    x = scores(9, 5).double()
    with pytest.raises(RefusedError, match="_ctc_loss"):
        exactly(lambda x: F.ctc_loss(x, labels(3, 5), torch.tensor([9] * SAMPLES), torch.tensor([3] * SAMPLES)), x)
