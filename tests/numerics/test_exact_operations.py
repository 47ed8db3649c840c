"""Operations under the exact engine, by cases; PyTorch's whole database of them is tried in ``system``."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from samebits.errors import UserError
from samebits.numerics.exact.engine import Engine
from samebits.numerics.exact.forward_draws import Draws
from samebits.numerics.exact.operations.contractions import grouped_mm
from samebits.numerics.exact.operations.registry import NotExactError
from samebits.numerics.initialization import portable_initialization
from samebits.portable.random import Stream

COUNT = torch.arange(1, 4)
MANY = torch.arange(1, 1001) * 33333
WAVE = torch.complex(torch.ones(3), torch.ones(3))


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (lambda: 1.5 - COUNT, [0.5, -0.5, -1.5]),
        (lambda: 1 - COUNT, [0, -1, -2]),
        (lambda: COUNT / 2, [0.5, 1.0, 1.5]),
        (lambda: COUNT.pow(0.5)[2:], [1.7320508]),
        (lambda: torch.pow(4.0, COUNT), [4.0, 16.0, 64.0]),
        (lambda: COUNT.pow(2), [1, 4, 9]),
        (lambda: (COUNT * COUNT).sqrt(), [1.0, 2.0, 3.0]),
        (lambda: torch.full((3,), 2**24 + 1).sum(dtype=torch.float32), 3.0 * 2**24 + 4),
        (lambda: MANY.nansum(dtype=torch.float32) - MANY.sum(dtype=torch.float32), 0.0),
        (lambda: COUNT.cumsum(0, dtype=torch.float32), [1.0, 3.0, 6.0]),
        (lambda: torch.arange(0.0, 0.3, 0.1), [0.0, 0.1, 0.2]),
        (lambda: torch.arange(-100.0, 100.0, 0.1), [0.1 * i - 100.0 for i in range(2000)]),
        (lambda: torch.arange(3), [0, 1, 2]),
        (lambda: torch.addmv(COUNT, COUNT.diag(), COUNT, beta=2), [3, 8, 15]),
        (lambda: F.hardtanh(COUNT, 0, 2), [1, 2, 2]),
        (lambda: COUNT.remainder(2), [1, 0, 1]),
    ],
)
def test_operations_on_integers_are_exact(compute, expected):
    with Engine():
        found = compute()
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-7, atol=0)


INF, NAN = math.inf, math.nan


def gradient(function, x):
    x = x.clone().requires_grad_()
    function(x).sum().backward()
    return x.grad


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (lambda: torch.tensor([1.0, INF, 2.0]).cumsum(0), [1.0, INF, INF]),
        (lambda: torch.tensor([INF, -INF]).cumsum(0), [INF, NAN]),
        (lambda: torch.tensor([1.0, 2.0, -INF]).index_add(0, COUNT[:1], torch.ones(1)), [1.0, 3.0, -INF]),
        (lambda: torch.tensor([1e-3, 5e4]).index_add(0, COUNT[:1], torch.zeros(1)), [1e-3, 5e4]),
        (lambda: torch.zeros(2).index_add(0, torch.tensor([0, 0]), torch.tensor([INF, -INF])), [NAN, 0.0]),
        (lambda: 1.0 - torch.tensor([0, 5], dtype=torch.uint8), [1.0, -4.0]),
        (lambda: torch.tensor([2.0, 0.5]).pow(INF), [INF, 0.0]),
        (lambda: torch.tensor([-0.0]).pow(torch.tensor([-1.0])), [-INF]),
        (lambda: torch.tensor([-INF, -2.0]).pow(0.3), [INF, NAN]),
        (lambda: torch.tensor([1e20, -1e20]).std(), 1.4142136e20),
        (lambda: torch.tensor([1e-24, -1e-24]).std(), 1.4142136e-24),
        (lambda: torch.tensor([3.99999976]).sqrt(), [1.99999988]),
        (lambda: torch.lerp(torch.tensor([1e8]), torch.tensor([1.0]), 1.0), [1.0]),
        (lambda: torch.tensor([0.6, 0.6]).sum(dtype=torch.int64), 0),
        (lambda: torch.tensor([-0.0, -1.0]).clamp_min(0.0), [0.0, 0.0]),
        (lambda: torch.tensor([-0.0, 1.0]).clamp_max(0.0), [0.0, 0.0]),
        (lambda: torch.stack(torch.aminmax(torch.tensor([-0.0, -0.0]))), [0.0, 0.0]),
        (lambda: torch.rsub(torch.tensor([3.0, INF]), 1.0, alpha=0.1), [0.7, -INF]),
        (lambda: torch.tensor([NAN, 3e9, -1e20, 2.7]).to(torch.int32), [0, 2147483647, -2147483648, 2]),
        (lambda: torch.native_dropout(torch.ones(2), 0.5, False)[0], [1.0, 1.0]),
        (lambda: torch.zeros(2, 3).cumsum(1), [[0.0] * 3] * 2),
        (lambda: torch.cat([*map(torch.flatten, torch.linalg.qr(torch.tensor([[3.0], [4.0]]), mode="r"))]), [-5.0]),
        (lambda: gradient(lambda x: F.max_pool2d(x, 3, 2, 1), torch.full((1, 1, 2, 2), -INF)),
         [[[[1.0, 0.0], [0.0, 0.0]]]]),
        (lambda: gradient(lambda x: F.embedding(torch.tensor([0, 1, 1]), x, padding_idx=0), torch.ones(2, 1)),
         [[0.0], [2.0]]),
    ],
)  # fmt: skip
def test_special_cases(compute, expected):
    with Engine(Draws(0, 0, [0])):
        found = compute()
    wanted = torch.tensor(expected, dtype=found.dtype)
    torch.testing.assert_close(found, wanted, rtol=1.5e-7, atol=0, equal_nan=True)
    assert torch.equal(found.signbit(), wanted.signbit()) or found.isnan().any()


def bag(mode, **options):
    """Bags of rows; the second is empty, and one row counts for none."""
    places = {"input": torch.tensor([0, 2, 2, 1, 3]), "offsets": torch.tensor([0, 2, 2]), "padding_idx": 1}
    return lambda x: F.embedding_bag(**places, weight=x, mode=mode, **options)


@pytest.mark.parametrize(
    "function",
    [
        bag("sum"), bag("mean"), bag("max"), bag("sum", per_sample_weights=torch.tensor([0.5, 2.0, -1.0, 3.0, 0.1])),
        lambda x: torch.cdist(x, x.flip(0) + 1.0, p=3.0), lambda x: torch.cdist(x, x.flip(0) + 1.0, p=math.inf),
        lambda x: torch.cdist(x, x.flip(0), p=0.0), lambda x: torch.pdist(x, p=3.0),
        lambda x: torch.ops.aten.max(x, x.flip(0)), lambda x: x.sum().topk(1).values, lambda x: x.max(1).values,
        lambda x: torch.cat([x.median(0).values, x.median().view(1), x[:0].median().view(1)]),
        lambda x: F.pad(x.view(1, 4, 3), (2, 1), "reflect"), lambda x: F.pad(x.view(1, 4, 3), (-1, 2), "reflect"),
        lambda x: F.pad(x.view(1, 1, 4, 3), (1, 2, 3, 0), "reflect"),
        lambda x: F.pad(x.view(1, 4, 3), (2, 1), "replicate"), lambda x: F.pad(x.view(1, 4, 3), (-1, 2), "replicate"),
        lambda x: F.pad(x[:, :1].view(1, 4, 1), (2, 1), "replicate"),
        lambda x: x[[0, 2, 2]], lambda x: x[:, [0, -1, 0]], lambda x: x[[0, 2], [1, 1]], lambda x: x[x > 0.0],
        lambda x: x.view(2, 2, 3)[[1, 1], :, [0, 2]],
        lambda x: x.cumsum(0) * x.cumsum(1), lambda x: x.cumsum(1).cumsum(0),
    ],
)  # fmt: skip
def test_a_function_and_its_gradient_are_pytorchs_but_for_rounding(function):
    def run():
        x = (torch.arange(12.0).view(4, 3) * 0.7).sin().requires_grad_()
        y = function(x)
        return y, torch.autograd.grad(y, x, y.detach().nan_to_num().cos())[0]

    with Engine():
        found = run()
    for one, other in zip(found, run(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_products_of_groups():
    a, b, ends = numbers(2, 6), numbers(6, 7), torch.tensor([2, 2, 5])
    many = torch.stack([numbers(7, 2), numbers(7, 2) + 1.0, numbers(7, 2) + 2.0])
    torch.testing.assert_close(grouped_mm(a, b), torch.mm(a, b))
    in_the_middle, rows, columns = (grouped_mm(*pair, ends) for pair in ((a, b), (b, many), (many, a)))
    for group, part in enumerate([slice(0, 2), slice(2, 2), slice(2, 5)]):
        torch.testing.assert_close(in_the_middle[group], a[:, part] @ b[part])
        torch.testing.assert_close(rows[part], b[part] @ many[group])
        torch.testing.assert_close(columns[:, part], many[group] @ a[:, part])
    assert rows[5].tolist() == [0.0] * 2  # behind the last group
    for settings in ({"bias": a}, {"out_dtype": torch.float64}):
        with pytest.raises(NotExactError, match="with a bias or another type"):
            grouped_mm(a, b, ends, **settings)


@pytest.mark.parametrize("settings", [(1, 0, 0, 1, 1), (2, 1, 1, 1, 1), (3, 0, 1, 2, 2), ((2, 1), (1, 0), 0, 1, 3)])
def test_transposed_convolutions(settings):
    stride, padding, output_padding, groups, dilation = settings
    x, weight = torch.randn(2, 4, 5, 6, requires_grad=True), torch.randn(4, 3, 3, 2, requires_grad=True)
    options = {"stride": stride, "padding": padding, "output_padding": output_padding, "groups": groups}

    def run():
        y = F.conv_transpose2d(x, weight, None, **options, dilation=dilation)
        return [y, *torch.autograd.grad(y, [x, weight], y.detach().cos())]

    with Engine():
        found = run()
    for a, b in zip(found, run(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("compute", "name"),
    [
        (lambda: COUNT.clone().mul_(0.5), "mul"),
        (lambda: torch.add(torch.ones(1), torch.ones(1), out=torch.zeros(3)), "add"),
        (lambda: torch.special.erfc(torch.ones(3)), "erfc"),
        (lambda: torch.empty(2).bernoulli_(torch.ones(2)), "bernoulli"),
        (lambda: torch.special.i0(COUNT), "i0"),
        (lambda: COUNT.mode(0), "mode"),
        (lambda: torch.dot(WAVE, WAVE), "dot"),
        (lambda: WAVE.to(torch.complex128).abs(), "abs: torch.complex128 has no exact version"),
        (lambda: WAVE.mean(), "mean"),
        (lambda: torch.fft.fft(torch.ones(9000)), "a Fourier transform of 9,000 numbers"),
        (lambda: torch.ones(3).scatter_reduce(0, COUNT - 1, torch.ones(3), "prod"), "a product of elements that meet"),
        (lambda: WAVE.to(torch.complex64).index_add(0, COUNT - 1, WAVE), "index_add"),
        (lambda: torch.ones(3, dtype=torch.bfloat16).sum(), "sum"),
        # As of a convolution's weight over a shard of large images: too few bits would be left of each factor.
        (lambda: torch.ones(1, 2**21 + 1) @ torch.ones(2**21 + 1, 1),
         "sums of 2,097,153 products would keep fewer than 16 bits"),
        # As PyTorch's ``renorm_backward`` has it; on an H100 it gave other bits.
        (lambda: numbers(3, 4).renorm(2, 0, 1.0), "renorm: its gradient is computed in float64 on a CPU"),
        (lambda: gradient(lambda x: F.embedding(COUNT - 1, x, scale_grad_by_freq=True), torch.ones(3, 1)),
         "an embedding with scale_grad_by_freq"),
        (lambda: torch.ones(3).scatter(0, COUNT - 1, torch.ones(3), reduce="add"), "scatter with reduce"),
    ],
)  # fmt: skip
def test_what_has_no_exact_version_is_refused(compute, name):
    with Engine(), pytest.raises(UserError, match=f"exact: .*{name}"):
        compute()


@pytest.mark.parametrize(
    ("compute", "why"),
    [
        (lambda: torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", "0"),
         "all_reduce: in forward its result depends on what other ranks have"),
        (lambda: torch.ops.higher_order.cond(torch.tensor(True), torch.sin, torch.cos, (torch.ones(2),)),
         "cond: control flow as an operation is not looked into"),
    ],
)  # fmt: skip
def test_what_a_forward_pass_may_not_do_is_refused(compute, why):
    with Engine(Draws(0, 0, [0])), pytest.raises(UserError, match=f"exact: .*{why}"):
        compute()


def test_a_fused_dropout_scales_what_it_keeps_and_its_gradient():
    x = torch.full((4000,), 3.0, requires_grad=True)
    with Engine(Draws(0, 0, [0])):
        y, _ = torch.native_dropout(x, 0.25, True)
    with Engine():
        (grad,) = torch.autograd.grad(y.sum(), x)
    assert {*y.tolist()} == {0.0, 4.0}
    assert y.mean().item() == pytest.approx(3.0, abs=0.1)
    torch.testing.assert_close(grad, y.detach() / 3)


PLACES = torch.tensor([1, 0, 1])


@pytest.mark.parametrize(
    ("put", "name"),
    [
        (lambda values: torch.zeros(3).index_put_((PLACES,), values), "index_put_"),
        (lambda values: torch.zeros(3).index_put((PLACES,), values), "index_put"),
        (lambda values: torch.zeros(3).scatter(0, PLACES, values), "scatter"),
        (lambda values: torch.zeros(3).scatter_(0, PLACES, values), "scatter_"),
    ],
)
def test_different_values_in_one_place_are_refused(put, name):
    with Engine():
        assert put(torch.tensor([1.0, 2.0, 1.0])).tolist() == [2.0, 1.0, 0.0]
        assert put(torch.tensor([math.nan, 2.0, math.nan])).isnan().tolist() == [False, True, False]
    for values in ([1.0, 2.0, 3.0], [0.0, 2.0, -0.0], [math.nan, 2.0, 0.0]):
        with Engine(), pytest.raises(UserError, match=f"exact: .*{name}.*: values are put into one place twice"):
            put(torch.tensor(values))


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(4),
        lambda: torch.randn(4),
        lambda: torch.normal(0.0, 1.0, (4,)),
        lambda: torch.rand_like(torch.ones(4)),
        lambda: torch.empty(4).uniform_(2, 3),
        lambda: torch.randperm(40),
        lambda: torch.randint(1000, (4,)),
    ],
)
def test_draws_depend_on_seed_and_step_alone(draw):
    def drawn(seed, step):
        with Engine(Draws(seed, step, [0])):
            return draw()

    assert torch.equal(drawn(0, 1), drawn(0, 1))
    assert not torch.equal(drawn(0, 1), drawn(0, 2))
    assert not torch.equal(drawn(0, 1), drawn(1, 1))
    with Engine(), pytest.raises(UserError, match="drawn in the forward pass alone"):
        draw()


def numbers(*shape):
    return torch.from_numpy(Stream(5, "numbers", *shape).normal(math.prod(shape))).float().view(shape)


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_does_not_depend_on_the_layout_of_its_input(bias):
    """PyTorch takes one operation for a contiguous input, and two for others, of which a device may have either."""
    found = []
    for lay_out in (lambda x: x, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)):
        tensors = [lay_out(numbers(4, 50, 8)), numbers(6, 8), *([numbers(6)] if bias else [])]
        for tensor in tensors:
            tensor.requires_grad_()
        with Engine():
            y = F.linear(*tensors)
        with Engine():
            found.append([y, *torch.autograd.grad((y * y).sum(), tensors)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_copy_into_memory_that_it_reads_has_what_was_there_before():
    x = torch.arange(0.0, 4000.0).view(4, 1000)[:, ::2]
    expected = torch.cat([x[:, :1], x[:, :-1]], 1)
    with Engine():
        x[:, 1:] = x[:, :-1]
    assert torch.equal(x, expected)


@pytest.mark.parametrize("write", [lambda x: x.add_(1.0), lambda x: x.copy_(numbers(3, 2)), lambda x: x.relu_()])
def test_elements_that_share_memory_are_not_written_to(write):
    with Engine(), pytest.raises(UserError, match="elements of what it writes to share memory, and which stays is not"):
        write(numbers(4).unfold(0, 2, 1))
    with Engine():
        write(numbers(2, 3).T)
        write(numbers(6, 4)[::2, 1:3])


@pytest.mark.parametrize("axes", [2, 3])
def test_a_kernel_of_one_number_is_for_all_axes(axes):
    x = numbers(2, *[4] * (axes + 1)).requires_grad_()
    pool = getattr(torch.ops.aten, f"avg_pool{axes}d")
    with Engine():
        y = pool(x, [2])
        (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y, pool(x, [2] * axes))
    torch.testing.assert_close(grad, torch.full_like(x, 0.5**axes))


@pytest.mark.parametrize(("low", "high", "least"), [(0.0, 1.0, 1 - 2**-24), (2.0, 3.0, 3 - 2**-22)])
def test_uniform_numbers_are_below_their_upper_bound(low, high, least, monkeypatch):
    monkeypatch.setattr(Stream, "uniform", lambda self, n: np.full(n, 1 - 2**-53))
    with portable_initialization(0):
        drawn = torch.empty(3).uniform_(low, high)
    assert drawn.tolist() == [least] * 3


class Waits(TorchDispatchMode):
    """Notes of every copy whether somebody waits for it."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_):
            self.found.append(not (kwargs or {}).get("non_blocking", False) and True not in args[2:])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "copy", [lambda x: x.to(torch.float64, non_blocking=True), lambda x: torch.empty(3).copy_(x, non_blocking=True)]
)
def test_who_reads_a_copy_has_waited_for_it(copy):
    x = torch.ones(3)
    with Waits() as plain:
        copy(x)
    assert False in plain.found
    with Waits() as below, Engine(Draws(0, 0, [0])):
        copy(x)
    assert {*below.found} == {True}


def test_a_library_that_a_factory_imports_may_ask_its_own_for_numbers():
    """As torchaudio asks for its version of CUDA; a forward pass may not."""
    library = torch.library.Library("samebits_tested", "DEF")
    library.define("version() -> int")
    library.impl("version", lambda: 13, "CompositeExplicitAutograd")
    with Engine(builds=True):
        assert torch.ops.samebits_tested.version() == 13
    with Engine(Draws(0, 0, [0])), pytest.raises(UserError, match="samebits_tested::version: it has no exact version"):
        torch.ops.samebits_tested.version()
