"""Draws of PyTorch's in a dataset: the same bits whatever the instruction set, of the right distribution."""

import math
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from samebits.training.sample_draws import portable_draws

PROBE = """
import hashlib, torch
from samebits.training.sample_draws import portable_draws
torch.manual_seed(1)
with portable_draws():
    drawn = [torch.randn(99_999), torch.rand(99), torch.randperm(99), torch.empty(999).uniform_(0.1, 0.7),
             torch.normal(2.0, torch.tensor([0.1, 9.0])), torch.randn_like(torch.ones(33)), torch.ones(9).normal_(1, 2)]
print(hashlib.sha256(b"".join(one.numpy().tobytes() for one in drawn)).hexdigest())
"""
KERNELS = ({}, {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
           {"NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3 AVX512F"})  # fmt: skip


def test_draws_do_not_depend_on_the_instruction_set():
    runs = [
        subprocess.run([sys.executable, "-c", PROBE], env={**os.environ, **kernels}, capture_output=True, text=True)
        for kernels in KERNELS
    ]
    assert len({run.stdout for run in runs}) == 1, [run.stderr for run in runs]
    assert len(runs[0].stdout) == 65


def test_normal_numbers_are_of_that_distribution():
    torch.manual_seed(0)
    with portable_draws():
        x = torch.randn(400_000, dtype=torch.float64)
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3), (6, 15)):
        assert (x**power).mean().item() == pytest.approx(
            moment, abs=5 * math.sqrt(11000 / len(x)) if power == 6 else 0.04
        )
    for edge in (-4.0, -1.0, 0.3, 2.0, 4.0):  # also in the outer cells
        share = 0.5 * math.erfc(-edge / math.sqrt(2))
        assert (x < edge).double().mean().item() == pytest.approx(
            share, abs=5 * math.sqrt(share * (1 - share) / len(x))
        )


def test_each_form_of_the_functions():
    with portable_draws():
        assert torch.randn(2, 3).shape == torch.randn((2, 3)).shape == torch.randn(torch.Size([2, 3])).shape == (2, 3)
        assert torch.randn(()).shape == ()
        assert torch.randn(0).shape == (0,)
        assert torch.randn(3, dtype=torch.float64, requires_grad=True).requires_grad
        assert torch.randn(2, dtype=torch.complex64).is_complex()  # PyTorch's own
        assert torch.randn_like(torch.ones(2, 3), dtype=torch.bfloat16).dtype == torch.bfloat16
        assert torch.normal(5.0, 0.0, (4,)).tolist() == [5.0] * 4
        assert torch.normal(mean=torch.ones(2, dtype=torch.bfloat16), std=2.0).dtype == torch.bfloat16
        assert torch.normal(torch.zeros(99, dtype=torch.float64), 1.0).float().double().ne(0).any()
        assert torch.normal(1.0, 2.0, size=(3,), requires_grad=True).is_leaf
        assert torch.ones(3).normal_(0, torch.tensor(2.0)).shape == (3,)
        assert torch.randn(2, out=torch.empty(2)).shape == (2,)
        with pytest.raises(RuntimeError):
            torch.normal(0.0, -1.0, (2,))
        assert torch.normal(torch.tensor([[1.0], [2.0]]), torch.zeros(3)).tolist() == [[1.0] * 3, [2.0] * 3]
        for filled in (torch.empty(999).uniform_(2.0, 4.0), torch.empty(999).uniform_(2.0, to=4.0),
                       torch.empty(999).uniform_(**{"from": 2.0, "to": 4.0})):  # fmt: skip
            assert 2.0 <= filled.min() < 2.1 < 3.9 < filled.max() <= 4.0
        assert torch.empty(99).uniform_(to=2.0).min() >= 0
        filled = torch.zeros(3)
        assert filled.normal_() is filled
        assert filled.any()


def test_a_generator_of_ones_own_is_pytorchs_business():
    def drawn():
        own = torch.Generator().manual_seed(3)
        return torch.cat([torch.randn(5, generator=own), torch.empty(5).normal_(generator=own),
                          torch.normal(0.0, 1.0, (5,), generator=own)])  # fmt: skip

    usual = drawn()
    with portable_draws():
        assert drawn().equal(usual)


def test_pytorchs_functions_come_back():
    usual = (torch.randn, torch.randn_like, torch.normal, Tensor.normal_, Tensor.uniform_)
    with pytest.raises(RuntimeError), portable_draws():
        torch.randn(-1)
    assert (torch.randn, torch.randn_like, torch.normal, Tensor.normal_, Tensor.uniform_) == usual
