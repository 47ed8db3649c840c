"""No kernel for GPUs multiplies and adds at once, or rounds in another way: neither NVRTC's nor the machine's code."""

import re
import subprocess
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from samebits.numerics.exact.compiled import gpu
from stand_in import why_not

pytestmark = [pytest.mark.rehearsal, pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121")
TOGETHER = ("DFMA", "FFMA")
"""Instructions of a GPU that multiply and add at once. Divisions and square roots alone consist of them."""
ONES = {"mul.rn.f64": "DMUL", "add.rn.f64": "DADD", "sub.rn.f64": "DADD", "mul.rn.f32": "FMUL", "add.rn.f32": "FADD",
        "sub.rn.f32": "FADD"}  # fmt: skip
"""The instruction of a GPU for each of PTX that rounds once."""


def arithmetic(architecture):
    """How often each instruction of arithmetic stands in each kernel for an architecture."""
    text = gpu.translated(architecture, "PTX").decode(errors="replace")
    kernels = re.findall(r"\.visible \.entry (\w+)\((.*?)\n\}", text, re.S)
    found = r"^\s*((?:fma|mad|add|sub|mul|div|sqrt|rcp|rsqrt)\.[\w.]*f(?:32|64))\b"
    return {name: Counter(re.findall(found, body, re.M)) for name, body in kernels}


def machine_code(architecture, folder):
    """How often each instruction of the GPU stands in each kernel for an architecture."""
    file = folder / "kernels.cubin"
    file.write_bytes(gpu.translated(architecture, "CUBIN"))
    disassembler = Path(find_spec("triton").origin).with_name("backends") / "nvidia/bin/nvdisasm"
    done = subprocess.run([disassembler, "-c", file], capture_output=True, text=True, check=True)
    kernels = re.split(r"^\s*\.section\s+\.text\.(\w+)", done.stdout, flags=re.M)[1:]
    found = r"^\s*/\*[0-9a-f]+\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z0-9_]+)"
    bodies = zip(kernels[::2], kernels[1::2], strict=True)
    return {name: Counter(re.findall(found, body, re.M)) for name, body in bodies}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_instruction_of_arithmetic_rounds_once_to_nearest(architecture, tmp_path):
    asked = arithmetic(architecture)
    found = sum(asked.values(), Counter())
    assert found.total() > 1000
    assert {one.rpartition(".")[0] for one in found} == {"add.rn", "sub.rn", "mul.rn", "div.rn", "rcp.rn", "sqrt.rn"}
    made = machine_code(architecture, tmp_path)
    assert made.keys() == asked.keys()
    divided = {name for name, of in asked.items() if any(one.startswith(("div", "rcp", "sqrt")) for one in of)}
    assert {name for name, of in made.items() if any(of[one] for one in TOGETHER)} <= divided
    for name, of in asked.items():  # a product and a sum that are joined are missing
        least = sum((Counter({ONES[one]: count}) for one, count in of.items() if one in ONES), Counter())
        assert least <= made[name], name


def test_without_the_option_products_and_sums_are_joined(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "OPTIONS", tuple(option for option in gpu.OPTIONS if option != "--fmad=false"))
    asked = sum(arithmetic("sm_80").values(), Counter())
    assert sum(count for one, count in asked.items() if one.startswith("fma")) > 500
    assert machine_code("sm_80", tmp_path)["exp_float"]["DFMA"] > 50


def test_the_lock_has_no_other_architecture():
    known = set(torch._C._cuda_getArchFlags().split())
    assert known - {"compute_120"} <= set(ARCHITECTURES), known
