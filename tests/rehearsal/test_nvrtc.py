"""NVRTC makes no instruction of the kernels for GPUs that multiplies and adds at once or rounds in another way."""

import re
from collections import Counter

import pytest
import torch

from samebits.numerics.exact.compiled import gpu
from stand_in import why_not

pytestmark = [pytest.mark.rehearsal, pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121")


def arithmetic(architecture):
    """How often each instruction of arithmetic stands in the kernels for an architecture."""
    text = gpu.translated(architecture, "PTX").decode(errors="replace")
    return Counter(re.findall(r"^\s*((?:fma|mad|add|sub|mul|div|sqrt|rcp|rsqrt)\.[\w.]*f(?:32|64))\b", text, re.M))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_instruction_of_arithmetic_rounds_once_to_nearest(architecture):
    found = arithmetic(architecture)
    assert sum(found.values()) > 1000
    assert {one.rpartition(".")[0] for one in found} == {"add.rn", "sub.rn", "mul.rn", "div.rn", "rcp.rn", "sqrt.rn"}


def test_without_the_option_products_and_sums_are_joined(monkeypatch):
    monkeypatch.setattr(gpu, "OPTIONS", tuple(option for option in gpu.OPTIONS if option != "--fmad=false"))
    assert sum(count for one, count in arithmetic("sm_80").items() if one.startswith("fma")) > 500


def test_the_lock_has_no_other_architecture():
    known = set(torch._C._cuda_getArchFlags().split())
    assert known - {"compute_120"} <= set(ARCHITECTURES), known
