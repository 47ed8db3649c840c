"""Functions with a form of their own in exact's forward pass, because PyTorch's draw in other ways on other devices."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from samebits.errors import RefusedError
from samebits.numerics.exact.batch_norm import ShardNorms
from samebits.numerics.exact.engine import Engine
from samebits.numerics.exact.forms import OneForm
from samebits.numerics.exact.forward_draws import Draws

WEIGHTS = torch.tensor([[0.1, 0.2, 0.7], [3.0, 0.0, 1.0]])


def exactly(compute, *, together=False, step=0):
    engine = Engine(Draws(0, step, [0]))
    with engine, OneForm(engine, ShardNorms(nn.Module(), engine), together=torch.empty(0) if together else None):
        return compute()


def test_draws_with_replacement_come_as_often_as_they_weigh():
    drawn = exactly(lambda: torch.multinomial(WEIGHTS, 20_000, replacement=True))
    assert drawn.shape == (2, 20_000)
    for row, weights in zip(drawn, WEIGHTS, strict=True):
        shares = torch.bincount(row, minlength=3) / len(row)
        torch.testing.assert_close(shares, weights / weights.sum(), rtol=0, atol=0.015)
    assert (drawn[1] != 1).all()


def test_draws_without_replacement_are_all_others():
    rows = WEIGHTS[0].expand(10_000, 3)
    drawn = exactly(lambda: rows.multinomial(2))
    assert (drawn[:, 0] != drawn[:, 1]).all()
    first = torch.bincount(drawn[:, 0], minlength=3) / len(drawn)
    torch.testing.assert_close(first, WEIGHTS[0], rtol=0, atol=0.015)
    second = torch.bincount(drawn[drawn[:, 0] == 2][:, 1], minlength=3)[:2]
    assert second[1] / second.sum() == pytest.approx(2 / 3, abs=0.02)
    assert exactly(lambda: torch.multinomial(input=WEIGHTS[1], num_samples=1)).shape == (1,)


def test_each_shard_draws_its_own():
    def draw(weights):
        return torch.multinomial(weights, 50, replacement=True)

    drawn = exactly(lambda: torch.func.vmap(draw, randomness="different")(WEIGHTS[:1].expand(2, 3)), together=True)
    assert not torch.equal(*drawn)


@pytest.mark.parametrize("weights", [[-1.0, 2.0], [float("nan"), 1.0], [float("inf"), 1.0], [0.0, 0.0]], ids=str)
def test_weights_that_are_none_are_named(weights):
    with pytest.raises(RuntimeError, match="multinomial: expected weights that are finite, not negative"):
        exactly(lambda: torch.multinomial(torch.tensor([weights, [1.0, 1.0]]), 1))


PLACES = torch.tensor([0.0, 0.2, 0.9, 1.0])


def many():
    """Not made as this file is imported: by then PyTorch has threads, which a later fork would wait for."""
    return PLACES.repeat(10_000, 1)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.bernoulli(input=many()),
        lambda: many().bernoulli(),
        lambda: torch.empty_like(many()).bernoulli_(p=many()),
        lambda: torch.distributions.Bernoulli(many()).sample(),
    ],
)
def test_ones_come_with_the_probability_of_their_place(draw):
    drawn = exactly(draw)
    assert drawn.dtype == torch.float32
    assert drawn.unique(sorted=True).tolist() == [0.0, 1.0]
    torch.testing.assert_close(drawn.mean(0), PLACES, rtol=0, atol=0.015)


@pytest.mark.parametrize(
    ("draw", "mean", "std"),
    [
        (lambda: torch.normal(mean=many(), std=2.0), PLACES, torch.full((4,), 2.0)),
        (lambda: torch.normal(1.0, many()), torch.ones(4), PLACES),
        (lambda: torch.normal(many(), PLACES), PLACES, PLACES),
        (lambda: torch.distributions.Normal(many(), PLACES + 1).sample(), PLACES, PLACES + 1),
    ],
)
def test_normal_numbers_have_the_mean_and_the_deviation_of_their_place(draw, mean, std):
    drawn = exactly(draw)
    torch.testing.assert_close(drawn.mean(0), mean, rtol=0, atol=0.06)
    torch.testing.assert_close(drawn.std(0), std, rtol=0, atol=0.06)


def test_every_order_of_a_permutation_is_as_likely():
    drawn = torch.stack([exactly(lambda: torch.randperm(3), step=step) for step in range(3000)])
    assert drawn.dtype == torch.int64
    assert drawn.sort(1).values.unique(dim=0).tolist() == [[0, 1, 2]]
    _, counts = drawn.unique(dim=0, return_counts=True)
    torch.testing.assert_close(counts / 3000, torch.full((6,), 1 / 6), rtol=0, atol=0.03)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.bernoulli(torch.tensor([0.5, 1.1])),
        lambda: torch.empty(2).bernoulli_(torch.tensor([float("nan"), 0.5])),
        lambda: torch.normal(torch.zeros(2), torch.tensor([1.0, -1.0])),
    ],
)
def test_parameters_that_are_none_are_named(draw):
    with pytest.raises(RuntimeError, match=r"(bernoulli: expected probabilities|normal: expected standard deviations)"):
        exactly(draw)


@pytest.mark.parametrize("draw", [torch.bernoulli, lambda p, generator: torch.normal(p, p, generator=generator),
                                  lambda p, generator: torch.multinomial(p, 1, generator=generator),
                                  lambda p, generator: p.clone().bernoulli_(p, generator=generator)])  # fmt: skip
def test_a_generator_of_ones_own_is_refused(draw):
    with pytest.raises(RefusedError, match=r"bernoulli|normal|multinomial"):
        exactly(lambda: draw(WEIGHTS.clamp(max=1), generator=torch.Generator()))


def test_in_a_backward_pass_no_random_number_is_drawn():
    with pytest.raises(RefusedError, match=r"forward pass alone\. hint: draw in forward"), Engine():
        torch.rand(2)


def test_a_random_slope_is_drawn_for_every_negative_number():
    x = torch.cat([torch.full((10_000,), -1.0), torch.ones(10)]).requires_grad_()
    y = exactly(lambda: nn.RReLU()(x))
    assert torch.equal(y[-10:], x[-10:])
    slopes = -y[:-10].detach()
    assert ((slopes >= 1 / 8) & (slopes <= 1 / 3)).all()
    assert len(slopes.unique()) > 9_000
    y.sum().backward()
    assert torch.equal(x.grad, torch.cat([slopes, torch.ones(10)]))
    assert torch.equal(exactly(lambda: nn.RReLU().eval()(x)), nn.RReLU().eval()(x))


@pytest.mark.parametrize("normalized", [
    lambda x, switch: torch.layer_norm(x, (4,), None, None, 1e-5, switch),
    lambda x, switch: torch.layer_norm(x, (4,), cudnn_enable=switch),
    lambda x, switch: torch.group_norm(x, 2, None, None, 1e-5, switch),
    lambda x, switch: torch.group_norm(x, 2, cudnn_enabled=switch),
])  # fmt: skip
def test_a_switch_of_cudnn_changes_nothing(normalized):
    x = torch.arange(8.0).reshape(2, 4)
    on, off = (exactly(lambda switch=switch: normalized(x, switch)) for switch in (True, False))
    assert torch.equal(on, off)
    torch.testing.assert_close(on, normalized(x, True))


def test_running_statistics_of_instances_are_used_as_pytorch_uses_them():
    norm = nn.InstanceNorm1d(3, affine=True, track_running_stats=True)
    norm(torch.arange(24.0).view(2, 3, 4))
    norm.weight.data = torch.tensor([0.5, 2.0, 3.0])
    x, norm = torch.linspace(-2, 2, 24).view(2, 3, 4), norm.eval()
    torch.testing.assert_close(exactly(lambda: norm(x)), norm(x))


@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
@pytest.mark.parametrize("loss", [F.binary_cross_entropy, F.binary_cross_entropy_with_logits])
@pytest.mark.parametrize(
    "settings",
    [{}, {"reduction": "sum"}, {"reduction": "none"}, {"size_average": False}, {"size_average": True},
     {"reduce": False}, {"reduce": True, "reduction": "sum"}],
    ids=str,
)  # fmt: skip
def test_a_loss_is_reduced_as_its_arguments_say(settings, loss):
    x, target = torch.linspace(0.1, 0.8, 6).view(2, 3), torch.linspace(0.0, 1.0, 6).view(2, 3)
    torch.testing.assert_close(exactly(lambda: loss(x, target, **settings)), loss(x, target, **settings))
