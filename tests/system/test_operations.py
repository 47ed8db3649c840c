"""Every operation of PyTorch's test database under the exact engine: the same bits in every environment, or refused."""

import functools
import json
import os
import subprocess
import sys

import pytest

import operations_probe
from conftest import ROOT
from exact_probe import this_cpu_has

# Of these the first is tried by default, and the others are slow.
ENVIRONMENTS = [
    {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    {"ATEN_CPU_CAPABILITY": "avx2", "PROBE_THREADS": "2"},
    {"ATEN_CPU_CAPABILITY": "avx512", "MKL_CBWR": "COMPATIBLE"},
]
# What is random or not initialised cannot be near PyTorch's own result.
FREE_TO_DIFFER = ("empty", "rand", "dropout", "normal", "uniform", "bernoulli", "attention", "multinomial", "cauchy",
                  "exponential")  # fmt: skip
EXPECTED = {
    "add", "addmm", "bmm", "cumsum", "div", "einsum", "exp", "log", "matmul", "mean", "mul", "pow", "prod", "softmax",
    "sin", "sqrt", "std", "sum", "tanh", "topk", "var", "index_add", "scatter_add", "nn.functional.avg_pool2d",
    "nn.functional.conv1d", "nn.functional.conv2d", "nn.functional.embedding", "nn.functional.gelu",
    "nn.functional.group_norm", "nn.functional.layer_norm", "nn.functional.linear", "nn.functional.max_pool2d",
    "nn.functional.rms_norm", "nn.functional.scaled_dot_product_attention", "nn.functional.silu",
}  # fmt: skip
GOLDEN = {
    name: (inputs, results)
    for name, inputs, results in map(str.split, (ROOT / "tests/golden/operations.txt").read_text().splitlines())
}
FEWEST = 600  # operations whose samples are the same everywhere; of a few, what PyTorch computes for them differs
probe_once = functools.cache(lambda number: operations_probe.probe_in(ENVIRONMENTS[number]))
in_each_environment = pytest.mark.parametrize(
    "number",
    [pytest.param(i, marks=[pytest.mark.slow] if i else [], id=str(environ)) for i, environ in enumerate(ENVIRONMENTS)],
)


def probe(number):
    if not this_cpu_has(ENVIRONMENTS[number]):
        pytest.skip(f"this CPU has no {ENVIRONMENTS[number]['ATEN_CPU_CAPABILITY']}")
    return probe_once(number)


@in_each_environment
@pytest.mark.timeout(900)
def test_every_operation_has_its_golden_bits_or_is_refused(number):
    found = operations_probe.golden(probe(number))
    names = [name for name in GOLDEN.keys() & found.keys() if found[name][0] == GOLDEN[name][0]]
    assert len(names) > FEWEST, "another PyTorch? python tests/golden/make.py"
    changed = [name for name in names if found[name] != GOLDEN[name]]
    assert changed == [], "meant? python tests/golden/make.py operations"


@in_each_environment
def test_no_operation_fails_in_another_way(number):
    assert {name: found["error"] for name, found in probe(number).items() if "error" in found} == {}


@in_each_environment
def test_results_are_those_of_pytorch(number):
    far = {name: found["far"] for name, found in probe(number).items() if found["far"]}
    assert {name: why for name, why in far.items() if not any(word in name for word in FREE_TO_DIFFER)} == {}


@in_each_environment
def test_what_is_promised_is_computed(number):
    computed = {name.split(".no_rounding")[0] for name, found in probe(number).items() if found["computed"]}
    assert EXPECTED - computed == set()


@in_each_environment
def test_refusals_name_the_operation_and_what_to_do(number):
    for found in probe(number).values():
        for text in found["refused"]:
            assert text.startswith("exact: ")
            assert "hint: " in text


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_operation_has_the_same_bits_everywhere():
    """Also those whose samples are not the golden ones on this host."""
    possible = [number for number, environ in enumerate(ENVIRONMENTS) if this_cpu_has(environ)]
    if len(possible) < 2:
        pytest.skip("this CPU has one set of instructions that PyTorch uses")
    probes = [probe(number) for number in possible]
    names = [name for name in probes[0] if len({found[name].get("inputs") for found in probes}) == 1]
    assert len(names) > FEWEST
    different = [name for name in names if len({found[name].get("hash") for found in probes}) > 1]
    assert [name for name in different if operations_probe.UNINITIALISED not in name] == []


# PyTorch takes these apart for several shards in a way that rounds elsewhere, as what a loss of all samples does with
# their number. A model of theirs has its shards run one by one, after the trial before a training.
ROUNDED_ELSEWHERE = {
    "logcumsumexp", "native_group_norm", "native_layer_norm", "nn.functional.margin_ranking_loss",
    "nn.functional.nll_loss", "nn.functional.soft_margin_loss", "nn.functional.triplet_margin_loss", "select_scatter",
}  # fmt: skip
USUAL = ("matmul", "softmax", "index_add", "scatter_add", "nn.functional.conv2d", "nn.functional.embedding", "cumsum",
         "nn.functional.layer_norm", "nn.functional.dropout", "nn.functional.max_pool2d", "sort", "gather", "var",
         "nn.functional.scaled_dot_product_attention", "nn.functional.cross_entropy", "index_put")  # fmt: skip


def together(*names):
    done = subprocess.run(
        [sys.executable, ROOT / "tests/numerics/together_probe.py", *names],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_usual_operations_give_several_shards_the_bits_of_each_alone():
    """And a replay over other numbers gives those of the pass."""
    found = together(*USUAL)
    assert {name for name, counts in found.items() if set(counts) & {"results", "gradients", "replay"}} == set()
    assert all(found[name].get("same") and found[name].get("recorded") for name in USUAL), found


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_operation_gives_several_shards_the_bits_of_each_alone():
    found = together()
    assert {name for name, counts in found.items() if set(counts) & {"results", "gradients"}} == ROUNDED_ELSEWHERE
    assert sum(counts.get("same", 0) for counts in found.values()) > 1500
    assert {name for name, counts in found.items() if counts.get("replay")} == set()
    assert sum(counts.get("recorded", 0) for counts in found.values()) > 2200
