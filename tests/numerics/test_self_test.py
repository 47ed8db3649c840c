"""The self-test of exact: an honest device passes, and each planted fault is refused by its name."""

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from conftest import MODEL_OF_TASK, small
from exact_probe import settings, this_cpu_has
from samebits.errors import HostError
from samebits.numerics.dispatch import EagerDispatchMode
from samebits.numerics.exact import elementary, integer_products
from samebits.numerics.exact.compiled import build, library
from samebits.numerics.exact.numerics import ExactNumerics
from samebits.numerics.exact.operations import EXACT
from samebits.numerics.exact.optimizers import AdamW
from samebits.numerics.exact.products import matmul
from samebits.numerics.exact.self_test import cases, check, digests
from samebits.numerics.exact.self_test.cases import CASES
from samebits.params import parse_params
from samebits.records.card import read_card
from samebits.strategies.replicas import Replicas
from samebits.training.collectives import INIT_METHOD, Collectives
from samebits.training.setup import Setup
from samebits.training.worker import Worker
from samples import placed

aten = torch.ops.aten
CPU, OTHER = torch.device("cpu"), torch.device("cpu", 1)  # the second takes part in copies, as another device does
LARGE = [name for name in CASES if name.startswith("product ") and any(c.isdigit() for c in name.split()[1])]
QUICK = LARGE[2:]  # on a CPU
SMALL = [name for name in CASES if name not in LARGE]

# Of these the first is tried by default, and the others are slow.
ENVIRONMENTS = [
    {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "OMP_NUM_THREADS": "2"},
    {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2"},
    {"ATEN_CPU_CAPABILITY": "avx512"},
    {"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41", "OMP_NUM_THREADS": "1"},
]


class Team:
    """One process on devices of this CPU; ``wrapped`` makes a strategy's wrapper of a module."""

    def __init__(self, *devices, wrapped=lambda module: module, ranks=None):
        self.devices, self.ranks, self._wrapped = devices, ranks or Collectives(CPU), wrapped

    def wrap(self, module, *, reduction):
        assert reduction == "sum"
        return self._wrapped(module)


def nudged(x, *_, **__):
    """A tensor with another last bit in its last finite number that is not zero."""
    x = x.clone(memory_format=torch.contiguous_format)
    flat = x.view(-1)
    index = (flat.isfinite() & (flat != 0)).nonzero()[-1] if x.is_floating_point() else -1
    flat.view(torch.int64 if x.dtype.itemsize == 8 else torch.int32)[index] ^= 1
    return x


class Planted(EagerDispatchMode):
    """A device whose result of some operations is ``fault(honest result, *arguments)``, unless that is None."""

    def __init__(self, names, fault):
        super().__init__()
        self._names, self._fault = names.split(), fault

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        in_place = name.endswith("_") and not name.startswith("__")
        if (name[:-1] if in_place else name) not in self._names:
            return func(*args, **kwargs)
        given = (args[0].clone(), *args[1:]) if in_place else args
        result = func(*args, **kwargs)
        wrong = self._fault(result, *given, **kwargs)
        if wrong is None:
            return result
        return result.copy_(wrong) if in_place else wrong


def failing(names):
    return check.wrong_cases(CPU, names)


def of(dtype, fault):
    """The fault in results of one type."""
    return lambda result, *args, **kwargs: fault(result, *args, **kwargs) if result.dtype == dtype else None


def between(low, high, fault):
    return lambda result, a, b, *rest: fault(result, a, b, *rest) if low <= a.shape[-1] <= high else None


def flushed(result, *_, **__):
    least = torch.finfo(result.dtype).tiny if result.is_floating_point() else 0
    return torch.where(result.abs() < least, 0.0, result) if result.is_floating_point() else None


def in_float32(result, a, b, *_, **__):
    return torch.matmul(a.float(), b.float()).double()


def with_fewer_bits(result, *_, **__):
    return torch.where(result.abs() >= 2.0**52, result.div(2.0).round().mul(2.0), result)


class Fused:
    """Joins a product and the addition or subtraction that follows it."""

    def __init__(self):
        self._last = None

    def __call__(self, result, x, y, **__):
        if result.dtype != torch.float32 or not isinstance(y, torch.Tensor):
            self._last = None
            return None
        for sign in (1.0, -1.0):
            if self._last is not None and torch.equal(x, self._last[0]) and torch.equal(result, x + sign * y):
                a, b = self._last[1:]
                self._last = None
                return (a.double() * b.double() + sign * y.double()).float()
        self._last = (result.clone(), x, y) if torch.equal(result, x * y) else None
        return None


def half_away(result, x):
    return x.abs().add(0.5).floor().copysign(x)


def towards_zero(result, x, **kwargs):
    if kwargs.get("dtype") != torch.float32 or x.dtype != torch.float64:
        return None
    over = result.double().abs() > x.abs()
    return torch.where(over, torch.nextafter(result, torch.zeros(())), result)


def by_reciprocal(result, x, y):
    if not isinstance(y, torch.Tensor) or not x.is_floating_point():
        return None
    return x.mul(torch.ones_like(y).div(y))


def logical_shift(result, x, count):
    return (result & ((1 << (64 - count)) - 1)) if x.dtype == torch.int64 and count else None


def as_double(result, x, y):
    if x.dtype != torch.int64 or not isinstance(y, int):
        return None
    return x.double().mul(y).clamp(-(2.0**62), 2.0**62).long()


def unstable(result, x, stable=None, dim=-1, descending=False):
    values, places = torch.sort(x.flip(dim), stable=True, dim=dim, descending=descending)
    return values, x.shape[dim] - 1 - places


OPERATIONS = {
    # fault: (the first case that names it, the operations, what they give)
    "last bit of one size of product": ("product 32 x 32768 x 48", "mm", between(32768, 32768, nudged)),
    "last bit of one layout": ("product 127 x 1021 x 61", "mm",
                               lambda y, a, b: nudged(y) if a.shape[0] == 127 and not a.is_contiguous() else None),
    "products in float32": (QUICK[0], "mm", in_float32),
    "products of 52 bits": (QUICK[0], "mm", with_fewer_bits),
    "a long sum loses a part": ("product 8 x 65536 x 24", "mm",
                                between(65536, 65536, lambda y, a, b: a[:, :-1] @ b[:-1])),
    "a product with one column": ("product 1000 x 2048 x 1", "mm",
                                  lambda y, a, b: nudged(y) if b.shape[1] == 1 else None),
    "a product with one row": ("product 1 x 2048 x 1000", "mm",
                               lambda y, a, b: nudged(y) if a.shape[0] == 1 else None),
    "the last matrix of a batch": ("products of a batch of matrices", "bmm",
                                   lambda y, a, b: torch.cat([y[:-1], y[:1]])),
    "products of a batch in float32": ("products of a batch of matrices", "bmm", in_float32),
    "integers multiplied as float64": ("integers", "mul", as_double),
    "a shift without the sign": ("integers", "__rshift__", logical_shift),
    "a sort that is not stable": ("integers", "sort", unstable),
    "additions of float32": ("float32 arithmetic", "add", of(torch.float32, nudged)),
    "division by the reciprocal": ("float32 arithmetic", "div", by_reciprocal),
    "products of float64 in float32": ("float64 arithmetic", "mul",
                                       of(torch.float64, lambda y, *_: y.float().double())),
    "contraction": ("a product, then a sum", "mul add sub", Fused()),
    "halves rounded away from zero": ("rounding and conversion", "round", half_away),
    "casts towards zero": ("rounding and conversion", "_to_copy", towards_zero),
    "tiny results flushed": ("tiny numbers", "mul", flushed),
    "tiny quotients flushed": ("tiny numbers", "div", flushed),
    "tiny numbers flushed by casts": ("tiny numbers", "_to_copy", flushed),
    "a maximum that skips NaN": ("comparisons and extremes", "amax",
                                 lambda y, x, *args, **more: torch.amax(x.nan_to_num(-9.0), *args, **more)),
    "a comparison": ("comparisons and extremes", "lt",
                     lambda y, a, b: ~y if isinstance(b, torch.Tensor) else None),
    "a sum in float32": ("sum on a grid", "sum",
                         of(torch.float64, lambda y, x, *args, **more: torch.sum(x.float(), *args, **more).double())),
    "a sum that loses a row": ("sum on a grid", "sum",
                               of(torch.float64, lambda y, x, dims, **more: torch.sum(x[:-1], dims, **more))),
    "an update that is lost": ("colliding index_add_", "index_add", lambda y, x, dim, i, terms:
                               torch.index_add(x, dim, i[:-1], terms[:-1])),
    "updates in float32": ("colliding index_add_", "index_add", lambda y, x, dim, i, terms:
                           torch.index_add(x.float(), dim, i, terms.float()).double()),
    "the last update instead of all": ("colliding scatter_add_", "scatter_add", lambda y, x, dim, i, terms:
                                       x.scatter(dim, i, terms)),
    "updates that overwrite": ("colliding index_put_", "index_put", lambda y, x, i, terms, accumulate=False:
                               torch.index_put(x, i, terms)),
    "a table read one place later": ("functions by table", "take", lambda y, x, i: x.roll(-1).take(i)),
    "roots": ("root_of_float", "sqrt", lambda y, x: y.mul(1.0 + 2.0**-24)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _as_on_a_gpu():
    """Python's functions, which these tests replace by wrong ones, in place of a CPU's kernels."""
    with library.using(None):
        yield


def test_compiled_kernels_give_what_is_expected():
    with library.using(library.Library(build.library())):
        assert failing([*CASES]) == []


@pytest.mark.parametrize("fault", OPERATIONS)
def test_a_wrong_operation_is_refused_by_name(fault, monkeypatch):
    expected, names, wrong = OPERATIONS[fault]
    some = QUICK if expected in QUICK else SMALL
    monkeypatch.setattr(check, "CASES", {name: CASES[name] for name in some})
    with Planted(names, wrong), pytest.raises(HostError) as refused:
        check.require_sound(Team(CPU))
    assert refused.value.message.startswith(f"the self-test of exact failed on cpu: {expected}")
    assert refused.value.message.endswith(" gave other bits than expected")
    assert refused.value.hint == CASES[expected].hint
    assert refused.value.exit_code == 3


FUNCTIONS = [function.__name__ for function in (elementary.root_of_float, *elementary.FUNCTIONS)]


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "erf"])
def test_a_function_that_is_wrong_by_one_ulp_is_refused_by_name(name, monkeypatch):
    honest = getattr(elementary, name)
    monkeypatch.setattr(elementary, name, lambda x: nudged(honest(x)))
    assert name in failing([name])


@pytest.mark.parametrize(
    ("module", "name", "wrong", "case"),
    [
        (cases, "fixed_order_sum", lambda x, dims: x.sum(dims, keepdim=True), "sum in a fixed order"),
        (cases, "matmul", lambda a, b: nudged(matmul(a, b)), "product of float32 factors"),
        (cases, "moved", lambda x, device: torch.zeros_like(x), "copies from the host and back"),
        (cases.of_the_host, "exp", lambda x: np.nextafter(np.exp(x), np.inf), "the host's own numbers"),
        (elementary, "power", lambda x, y: nudged(torch.ones_like(x)), "power"),
        (AdamW, "_update", lambda self, p, g, states, numbers: p.addcmul_(g, states[0], value=-0.01), "optimizers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_engine_is_refused_by_name(module, name, wrong, case, monkeypatch):
    monkeypatch.setattr(module, name, wrong)
    assert failing(SMALL)[0] == case


@pytest.mark.parametrize(
    ("packet", "case"),
    [
        (aten.convolution, "convolution"),
        (aten.cumsum, "sum on a grid"),
        (aten.embedding_dense_backward, "gradient of an embedding"),
        (aten._softmax, "softmax and norms"),
        (aten.native_layer_norm, "softmax and norms"),
    ],
    ids=str,
)
def test_a_wrong_version_is_refused_by_name(packet, case, monkeypatch):
    honest = EXACT[packet]

    def wrong(*args):
        result = honest(*args)
        return (nudged(result[0]), *result[1:]) if isinstance(result, tuple) else nudged(result)

    monkeypatch.setitem(EXACT, packet, wrong)
    assert failing(SMALL) == [case]


def test_numbers_flushed_to_zero_are_refused_by_name():
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush")
    try:
        assert failing(SMALL)[0] == "tiny numbers"
    finally:
        torch.set_flush_denormal(False)


# -- an honest device --------------------------------------------------------------------------------------------


def test_the_table_has_each_case():
    assert list(digests.DIGESTS) == list(CASES), "python tests/golden/make.py self-test"
    assert len(set(digests.DIGESTS.values())) == len(CASES) - 2  # three ways to add the same terms


def test_a_case_whose_bits_nobody_has_written_down_is_named():
    told = r"the self-test of exact has no digest of toy\. hint: `python tests/golden/make\.py self-test`"
    with pytest.raises(HostError, match=told):
        check.wrong_cases(torch.device("cpu"), ["toy"])


def test_an_honest_device_passes_in_any_order_of_terms():
    def reversed_terms(y, x, dim, places, terms):
        return torch.index_add(x, dim, places.flip(0), terms.flip(0))

    def reversed_product(y, a, b):
        return torch.matmul(a.flip(-1), b.flip(-2))

    check.require_sound(Team(CPU, OTHER, CPU))
    with Planted("index_add", reversed_terms):
        assert failing(SMALL) == []
    with Planted("mm", reversed_product):
        assert failing(LARGE) == []


@pytest.mark.parametrize("name", ["product 32 x 32768 x 48", "product 127 x 1021 x 61", "product 3000 x 64 x 10"])
def test_products_are_those_of_integers(name, monkeypatch):
    def of_integers(a, b):
        product = torch.from_numpy(a.long().numpy() @ b.long().numpy())
        assert product.abs().max() < 2**53
        return product.double()

    monkeypatch.setattr(cases, "exact_matmul", of_integers)
    assert failing([name]) == []


@pytest.mark.parametrize(
    "environ",
    [pytest.param(environ, marks=[pytest.mark.slow] if i else []) for i, environ in enumerate(ENVIRONMENTS)],
    ids=str,
)
def test_every_environment_passes(environ):
    if not this_cpu_has(environ):
        pytest.skip(f"this CPU has no {environ['ATEN_CPU_CAPABILITY']}")
    command = [sys.executable, "-m", "samebits.numerics.exact.self_test", "cpu"]
    done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert [line.split("  ")[-1] for line in done.stdout.splitlines() if line.startswith("ok ")] == list(CASES)


def test_the_command_says_what_fails(monkeypatch, capsys):
    from samebits.numerics.exact.self_test import __main__ as command

    monkeypatch.setattr(sys, "argv", ["self_test", "cpu"])
    monkeypatch.setattr(cases, "moved", lambda x, device: torch.zeros_like(x))
    for name in LARGE:
        monkeypatch.delitem(CASES, name)
    assert command.main() == 3
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[-1] for line in lines if line.startswith("failed")] == ["copies from the host and back"]


# -- between devices ---------------------------------------------------------------------------------------------


@pytest.fixture
def no_cases(monkeypatch):
    monkeypatch.setattr(check, "CASES", {})


@pytest.mark.parametrize(("zeros_to", "named"), [(OTHER, ("cpu:1", "cpu")), (CPU, ("cpu", "cpu:1"))])
def test_zeros_that_arrive_are_refused_by_name(zeros_to, named, no_cases, monkeypatch):
    monkeypatch.setattr(check, "moved", lambda x, target: torch.zeros_like(x) if target == zeros_to else x)
    with pytest.raises(HostError) as refused:
        check.require_sound(Team(CPU, OTHER))
    target, source = named
    assert refused.value.message == (
        f"the self-test of exact failed on {target}: a copy from {source} gave other bits than expected"
    )
    assert "IOMMU" in refused.value.hint
    assert "NCCL_P2P_DISABLE=1" in refused.value.hint


class Wrapper(torch.nn.Module):
    """A strategy on two devices that both are this CPU, with a fault between them."""

    def __init__(self, module, *, outputs=lambda y: y, gradient=lambda g: g, shares=lambda x: x):
        super().__init__()
        self.module, self._outputs, self._shares = module, outputs, shares
        for parameter in module.parameters():
            parameter.register_hook(gradient)

    def forward(self, x):
        return self._outputs(self.module(self._shares(x)))


SUM, SENT = "the sum of gradients over 2 devices", "weights sent to 2 devices"


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ({"gradient": lambda g: g.div(4.0)}, SUM),  # one contribution of the shares 1 and 3
        ({"gradient": lambda g: g.mul(0.75)}, SUM),  # the other
        ({"gradient": lambda g: g.div(2.0)}, SUM),  # a mean
        ({"gradient": lambda g: g.float().double()}, SUM),
        ({"gradient": nudged}, SUM),
        ({"outputs": lambda y: torch.cat([y[:1], y[1:].mul(0.0)])}, SENT),
    ],
)
def test_what_a_strategy_sends_is_refused_by_name(fault, named, no_cases):
    with pytest.raises(HostError) as refused:
        check.require_sound(Team(CPU, CPU, wrapped=lambda module: Wrapper(module, **fault)))
    assert f"on cpu: {named}" in refused.value.message


def test_weights_that_arrive_as_zeros_are_refused_by_name(no_cases):
    def broadcast(module):
        with torch.no_grad():
            for weight in module.parameters():
                weight.zero_()
        return module

    with pytest.raises(HostError, match=SENT):
        check.require_sound(Team(CPU, CPU, wrapped=broadcast))


class ThreeRanks(Collectives):
    """The first of three ranks, of which the maximum may miss some."""

    def __init__(self, heard):
        super().__init__(CPU, 0, 3)
        self._heard = heard

    def all_reduce(self, values, *, maximum=False):
        count = torch.arange(len(values))
        return torch.stack([values - count % 3 + (count + rank) % 3 for rank in self._heard]).amax(0)


def others_too(module):
    """A wrapper of a rank whose share of the gradient is 1, of the three ranks' 9."""
    return Wrapper(module, gradient=lambda g: g.mul(9.0))


def test_a_maximum_that_misses_a_rank_is_refused_by_name(no_cases):
    check.require_sound(Team(CPU, ranks=ThreeRanks([0, 1, 2]), wrapped=others_too))
    with pytest.raises(HostError, match="on cpu: the maximum over 3 ranks gave other bits"):
        check.require_sound(Team(CPU, ranks=ThreeRanks([0, 1]), wrapped=others_too))


def test_the_wrapper_of_dp_passes(no_cases):
    check.require_sound(Team(CPU, CPU, wrapped=lambda module: Replicas(module, device_ids=None)))


RANK = """
import torch
from samebits.numerics.exact.self_test import check
from samebits.params import parse_params
from samebits.strategies.placement import Devices
from samebits.training.placement import place
from samebits.training.worker import make_worker

params = parse_params({"train": {"num_devices": 3, "oversubscribe": True}})
placement, _ = place("ddp", params, "exact", Devices(gpus=0, cores=3))
worker = make_worker(placement, params.train)
worker.setup()
check.CASES = {}
check.require_sound(worker)
print("sound")
worker.close()
"""


def test_the_wrapper_and_ranks_of_ddp_pass(tmp_path):
    def start(rank):
        environ = {"RANK": str(rank), "WORLD_SIZE": "3", INIT_METHOD: f"file://{tmp_path}/store"}
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-c", RANK], env={**os.environ, **environ}, stdout=pipe, stderr=pipe)

    ranks = [start(rank) for rank in range(3)]
    for rank in ranks:
        stdout, stderr = rank.communicate()
        assert stdout == b"sound\n", stderr


# -- in a training -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "tested"), [("cuda", 1), ("cpu", 0)])
def test_a_worker_on_gpus_is_tested(device, tested, monkeypatch):
    called, started = [], []
    monkeypatch.setattr(check, "require_sound", called.append)
    monkeypatch.setattr(integer_products, "start", started.extend)
    team = SimpleNamespace(devices=[torch.device(device, 1)])
    split = {"shards": 8, "samples": 32}
    numerics = ExactNumerics(settings("sgd"), torch.device(device), "mse", (), seed=0, **split)
    numerics.require_sound(team)
    assert called == [team] * tested
    assert started == team.devices  # each of which computes products by itself


def test_a_failure_ends_a_training_before_its_model_is_built(data_dir, monkeypatch):
    params = parse_params(small(next(iter(MODEL_OF_TASK)), numerics=["exact"]))
    card = read_card(data_dir(params) / "card.json")
    _, split = placed("single", params, gpus=0, cores=1, numerics="exact")
    worker = Worker([CPU])
    setup = Setup(params, "exact", card, split=split, worker=worker)
    monkeypatch.setattr(setup.numerics, "_device", torch.device("cuda"))
    monkeypatch.setattr(check, "CASES", {"integers": CASES["integers"]})
    with Planted("cumsum", nudged), pytest.raises(HostError, match="integers gave other bits"):
        setup.enter_process()
    setup.enter_process()
