"""Products of numbers on grids by products of 8-bit integers have the bits of those in float64."""

import itertools
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import exact_probe
from conftest import ROOT
from samebits.host.variables import KERNELS, PRODUCTS
from samebits.numerics.exact import integer_products
from samebits.numerics.exact.grid import bits_of_products, snap, snap_rows
from samebits.numerics.exact.self_test.numbers import digest, floats

CPU = torch.device("cpu")
GOLDEN = json.loads((ROOT / "tests/golden/exact.json").read_text())


@pytest.fixture(autouse=True)
def afterwards():
    yield
    integer_products.start([])


def factors(rows, terms, width, salt, bits=None):
    bits = bits or bits_of_products(terms)
    x = floats((rows + width) * terms, salt, CPU)
    return snap_rows(x[: rows * terms].view(rows, terms), bits), snap(x[rows * terms :].view(terms, width), 0, bits)


def same(a, b):
    product = torch.matmul(a, b).add_(0.0)
    return digest([integer_products.by_digits(a, b)]) == digest([product])


@given(st.integers(1, 40), st.integers(1, 300), st.integers(1, 40), st.integers(0, 2**20), st.integers(1, 26))
def test_any_factors_on_grids(rows, terms, width, salt, bits):
    """Random bits: numbers of all sizes, zeros, infinities, and what is not a number."""
    assert same(*factors(rows, terms, width, salt, min(bits, bits_of_products(terms))))


@pytest.mark.parametrize("terms", [2047, 2048, 2049, 4096, 8192, 32768, 32769, 70000])
def test_as_many_terms_as_need_three_digits_or_two_sums(terms):
    bits = bits_of_products(terms)
    largest = torch.full((3, terms), 2.0**bits - 1.0).double()
    for a, b in itertools.product((largest, -largest, largest.mul(0.5).round()), repeat=2):
        assert same(a, b.T.contiguous())
    usual = torch.arange(5 * terms).mul(7919).remainder(65521).sub(32768).view(5, terms).float()
    assert same(snap_rows(usual, bits), snap(usual.T.contiguous() / 3.0, 0, bits))


@pytest.mark.parametrize("terms", [40, 33000])
def test_rows_at_a_time(terms, monkeypatch):
    monkeypatch.setattr(integer_products, "_FEWEST_ROWS", 5)
    monkeypatch.setattr(integer_products, "_MOST_NUMBERS", 1)
    assert same(*factors(23, terms, 3, 4))


@pytest.mark.parametrize("at", [(0, 0), (2, 40_000)])
@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite(number, at):
    a, b = torch.ones((4, 50_000)).double(), torch.ones((50_000, 3)).double()
    b[:, 1], b[:, 2] = 0.0, -1.0
    for x, place in ((a, at), (b, at[::-1])):
        x[place] = number
        assert same(a, b)  # then of both
    assert not integer_products.by_digits(a, b).isfinite().all()


@pytest.mark.parametrize("shapes", [((3, 5, 7), (7, 2)), ((1, 5, 7), (1, 7, 2)), ((3, 5, 7), (1, 7, 2))])
def test_large_products_alone_are_those_of_integers(shapes, monkeypatch):
    asked = []
    by_digits = integer_products.by_digits
    monkeypatch.setattr(integer_products, "by_digits", lambda a, b: asked.append(a.shape) or by_digits(a, b))
    monkeypatch.setattr(integer_products, "_chosen", {CPU})
    a, b = (torch.arange(torch.Size(shape).numel()).sub(11).view(shape).double() for shape in shapes)
    for side, least in ((2, 1), (3, 1), (1, 1 << 26)):
        monkeypatch.setattr(integer_products, "LEAST_SIDE", side)
        monkeypatch.setattr(integer_products, "LEAST", least)
        product = integer_products.multiply(a, b)
        assert product.shape == torch.matmul(a, b).shape
        assert torch.equal(product, torch.matmul(a, b))
    assert asked == [(a.shape[:-1].numel(), 7)]


@pytest.mark.parametrize("model", exact_probe.MODELS)
@pytest.mark.parametrize("together", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_trainings_have_the_bits_of_those_in_float64(model, together, monkeypatch):
    asked = []
    by_digits = integer_products.by_digits
    monkeypatch.setattr(integer_products, "by_digits", lambda a, b: asked.append(a.shape) or by_digits(a, b))
    monkeypatch.setattr(integer_products, "LEAST_SIDE", 1)
    monkeypatch.setattr(integer_products, "LEAST", 1)
    monkeypatch.setattr(integer_products, "_chosen", {CPU})
    monkeypatch.setenv(KERNELS, "python")  # as on a GPU, where none multiplies
    assert exact_probe.train(model, "adamw", together=together)[0] == GOLDEN[f"{model} adamw"]
    assert asked


def used(monkeypatch, setting=None, device=CPU):
    if setting is None:
        monkeypatch.delenv(PRODUCTS, raising=False)
    else:
        monkeypatch.setenv(PRODUCTS, setting)
    integer_products.start([device])
    return integer_products.are_used(device)


@pytest.mark.parametrize("faster", [True, False])
@pytest.mark.parametrize(("setting", "on_a_gpu"), [(None, None), ("int8", True), ("float64", False)])
def test_the_faster_of_both_is_used_on_a_gpu_and_else_what_the_variable_says(setting, on_a_gpu, faster, monkeypatch):
    assert used(monkeypatch, setting) == (setting == "int8")
    monkeypatch.setattr(integer_products, "_are_right", lambda device: True)
    monkeypatch.setattr(
        integer_products, "_seconds", lambda product, *_: 1.0 if product is torch.matmul else 0.7 + 0.2 * (not faster)
    )
    monkeypatch.setattr(torch, "ones", lambda *_, **__: None)
    assert used(monkeypatch, setting, torch.device("cuda", 1)) == (faster if on_a_gpu is None else on_a_gpu)


@pytest.mark.parametrize("how", ["other bits", "refused", "not there"])
def test_wrong_products_of_integers_are_never_used(how, monkeypatch):
    def wrong(a, b, *, out):
        if how == "refused":
            raise RuntimeError("_int_mm is not supported")
        torch._int_mm(a, b, out=out)[3, 2] += 1

    assert used(monkeypatch, "int8")
    monkeypatch.setattr(integer_products, "_multiply_integers", None if how == "not there" else wrong)
    assert not used(monkeypatch, "int8")
