import hashlib
import math
import os
import subprocess
import sys
from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path
from statistics import NormalDist

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from samebits.errors import UserError
from samebits.host.variables import KERNELS, PRODUCTS, SHARDS
from samebits.numerics.environment import ENVIRONMENT, prepare_environment
from samebits.numerics.fast import FastNumerics
from samebits.numerics.initialization import portable_initialization
from samebits.params import parse_params
from samebits.portable import elementary, floats
from samebits.portable.random import Stream


def test_exp_and_log_against_the_c_library():
    x = np.linspace(-600, 600, 10_001)
    exact = np.array([math.exp(v) for v in x])
    assert np.max(np.abs(elementary.exp(x) - exact) / np.spacing(exact)) <= 2
    y = exact[exact > 0]
    truth = np.array([math.log(v) for v in y])
    assert np.max(np.abs(elementary.log(y) - truth) / np.spacing(np.abs(truth) + 1e-300)) <= 3


def test_cos_pi():
    assert max(abs(elementary.cos_pi(Fraction(i, 997)) - math.cos(math.pi * i / 997)) for i in range(998)) < 1e-15


def test_normal_quantile_against_the_standard_library():
    p = np.concatenate([np.linspace(1e-6, 1 - 1e-6, 2001), [2.0**-53, 1e-12, 1 - 1e-12]])
    truth = np.array([NormalDist().inv_cdf(v) for v in p])
    assert np.allclose(elementary.normal_quantile(p), truth, rtol=1e-14, atol=1e-15)


def test_streams_are_fixed_for_ever():
    assert Stream(0, "golden").raw(2).tolist() == [10177485763270840003, 2137002618392193239]
    assert [x.hex() for x in Stream(0, "golden").normal(2)] == ["0x1.0a4528038009fp-3", "-0x1.322d6ff7f5176p+0"]
    assert Stream(0, "golden").permutation(8).tolist() == [1, 5, 3, 7, 6, 0, 4, 2]


def test_streams_differ_by_seed_and_purpose():
    first = [Stream(*key).raw(1)[0] for key in ((0, "a"), (1, "a"), (0, "b"), (0, "a", 1))]
    assert len(set(first)) == 4


def test_draws_have_the_right_distribution():
    stream = Stream(0, "moments")
    normal, uniform, below = stream.normal(200_000), stream.uniform(200_000), stream.below(7, 200_000)
    assert abs(normal.mean()) < 0.01
    assert abs(normal.std() - 1) < 0.01
    assert abs((normal**4).mean() - 3) < 0.1
    assert 0 <= uniform.min() < uniform.max() < 1
    assert np.all(np.abs(np.bincount(below, minlength=7) / 200_000 - 1 / 7) < 0.005)
    assert sorted(stream.permutation(1000)) == list(range(1000))


def test_initialization_is_portable_and_repeatable():
    def build():
        with portable_initialization(3):
            layers = [nn.Linear(5, 4), nn.Conv2d(2, 3, 3), nn.Embedding(7, 2), nn.LayerNorm(4)]
            extra = nn.init.trunc_normal_(torch.empty(4, 3), std=0.02)
            drawn = [torch.randn(3), torch.rand(2, dtype=torch.float64), torch.randint(5, (4,)), torch.randperm(6)]
        return [*(p for layer in layers for p in layer.parameters()), extra, *drawn]

    torch.manual_seed(1)
    first = build()
    torch.manual_seed(2)
    second = build()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert first[0].abs().max() <= 5**-0.5


def test_normal_draws_by_erfinv_are_portable():
    x = torch.arange(-511, 512, dtype=torch.float64) / 512
    with portable_initialization(0):
        portable = x.clone().erfinv_()
        ends = torch.tensor([-1.0, 1.0]).erfinv_()
    assert torch.allclose(portable, torch.erfinv(x), rtol=1e-13, atol=1e-13)
    assert hashlib.sha256(portable.numpy().tobytes()).hexdigest().startswith("36a25ed640ee")
    assert torch.isfinite(ends).all()
    assert ends[1] == -ends[0] > 5.0


def drawn_by_a_generator(seed, of_params=0):
    with portable_initialization(of_params):
        own = torch.Generator().manual_seed(seed)
        return [*torch.rand(3, generator=own).tolist(), *torch.empty(3).normal_(generator=own).tolist()]


def test_what_a_generator_of_the_factorys_own_draws_follows_from_its_seed():
    drawn = drawn_by_a_generator(7)
    assert drawn == drawn_by_a_generator(7, of_params=1) != drawn_by_a_generator(8)
    assert len({*drawn}) == 6
    with portable_initialization(0):
        assert torch.rand(3, generator=torch.default_generator).tolist() != drawn[:3]
        torch.rand(3, generator=torch.Generator().manual_seed(7))
        after = torch.rand(3)
    with portable_initialization(0):
        torch.rand(3)
        assert torch.equal(torch.rand(3), after)  # PyTorch's own goes on as if there were no other


def drawn_after_manual_seed(seed, of_params=0):
    with portable_initialization(of_params):
        torch.manual_seed(seed)
        return [*torch.rand(3).tolist(), *torch.empty(3).normal_().tolist()]


def test_manual_seed_in_a_factory_restarts_its_draws():
    drawn = drawn_after_manual_seed(7)
    assert drawn == drawn_after_manual_seed(7, of_params=1) != drawn_after_manual_seed(8)
    assert len({*drawn}) == 6
    with portable_initialization(0):
        first = torch.rand(3).tolist()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            assert torch.rand(3).tolist() == drawn[:3]
            state = torch.get_rng_state()
            again = torch.rand(3)
            torch.set_rng_state(state)
            assert torch.equal(torch.rand(3), again)
        after = torch.rand(3)
    with portable_initialization(0):
        assert torch.rand(3).tolist() == first != drawn[:3]
        assert torch.equal(torch.rand(3), after)  # as if nothing had been drawn in between


def test_integers_of_too_wide_a_range_are_refused():
    with portable_initialization(0):
        assert torch.randint(2**31, (1000,)).max() > 2**30
        with pytest.raises(UserError, match=r"torch\.randint: got a range of 2,147,483,649, accepts at most 2\*\*31"):
            torch.randint(-1, 2**31, (3,))


def test_initialization_does_not_touch_the_global_generator():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    with portable_initialization(1):
        nn.Linear(10, 10)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.empty(3).cauchy_(),
        lambda: torch.bernoulli(torch.full((3,), 0.5)),
        lambda: torch.normal(torch.zeros(3), torch.ones(3)),
        lambda: torch.multinomial(torch.ones(3), 1),
    ],
)
def test_initialization_refuses_other_draws(draw):
    with pytest.raises(UserError, match="whose draws differ between hosts"), portable_initialization(0):
        draw()


def take_steps(precision, parameters, losses):
    """Steps with a fused optimizer that starts anew, which like the numerics is returned."""
    train = parse_params({"train": {"precision": precision, "optimizer": {"lr": 0.1, "momentum": 0.9}}}).train
    numerics = FastNumerics(train, torch.device("cpu"), "mse")
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)
    numerics.reset(optimizer)
    for loss in losses:
        optimizer.zero_grad()
        numerics.backward(loss)
        numerics.step(optimizer)
    return numerics, optimizer


def test_a_skipped_first_step_under_fp16_leaves_nothing_behind(monkeypatch):
    """The fused optimizer leaves a new momentum buffer unwritten when it skips a step; here that memory holds 123."""
    p = nn.Parameter(torch.ones(2))
    monkeypatch.setattr(torch, "empty_like", lambda tensor, **options: torch.full_like(tensor, 123.0))
    numerics, optimizer = take_steps("fp16", [p], [(p * factor).sum() for factor in (math.inf, 1.0)])
    assert p.tolist() == pytest.approx([0.9, 0.9])
    assert numerics.state_dict()["scale"] == 2.0**15  # half of the first one
    numerics.reset(optimizer)
    assert numerics.state_dict()["scale"] == 2.0**16


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gradient_may_come_later_than_others(precision):
    """The fused optimizer has one list of momentum buffers for all parameters, in which none may be missing."""
    early, late = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    take_steps(precision, [early, late], [early.sum(), (early + late).sum()])
    assert (early.tolist(), late.tolist()) == (pytest.approx([0.71, 0.71]), pytest.approx([0.9, 0.9]))


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_every_switch_of_tf32_is_set_and_can_be_read(precision):
    """In a process of its own, since the switches are the process's; mixing old and new ones makes reading fail."""
    code = (
        "import torch\n"
        "from samebits.numerics.fast import FastNumerics\n"
        "from samebits.params import parse_params\n"
        f"train = parse_params({{'train': {{'precision': '{precision}'}}}}).train\n"
        "FastNumerics(train, torch.device('cpu'), 'mse').configure()\n"
        "cudnn = torch.backends.cudnn\n"
        "print(cudnn.allow_tf32, torch.backends.cuda.matmul.fp32_precision, cudnn.conv.fp32_precision,\n"
        "      cudnn.rnn.fp32_precision)\n"
        "with cudnn.flags(enabled=True):\n"
        "    pass\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = {"tf32": ["True", "tf32", "tf32", "tf32"], "fp32": ["False", "ieee", "ieee", "ieee"]}
    assert done.stdout.split() == expected[precision]


@pytest.mark.parametrize(
    ("device", "precision", "given", "refused"),
    [
        ("cuda", "tf32", "0", True),
        ("cuda", "tf32", "1", False),
        ("cuda", "tf32", "", False),
        ("cuda", "fp32", "0", False),
        ("cuda", "fp32", "1", True),
        ("cpu", "tf32", "0", False),
    ],
)
def test_a_variable_that_would_overrule_the_precision_is_refused(device, precision, given, refused, monkeypatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", given)
    numerics = FastNumerics(parse_params({"train": {"precision": precision}}).train, torch.device(device), "mse")
    expected = (
        rf"NVIDIA_TF32_OVERRIDE is {given}, and train\.precision is {precision}\. hint: unset NVIDIA_TF32_OVERRIDE"
    )
    try:
        with pytest.raises(UserError, match=expected) if refused else nullcontext():
            numerics.configure()
    finally:
        FastNumerics(parse_params({}).train, torch.device("cpu"), "mse").configure()
        torch.set_deterministic_debug_mode("default")


@pytest.mark.parametrize(
    ("name", "value", "accepts"),
    [
        ("CUBLAS_EMULATE_DOUBLE_PRECISION", None, None),
        ("CUBLAS_EMULATE_DOUBLE_PRECISION", "1", "0"),
        ("CUBLAS_EMULATE_SINGLE_PRECISION", "", None),
        ("CUBLAS_EMULATE_SINGLE_PRECISION", "1", "0"),
        ("CUBLAS_WORKSPACE_CONFIG", None, None),
        ("CUBLAS_WORKSPACE_CONFIG", "", None),
        ("CUBLAS_WORKSPACE_CONFIG", ":16:8", None),
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0", ":4096:8 or :16:8"),
        ("PYTORCH_NVML_BASED_CUDA_CHECK", "1", None),
        ("PYTORCH_NVML_BASED_CUDA_CHECK", "0", "1"),
        ("CUDA_DEVICE_ORDER", "FASTEST_FIRST", "PCI_BUS_ID"),
        ("TORCH_DISABLE_NATIVE_JIT", "0", None),
    ],
)
def test_variables_that_determinism_and_the_fork_rest_on(name, value, accepts, monkeypatch):
    for each in ENVIRONMENT:
        monkeypatch.setenv(each, "")
    monkeypatch.delenv(name)
    if value is not None:
        monkeypatch.setenv(name, value)
    if accepts:
        with pytest.raises(UserError, match=f"{name}: got '{value}', accepts {accepts}. hint: unset {name}"):
            prepare_environment()
    else:
        prepare_environment()
        usual = {each: accepted[0] for each, accepted in ENVIRONMENT.items()}
        assert {each: os.environ[each] for each in ENVIRONMENT} == {**usual, name: value or usual[name]}


def test_a_variable_that_decides_for_exact_is_read_before_a_training(monkeypatch):
    for name in (KERNELS, PRODUCTS, SHARDS):
        with monkeypatch.context() as patched:
            patched.setenv(name, "int16")
            with pytest.raises(UserError, match=rf"^{name}: got 'int16', accepts \w+ or \w+. hint: unset {name}$"):
                prepare_environment()


@pytest.mark.attack("another user of the host")
def test_compiled_code_is_kept_where_nobody_else_can_write(tmp_path, monkeypatch):
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")

    def chosen():
        for name in names:
            monkeypatch.setenv(name, "")
        prepare_environment()
        return [Path(os.environ[name]) for name in names]

    caches, root = tmp_path / "caches", tmp_path / "root"
    root.mkdir()
    monkeypatch.chdir(root)
    monkeypatch.setenv("XDG_CACHE_HOME", str(caches))
    for one in chosen():
        assert one.parent == caches / "samebits"
    assert (caches / "samebits").stat().st_mode & 0o777 == 0o700
    (caches / "samebits").chmod(0o775)  # a group's
    for one in chosen():
        assert one.parent == root / ".samebits/cache"
    (root / ".samebits/cache").rmdir()
    (root / ".samebits/cache").symlink_to(tmp_path)
    first, second = chosen(), chosen()
    assert first[0].parent != second[0].parent
    for one in (first[0], second[0]):
        assert one.parent.stat().st_mode & 0o777 == 0o700
        one.parent.rmdir()
    monkeypatch.setenv(names[0], "mine")
    prepare_environment()
    assert os.environ[names[0]] == "mine"


@given(st.floats(0.3, 2.0), st.floats(-300.0, 300.0))
def test_a_power_is_rounded_once(x, y):
    with mpmath.workprec(200):
        assert floats.power(x, y) == float(mpmath.power(mpmath.mpf(x), mpmath.mpf(y)))


def test_what_is_computed_from_a_portable_float_is_one():
    """As an optimizer computes ``0.96 ** (step * momentum_decay)``."""
    x = floats.PortableFloat(0.9)
    for value in (1 - x, 2.0 * x, x / 3, 1 / x, -x, abs(x), x**3.0, 0.96 ** (7.0 * x), x + 1, 1.0 - x**2):
        assert type(value) is floats.PortableFloat
    assert (x < 1, x == 0.9, int(x), floats.portable([0.9, 2, "a", None])) == (True, True, 0, (x, 2, "a", None))
    assert [floats.power(*pair) for pair in ((4.0, 0.5), (-2.0, 3.0), (0.0, 0.0), (2.0, -1080.0))] == [
        2.0,
        -8.0,
        1.0,
        0.0,
    ]
    with pytest.raises(OverflowError):
        floats.power(10.0, 1000.0)


@given(st.floats(0.0, 100.0))
def test_a_cosine_is_near_the_true_one(x):
    assert abs(floats.cos(x) - math.cos(x)) < 1e-14
