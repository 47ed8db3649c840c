"""The arithmetic of ``exact``: products, sums, elementary functions and windows, against the true values."""

import copy
import functools
import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import exact_probe
from samebits.errors import CollectiveError, UserError
from samebits.numerics.exact import elementary, optimizers
from samebits.numerics.exact.engine import Engine
from samebits.numerics.exact.grid import (
    bits_of_products,
    bits_of_sum,
    shift_of,
    shifter,
    top_of_magnitude,
    top_of_number,
)
from samebits.numerics.exact.optimizers import SGD, AdamW
from samebits.numerics.exact.products import matmul
from samebits.numerics.exact.sums import fixed_order_sum
from samebits.numerics.exact.windows import HEADROOM, Windows

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
SMALLEST_NORMAL = 2.0**-126
ULP_OF_ZERO = 2.0**-149


# -- products and sums -----------------------------------------------------------------------------------------


@st.composite
def factors(draw):
    rows, inner, columns = (draw(st.integers(1, most)) for most in (3, 12, 3))
    a, b = (draw(arrays(np.float32, shape, elements=FLOATS)) for shape in ((rows, inner), (inner, columns)))
    return torch.from_numpy(a), torch.from_numpy(b)


HALF_WAY = torch.tensor([[1.0, *[1 - 2.0**-24] * 11]])
"""Every number but the first lies half a step of its grid beside a step, and is rounded up."""


@settings(max_examples=300)
@example((HALF_WAY, HALF_WAY.mT))
@given(factors())
def test_a_product_is_as_near_as_its_bits_promise(given_factors):
    a, b = given_factors
    found, inner = matmul(a, b), a.shape[1]
    unit = Fraction(1, 2 ** bits_of_products(inner))
    for i, row in enumerate(a.tolist()):
        for j, column in enumerate(b.mT.tolist()):
            truth = sum(Fraction(x) * Fraction(y) for x, y in zip(row, column, strict=True))
            sizes = [Fraction(max(SMALLEST_NORMAL, *map(abs, line))) for line in (row, column)]
            assert abs(Fraction(found[i, j].item()) - truth) <= inner * unit * (2 + unit) * sizes[0] * sizes[1]


@settings(max_examples=100)
@given(factors(), st.randoms())
def test_neither_order_nor_company_changes_a_product(given_factors, random):
    a, b = given_factors
    order = list(range(a.shape[1]))
    random.shuffle(order)
    whole = matmul(a, b)
    assert torch.equal(matmul(a[:, order], b[order]), whole)
    assert all(torch.equal(matmul(a[i : i + 1], b), whole[i : i + 1]) for i in range(a.shape[0]))


def test_what_is_not_finite_stays_in_its_row():
    a = torch.ones(3, 4)
    a[1, 2] = math.inf
    found = matmul(a, torch.ones(4, 2))
    assert found.isfinite().all(dim=1).tolist() == [True, False, True]


@settings(max_examples=200)
@given(arrays(np.float64, st.integers(1, 200), elements=st.floats(-1e150, 1e150)))
def test_a_sum_in_a_fixed_order_is_as_near_as_a_pairwise_one(values):
    found = fixed_order_sum(torch.from_numpy(values.copy()), (0,)).item()
    allowed = (len(values) - 1).bit_length() * 2.0**-53 * math.fsum(abs(values)) * (1 + 1e-12)
    assert abs(found - math.fsum(values)) <= allowed


@pytest.mark.parametrize(("terms", "sums", "products"), [(1, 53, 26), (2, 52, 26), (8, 50, 25), (1024, 43, 21)])
def test_bits_leave_room_for_the_sum(terms, sums, products):
    assert (bits_of_sum(terms), bits_of_products(terms)) == (sums, products)


# -- elementary functions --------------------------------------------------------------------------------------

FUNCTIONS = {
    "exp": mpmath.exp,
    "expm1": mpmath.expm1,
    "log": mpmath.log,
    "log1p": mpmath.log1p,
    "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)),
    "tanh": mpmath.tanh,
    "erf": mpmath.erf,
    "sin": mpmath.sin,
    "cos": mpmath.cos,
    "sqrt": mpmath.sqrt,
    "rsqrt": lambda x: 1 / mpmath.sqrt(x),
    **{name: getattr(mpmath, name) for name in ("sinh", "cosh", "atan", "asin", "acos", "asinh", "acosh", "atanh")},
}
BETWEEN = {
    "log": (0.0, math.inf), "log1p": (-1.0, math.inf), "sqrt": (0.0, math.inf), "rsqrt": (0.0, math.inf),
    "asin": (-1.0, 1.0), "acos": (-1.0, 1.0), "atanh": (-1.0, 1.0), "acosh": (1.0, math.inf),
}  # fmt: skip
"""Where a function is defined only between two numbers."""


def worst_ulps(name, values):
    """The largest error over ``values`` in units of the last place of a float32, and where it is."""
    low, high = BETWEEN.get(name, (-math.inf, math.inf))
    values = [x for x in values if low < x < high]
    if not values:
        return 0.0, None
    found = getattr(elementary, name)(torch.tensor(values, dtype=torch.float64)).to(torch.float32).tolist()
    worst = (0.0, None)
    with mpmath.workprec(400):
        for x, y in zip(values, found, strict=True):
            truth = FUNCTIONS[name](mpmath.mpf(x))
            if abs(truth) >= 2.0**128 * (1 - 2.0**-25):
                error = 0.0 if math.isinf(y) and (y > 0) == (truth > 0) else math.inf
            else:
                exponent = int(mpmath.floor(mpmath.log(abs(truth), 2))) if truth else -149
                ulp = max(ULP_OF_ZERO, 2.0 ** (max(exponent, -149) - 23))
                error = float(abs(mpmath.mpf(y) - truth) / ulp)
            worst = max(worst, (error, x), key=lambda pair: pair[0])
    return worst


def test_each_function_has_a_true_value_to_compare_with():
    assert {function.__name__ for function in elementary.FUNCTIONS} == FUNCTIONS.keys()


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=40)
@given(values=st.lists(st.one_of(FLOATS, st.floats(-20, 20, width=32)), min_size=1, max_size=40))
def test_functions_are_within_one_ulp(name, values):
    error, where = worst_ulps(name, values)
    assert error <= 1.0, where


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_within_one_ulp_over_all_exponents(name):
    patterns = np.arange(0, 2**32, 312_509, dtype=np.uint64).astype(np.uint32)
    values = patterns.view(np.float32)
    error, where = worst_ulps(name, values[np.isfinite(values)].tolist())
    assert error <= 1.0, where


SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 2.0**-149, -(2.0**-149), 2.0**127]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_special_values_are_those_of_ieee_754(name):
    x = torch.tensor(SPECIAL, dtype=torch.float64)
    expected = getattr(torch, name)(x).to(torch.float32)
    found = getattr(elementary, name)(x).to(torch.float32)
    special = ~expected.isfinite() | (expected == 0)
    torch.testing.assert_close(found[special], expected[special], rtol=0, atol=0, equal_nan=True)
    signed = special & ~expected.isnan()
    assert torch.equal(found[signed].signbit(), expected[signed].signbit())


# -- windows ---------------------------------------------------------------------------------------------------

CPU = torch.device("cpu")


def agree(windows, x, bits=40):
    """One sum at a place, made again as often as it needs."""
    for rounds in range(1, 5):
        values = windows.round("here", x, bits)
        if windows.settle(lambda tops: tops, CPU):
            return values, rounds
    raise AssertionError("no window is ever agreed")


def test_a_window_is_agreed_by_making_the_step_again():
    windows = Windows(["here"])
    values, rounds = agree(windows, torch.tensor([1.0, 0.75]))
    assert (values.tolist(), rounds, windows.widened) == ([1.0, 0.75], 2, 0)
    assert agree(windows, torch.tensor([1.0]))[1] == 1
    assert agree(windows, torch.tensor([2.0**HEADROOM]))[1] == 1  # which just fits
    assert (agree(windows, torch.tensor([2.0**HEADROOM * 2]))[1], windows.widened) == (2, 1)


def test_a_window_follows_magnitudes_that_shrink():
    windows = Windows(["here"])
    agree(windows, torch.tensor([1.0]))
    for _ in range(100):
        agree(windows, torch.tensor([2.0**-60]))
    assert agree(windows, torch.tensor([2.0**-60 + 2.0**-80]))[0].item() == 2.0**-60 + 2.0**-80
    assert windows.widened == 0


def test_ranks_agree_by_name_whatever_each_of_them_meets_first():
    ranks = [Windows(["a", "b", "c"]) for _ in range(2)]
    meets = [{"a": 1.0, "b": 4.0}, {"b": 0.5, "a": 2.0, "c": 8.0}]
    for _ in range(2):
        vectors = []
        for windows, sizes in zip(ranks, meets, strict=True):
            for place, size in sizes.items():
                windows.round(place, torch.tensor([size]), 40)
            copy.deepcopy(windows).settle(lambda vector, to=vectors: to.append(vector) or vector, CPU)
        largest = torch.stack(vectors).amax(0)
        fits = [windows.settle(lambda _, found=largest: found, CPU) for windows in ranks]
        assert ranks[0].tops == ranks[1].tops == {"a": 2 + HEADROOM, "b": 3 + HEADROOM, "c": 4 + HEADROOM}
    assert fits == [True, True]


def test_what_falls_under_a_window_is_counted():
    windows = Windows(["here"])
    agree(windows, torch.tensor([1.0, 2.0**-60, 0.0, 0.5]), bits=20)
    assert windows.share_below() == 1 / 3


def test_windows_that_are_cleared_are_as_new():
    windows = Windows(["here"])
    agree(windows, torch.tensor([1.0, 2.0**-60]), bits=20)
    agree(windows, torch.tensor([8.0]))
    windows.round("here", torch.tensor([64.0]), 40)  # of a step that was never settled
    windows.clear()
    assert (windows.tops, windows.widened, windows.share_below()) == ({}, 0, 0.0)
    assert agree(windows, torch.tensor([1.0, 2.0**-60]), bits=20)[1] == 2
    assert (windows.tops, windows.widened, windows.share_below()) == ({"here": 1 + HEADROOM}, 0, 0.5)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_sum_of_what_is_not_finite_is_an_error_that_names_it(value):
    windows = Windows(["the gradients of layer.weight"])
    windows.round("the gradients of layer.weight", torch.tensor([1.0, value]), 40)
    with pytest.raises(UserError, match=r"the gradients of layer\.weight: infinite or not a number"):
        windows.settle(lambda tops: tops, CPU)


def test_what_was_deferred_is_refused_when_the_step_is_settled():
    def ranks(*wrong):
        made = [Windows(["here"]) for _ in wrong]
        for windows, second in zip(made, wrong, strict=True):
            agree(windows, torch.tensor([1.0]))
            windows.round("here", torch.tensor([1.0]), 40)
            windows.defer(UserError("the first", hint=""), torch.tensor(False))
            windows.defer(UserError("the second", hint=""), torch.tensor(second))
        return made

    vectors = []
    for windows in ranks(False, False):
        assert windows.settle(lambda vector: vectors.append(vector) or vector, CPU)
    with pytest.raises(UserError, match="the second"):
        ranks(True)[0].settle(lambda vector: vectors.append(vector) or vector, CPU)
    largest = torch.stack(vectors).amax(0)
    refusing, waiting = ranks(True, False)
    with pytest.raises(UserError, match="the second"):
        refusing.settle(lambda _: largest, CPU)
    with pytest.raises(CollectiveError, match="another rank has refused the step"):
        waiting.settle(lambda _: largest, CPU)
    for windows in (refusing, waiting):  # what one step had refused is not the next one's
        assert agree(windows, torch.tensor([1.0]))[1] == 1


@pytest.mark.parametrize("together", [True, False])
def test_overflow_is_the_same_error_for_every_split(together, monkeypatch):
    monkeypatch.setitem(exact_probe.CHOSEN, "sgd", {"name": "sgd", "lr": 1e30})
    messages = set()
    for splits in (1, 2, 3, 8):
        with pytest.raises(UserError) as caught:
            exact_probe.train("mlp", "sgd", splits, together=together)
        messages.add(str(caught.value))
    (message,) = messages
    assert "infinite or not a number" in message


class Scaled(torch.nn.Module):
    """A model of small outputs, so that gradients are small, with inputs of sizes that differ by 10**6."""

    def __init__(self, inner, scale):
        super().__init__()
        self.inner, self.scale = inner, scale

    def forward(self, x):
        return self.inner(torch.cat([x[:, :10] * 1e-6, x[:, 10:]], 1)) * self.scale


@pytest.mark.parametrize(("scale", "falls_by"), [(1.0, 0.5), (1e-3, 0.5), (1e-4, 0.99), (1e-12, 1.0)])
def test_small_gradients_train_under_adamw_as_they_do_in_fast(scale, falls_by, monkeypatch):
    """AdamW divides by the size of a gradient, so what a window cuts off would show; below its epsilon none trains."""
    plain, make = exact_probe.data, exact_probe.MODELS["regression"]
    monkeypatch.setattr(exact_probe, "data", lambda model: (plain(model)[0], plain(model)[1] * scale))
    monkeypatch.setitem(exact_probe.MODELS, "regression", lambda: Scaled(make(), scale))
    monkeypatch.setitem(exact_probe.CHOSEN, "adamw", {"name": "adamw", "lr": 0.01})
    _, exact = exact_probe.train("regression", "adamw", steps=60)
    _, fast = exact_probe.train("regression", "adamw", steps=60, fast=True)
    assert exact == pytest.approx(fast, rel=2e-3)
    assert exact[-1] <= falls_by * exact[0]


@pytest.mark.parametrize("together", [True, False])
def test_columns_of_inputs_and_targets_get_their_gradients_however_small_they_are(together, monkeypatch):
    """Sizes differ by 2**38: on one grid of all columns, most would be rounded to zero."""
    inputs, targets = exact_probe.data("regression")
    inputs = inputs * 2.0 ** (-2 * torch.arange(inputs.shape[1]))
    targets = targets * 2.0 ** (-20 * torch.arange(targets.shape[1]))
    monkeypatch.setattr(exact_probe, "data", lambda _: (inputs, targets))
    built = []
    linear = functools.partial(torch.nn.Linear, *(t.shape[1] for t in (inputs, targets)))
    monkeypatch.setitem(exact_probe.MODELS, "regression", lambda: built.append(linear()) or built[-1])
    for fast in (False, True):
        exact_probe.train("regression", steps=1, together=together, fast=fast)
    exact, plain = (model.weight.grad.to(torch.float64) for model in built)
    torch.testing.assert_close(exact / targets.numel(), plain, rtol=0.05, atol=0.0)


OPTIMIZERS = [functools.partial(SGD, momentum=0.9), AdamW]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_gradient_counts_as_zeros_as_under_data_parallel(optimizer):
    def after(last):
        p = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
        stepper = optimizer([p], lr=0.1, terms=1, clip=None, weight_decay=0.1)
        for gradient in (torch.ones(2, dtype=torch.float64), last):
            p.grad = gradient
            stepper.step()
        return p.detach()

    assert torch.equal(after(None), after(torch.zeros(2, dtype=torch.float64)))
    assert not torch.equal(after(None), after(torch.ones(2, dtype=torch.float64)))


def test_subnormal_numbers_count_whatever_a_library_has_set():
    tiny = torch.tensor([1e-20])
    torch.set_flush_denormal(True)
    try:
        assert (tiny * tiny).item() == 0.0
        with Engine():
            assert (tiny * tiny).item() > 0.0
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_norm_does_not_tell_no_gradient_from_one_of_zeros(optimizer, monkeypatch):
    """DataParallel makes zeros of it, and a sum by halving has another order with a term more."""
    terms = []

    def summed(values, dims):
        terms.append(len(values))
        return fixed_order_sum(values, dims)

    monkeypatch.setattr(optimizers, "fixed_order_sum", summed)
    for idle in (None, torch.zeros(1, dtype=torch.float64)):
        parameters = [torch.nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(6)]
        for p in parameters:
            p.grad = torch.ones(1, dtype=torch.float64)
        parameters[1].grad = idle
        optimizer(parameters, lr=0.1, terms=1, clip=0.1, weight_decay=0.0).step()
        assert terms[-1] == len(parameters)


@pytest.mark.parametrize("bits", [1, 24, 50, 53])
@pytest.mark.parametrize("top", [-2000, -1074, -1022, -149, 0, 1, 128, 1023, 2000])
def test_a_shift_that_the_host_computes_is_that_of_the_device(top, bits):
    assert shift_of(top, bits) == shifter(torch.tensor(top), bits).item()


SIZES = [0.0, ULP_OF_ZERO, SMALLEST_NORMAL, 0.75, 1.0, 3e38, math.inf, math.nan, 2.0**-1022, 5e-324, 1e308]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_host_and_a_device_tell_other_ranks_the_same(size, dtype):
    size = torch.tensor(size, dtype=dtype)
    assert top_of_number(size) == top_of_magnitude(size).item()
    windows = Windows(["a", "b", "unseen"])
    windows.give({"b": [torch.tensor(1.5), torch.tensor(7.0)], "a": [size]}, [])
    for wrong in ([], [False], [False, True]):
        flags = [torch.tensor(one) for one in wrong]
        told = windows._told_by_host(flags)
        assert told.tolist() == windows._told_by_device(torch.device("cpu"), flags).tolist()
        assert told.tolist()[1:] == [3, -(1 << 20), 0, 0, 0, any(wrong)]
