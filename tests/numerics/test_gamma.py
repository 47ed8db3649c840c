"""The logarithm of the gamma function and its slope, beside a library of any precision and PyTorch's own."""

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.numerics.exact import gamma
from samebits.numerics.exact.engine import Engine

TRUE = {"lgamma": lambda x: mpmath.log(abs(mpmath.gamma(x))), "digamma": mpmath.digamma}
ERROR = {"lgamma": 2.0**-45, "digamma": 2.0**-43}
NUMBERS = st.one_of(
    st.floats(-30, 200, width=32), st.floats(0.75, 2.25, width=32), st.floats(-0.125, 0.125, width=32),
    st.integers(-100, 200).map(lambda n: n + 0.5),
)  # fmt: skip


@pytest.mark.parametrize("name", TRUE)
@settings(max_examples=100)
@given(x=NUMBERS)
def test_the_error_is_the_stated_one(name, x):
    if x <= 0 and x == round(x):
        return
    found = getattr(gamma, name)(torch.tensor([x], dtype=torch.float64)).item()
    with mpmath.workprec(400):
        true = TRUE[name](mpmath.mpf(x))
        assert abs(found - true) <= ERROR[name] * max(1, abs(true))


@pytest.mark.parametrize("name", TRUE)
def test_special_values_are_pytorch_s(name):
    x = torch.tensor([0.0, -0.0, 1.0, 2.0, -1.0, -7.0, math.inf, -math.inf, math.nan, 1e30, 3e38])
    with Engine():
        found = getattr(torch, name)(x)
    torch.testing.assert_close(found, getattr(torch, name)(x), rtol=1e-6, atol=0, equal_nan=True)


def test_a_likelihood_of_counts_has_its_gradient():
    """Negative binomial, as of single cells."""
    counts, rate = torch.tensor([0.0, 3.0, 17.0]), torch.tensor([0.3, 2.0, 40.0])

    def slopes(rate):
        rate = rate.clone().requires_grad_()
        likelihood = torch.distributions.NegativeBinomial(rate, 0.4, validate_args=False).log_prob(
            counts.to(rate.dtype)
        )
        return likelihood.detach(), torch.autograd.grad(likelihood.sum(), rate)[0]

    with Engine():
        found = slopes(rate)
    for got, expected in zip(found, slopes(rate.double()), strict=True):
        torch.testing.assert_close(got, expected.float(), rtol=3e-6, atol=1e-6)
