"""Functions of float64 numbers under ``exact``, against true values of 60 digits."""

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.errors import UserError
from samebits.numerics.exact.engine import Engine
from samebits.numerics.exact.operations import doubles

FUNCTIONS = {
    "exp": (mpmath.exp, -700.0, 700.0, 1.5),
    "log": (mpmath.log, 5e-324, 1e308, 3.0),
    "exp2": (lambda x: mpmath.mpf(2) ** x, -1000.0, 1000.0, 2.0),
    "sqrt": (mpmath.sqrt, 1e-300, 1e300, 1.0),
}
"""By name the true function, the smallest and the largest argument, and the error in units of the last place."""
SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 5e-324, 1e-310, 1.7e308, -2.0, 3.0, 800.0, -740.0]


def error_in_ulps(found, truth):
    return abs(mpmath.mpf(found) - truth) / math.ulp(float(truth))


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=30)
@given(data=st.data())
def test_functions_are_right_to_their_last_bits(name, data):
    truth, low, high, ulps = FUNCTIONS[name]
    xs = data.draw(st.lists(st.one_of(st.floats(low, high), st.floats(max(low, -4), 4)), min_size=1, max_size=40))
    with mpmath.workdps(60):
        for x, found in zip(xs, getattr(doubles, name)(torch.tensor(xs, dtype=torch.float64)).tolist(), strict=True):
            assert error_in_ulps(found, truth(mpmath.mpf(x))) <= ulps, x


@pytest.mark.parametrize("name", ["sin", "cos"])
@settings(max_examples=30)
@given(xs=st.lists(st.one_of(st.floats(-(2.0**19), 2.0**19), st.floats(-4, 4)), min_size=1, max_size=40))
def test_sines_are_right_to_their_last_bit_beside_one(name, xs):
    with mpmath.workdps(60):
        for x, found in zip(xs, getattr(doubles, name)(torch.tensor(xs, dtype=torch.float64)).tolist(), strict=True):
            assert abs(mpmath.mpf(found) - getattr(mpmath, name)(mpmath.mpf(x))) <= 2.0**-52, x


@settings(max_examples=60)
@given(base=st.floats(1e-8, 1e8), exponents=st.lists(st.floats(-30, 30), min_size=1, max_size=40))
def test_powers_lose_an_ulp_for_each_unit_of_the_exponent_at_most(base, exponents):
    found = doubles.power(base, torch.tensor(exponents, dtype=torch.float64)).tolist()
    with mpmath.workdps(60):
        for y, power in zip(exponents, found, strict=True):
            assert error_in_ulps(power, mpmath.mpf(base) ** mpmath.mpf(y)) <= 2 + abs(y), y


def test_special_values_are_those_of_torch():
    x = torch.tensor(SPECIAL, dtype=torch.float64)
    for name in (*FUNCTIONS, "sin", "cos"):
        near = x[~(x.abs() > 2.0**19) | x.isinf()]
        found, expected = getattr(doubles, name)(near), getattr(torch, name)(near)
        torch.testing.assert_close(found, expected, rtol=1e-15, atol=0, equal_nan=True)
        assert torch.equal(found.signbit()[~found.isnan()], expected.signbit()[~expected.isnan()])
    exponents = [*SPECIAL, 0.5, -0.5, 2.0, 65.0, -65.0, 67.5]
    bases, exponents = torch.meshgrid(x, torch.tensor(exponents, dtype=torch.float64), indexing="ij")
    found = doubles.power(bases.contiguous(), exponents.contiguous())
    torch.testing.assert_close(found, bases.pow(exponents), rtol=1e-13, atol=0, equal_nan=True)
    for exponent in (0, 2, -3, 0.5, -0.5, 64, 65, 1.5):
        found = doubles.power(x, exponent)
        torch.testing.assert_close(found, x.pow(exponent), rtol=1e-13, atol=0, equal_nan=True)


def test_a_table_of_positions_is_exact_and_has_a_gradient():
    with Engine():
        rates = 1.0 / 10000.0 ** (torch.arange(0, 8, 2, dtype=torch.float64) / 8)
        angles = torch.outer(torch.arange(100, dtype=torch.float64), rates).requires_grad_()
        table = torch.cat([angles.sin(), angles.cos()], dim=1).float()
        table.square().sum().backward()
    truth = [[float(mpmath.sin(place / mpmath.mpf(10) ** power)) for power in range(4)] for place in range(100)]
    torch.testing.assert_close(table[:, :4].detach(), torch.tensor(truth), rtol=0, atol=2.0**-24)
    assert angles.grad.abs().max() < 1e-6  # the squares of a sine and its cosine are one together, whatever the angle


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_far_angles_in_float64_are_refused(name):
    for far in (2.0**19 + 1, -1e300):
        with pytest.raises(UserError, match=f"{name}.*above 2\\*\\*19"), Engine():
            getattr(torch.tensor([0.5, far], dtype=torch.float64), name)()
    with Engine():
        assert getattr(torch.tensor([2.0**19, math.nan], dtype=torch.float64), name)()[0].abs() < 1
