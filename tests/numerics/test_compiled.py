"""Compiled kernels give the bits of Python's functions, whoever compiles them, and are refused where they do not."""

from __future__ import annotations

import itertools
import math
import os
import re
import subprocess
import sys
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from samebits.errors import HostError
from samebits.host.variables import KERNELS
from samebits.numerics.exact import cells, convolution_kernels, grid, losses, products, sums
from samebits.numerics.exact.compiled import build, check
from samebits.numerics.exact.compiled.library import OF_NUMBERS, Library, using
from samebits.numerics.exact.convolution import Layout, convolved, gradient_of_images, gradient_of_kernels
from samebits.numerics.exact.grid import snap, snap_, snap_rows, snapped, snapped_sum
from samebits.numerics.exact.operations import normalization as rows
from samebits.numerics.exact.operations.indexing import embedding_dense_backward, index_add, scatter_add
from samebits.numerics.exact.operations.pointwise import relu
from samebits.numerics.exact.operations.pooling import max_pool, max_pool_backward
from samebits.numerics.exact.operations.reductions import cumsum
from samebits.numerics.exact.operations.registry import elementwise
from samebits.numerics.exact.optimizers import SGD, AdamW
from samebits.numerics.exact.products import product_of_lines, products_of_shards, rounded_matmul, sum_of_products
from samebits.numerics.exact.root_mean_square import normed
from samebits.numerics.exact.self_test.numbers import doubles, floats, usual_floats
from samebits.numerics.exact.spare import SpareMemory
from samebits.numerics.exact.sums import fixed_order_sum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

CPU = torch.device("cpu")
SPECIAL = torch.tensor(
    [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 3.4e38, -3.4e38, 0.35, -0.35, 20, 150, -150]
)
FARTHEST = 2.0**19  # the largest angle that the kernels of sin and cos take


@pytest.fixture(scope="module")
def kernels() -> Library:
    return Library(build.library())


def bits(x: Tensor) -> Tensor:
    """The bits of all numbers; NaN counts as one number."""
    known = torch.where(x.isnan(), math.nan, x).contiguous()
    return known.view(torch.int32 if x.dtype == torch.float32 else torch.int64)


def assert_same(kernels: Library, run: Callable[[], Iterable[Tensor]]) -> None:
    with using(None):
        plain = list(run())
    with using(kernels):
        fast = list(run())
    assert len(plain) == len(fast)
    for one, other in zip(plain, fast, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert torch.equal(bits(one), bits(other))


def usual(*shape: int, salt: int) -> Tensor:
    return usual_floats(math.prod(shape), salt, CPU).view(shape)


def numbers_for(name: str, x: Tensor) -> Tensor:
    return torch.where(x.abs() > FARTHEST, 1.0, x) if name in ("sin", "cos") else x


@pytest.mark.parametrize("function", OF_NUMBERS, ids=lambda function: function.__name__)
def test_functions_have_the_bits_of_pythons_own(kernels: Library, function: Callable[[Tensor], Tensor]) -> None:
    name = function.__name__
    x = numbers_for(name, torch.cat([SPECIAL, floats(200_000, 1, CPU), usual_floats(20_000, 2, CPU) * 2.0**-3]))
    assert_same(kernels, lambda: (elementwise(function, x),))
    wide = x.to(torch.float64) if name == "root_of_float" else numbers_for(name, doubles(50_000, 3, CPU))
    assert_same(kernels, lambda: (function(wide),))
    assert_same(kernels, lambda: (function(wide[:90].view(9, 10).T), function(wide[:1].expand(3)), function(wide[:0])))


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_large_angles_are_left_to_python(kernels: Library, name: str) -> None:
    function = next(one for one in OF_NUMBERS if one.__name__ == name)
    assert_same(kernels, lambda: (elementwise(function, torch.tensor([1.0, 1e30, -3e7, math.inf, math.nan])),))


SHAPES = [(7, 33), (64, 128), (3, 1), (5, 1000), (2, 4, 17), (1, 1), (300, 5)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_have_the_bits_of_pythons_own(kernels: Library, shape: tuple[int, ...]) -> None:
    x, grad, width = usual(*shape, salt=4), usual(*shape, salt=5), shape[-1]
    weight, bias = usual(width, salt=6), usual(width, salt=7)
    assert_same(kernels, lambda: (rows.softmax(x, -1, False), rows.log_softmax(x, x.dim() - 1, False)))
    assert_same(kernels, lambda: (rows.softmax(x.mT.contiguous().mT, -1, False), rows.softmax(x, 0, False)))
    y, logs = rows.softmax(x, -1, False), rows.log_softmax(x, -1, False)
    assert_same(kernels, lambda: (rows.softmax_backward(grad, y, -1, torch.float32),))
    assert_same(kernels, lambda: (rows.log_softmax_backward(grad, logs, -1, torch.float32),))
    for given in ((weight, bias), (weight, None), (None, None)):
        assert_same(kernels, lambda given=given: rows.layer_norm(x, [width], *given, 1e-5))  # type: ignore[misc]
    _, mean, scale = rows.layer_norm(x, [width], weight, bias, 1e-5)
    for one in (weight, None):
        back = partial(rows.layer_norm_backward, grad, x, [width], mean, scale, one, bias)
        assert_same(kernels, lambda back=back: [g for g in back([True] * 3) if g is not None])  # type: ignore[misc]
        assert back([False, True, True])[0] is None
    assert_same(kernels, lambda: (normed(x, 1e-6), normed(x, 0.0, grad), normed(0 * x, 1e-6, grad)))
    lain, across = (t.mT.contiguous().mT for t in (x, grad))  # whose rows do not lie side by side
    given = (lain, [width], mean, scale, weight, bias, [True, False, False])
    assert_same(kernels, lambda: (normed(lain, 1e-6, across), rows.layer_norm_backward(across, *given)[0]))  # type: ignore[arg-type]
    flat = x.reshape(-1, width)
    targets = torch.arange(flat.shape[0]) % width
    assert_same(kernels, lambda: losses.cross_entropies(flat, targets))


@pytest.mark.parametrize(
    ("shape", "groups"), [((3, 8, 5, 7), 4), ((2, 6, 11), 1), ((2, 6, 1), 6), ((1, 4), 2)], ids=str
)
def test_group_norm_has_the_bits_of_pythons_own(kernels: Library, shape: tuple[int, ...], groups: int) -> None:
    x, grad, channels = usual(*shape, salt=21), usual(*shape, salt=22), shape[1]
    sizes = shape[0], channels, math.prod(shape[2:]), groups
    weight, bias = usual(channels, salt=23), usual(channels, salt=24)
    for given in ((weight, bias), (weight, None), (None, None)):
        assert_same(kernels, lambda given=given: rows.group_norm(x, *given, *sizes, 1e-5))  # type: ignore[misc]
    _, mean, scale = rows.group_norm(x, weight, bias, *sizes, 1e-5)
    for one in (weight, None):
        back = partial(rows.group_norm_backward, grad, x, mean, scale, one, *sizes)
        assert_same(kernels, lambda back=back: [g for g in back([True] * 3) if g is not None])  # type: ignore[misc]


def test_relu_has_one_zero_and_keeps_nan(kernels: Library) -> None:
    assert_same(kernels, lambda: (relu(SPECIAL), relu(floats(5000, 25, CPU))))


@pytest.mark.parametrize("special", [0.0, math.inf, math.nan])
@pytest.mark.parametrize(("kernel", "size"), [((3,), (9,)), ((3, 2), (8, 7)), ((2, 3, 2), (4, 5, 6))], ids=str)
def test_the_largest_of_windows(
    kernels: Library, kernel: tuple[int, ...], size: tuple[int, ...], special: float
) -> None:
    """Among equal ones, with windows over the edge, and of gradients that are far apart in size or not finite."""
    axes = len(kernel)
    for stride, padding, dilation, ceil in itertools.product((1, 2, 4), (0, 1), (1, 2), (False, True)):
        settings: Any = ([*kernel], [stride], [padding], [dilation], ceil)
        for shape in ((2, 3, *size), (3, *size)):
            x = usual(*shape, salt=26).mul(3).round()
            x.view(-1)[:7] = special
            y, places = max_pool(axes, x, *settings)
            grad = floats(y.numel(), 27, CPU).view(y.shape)
            grad = torch.where(grad.isfinite() | (special != 0), grad, 1.0)

            run = partial(_largest_and_gradient, axes, x, grad, places, settings)
            assert_same(kernels, run)


def _largest_and_gradient(
    axes: int, x: Tensor, grad: Tensor, places: Tensor, settings: Sequence[Any]
) -> tuple[Tensor, ...]:
    value, where = max_pool(axes, x, *settings)
    return value, where.to(torch.float64), max_pool_backward(axes, grad, x, *settings, places)


@pytest.mark.parametrize("function", [rows.softmax, rows.log_softmax], ids=["softmax", "log_softmax"])
def test_rows_of_special_numbers(kernels: Library, function: Callable[..., Tensor]) -> None:
    assert_same(kernels, lambda: (function(SPECIAL.view(4, 4), -1, False), function(-SPECIAL.view(2, 8), -1, False)))
    masked = torch.full((2, 3), -math.inf)
    assert_same(kernels, lambda: (function(masked, -1, False),))


def test_a_target_that_is_no_class_is_an_error_as_before(kernels: Library) -> None:
    for wrong in (3, -1):
        with using(kernels), pytest.raises(IndexError, match=rf"^Target {wrong} is out of bounds"):
            losses.cross_entropies(usual(2, 3, salt=8), torch.tensor([0, wrong]))


@pytest.mark.parametrize("shape", [*SHAPES, (0, 3), (3, 0)], ids=str)
def test_grids_and_sums_have_the_bits_of_pythons_own(kernels: Library, shape: tuple[int, ...]) -> None:
    x = usual(*shape, salt=9)
    axes = [(dim,) for dim in range(x.dim())] + [(0, -1), tuple(range(x.dim()))]
    wide = x.to(torch.float64).mul(1.1)
    assert_same(kernels, lambda: [snap_rows(x, number) for number in (16, 20, 26)])
    assert_same(kernels, lambda: (snap_rows(x.mT, 20), snap_rows(x[..., ::2], 20), *snapped(x, 3 * 2.0**30)))
    assert_same(kernels, lambda: [snap(x, dim, 20) for dim in range(x.dim())])
    assert_same(kernels, lambda: snapped_sum(x, 3 * 2.0**30))
    shards = x.reshape(math.prod(shape[:-2]), *shape[-2:])
    assert_same(
        kernels, lambda: (products_of_shards(shards, -shards, 20), products_of_shards(shards, shards.abs(), 16))
    )
    assert_same(kernels, lambda: (rounded_matmul(wide, wide.mT), rounded_matmul(wide, -wide.mT)))
    for numbers in (wide, wide.mT, x, x.mT):
        assert_same(kernels, lambda numbers=numbers: [fixed_order_sum(numbers, dims) for dims in axes])  # type: ignore[misc]


def test_a_recurrent_step_of_rows_that_do_not_lie_side_by_side(kernels: Library) -> None:
    before, across = [usual(3, 4, salt=1), usual(3, 4, salt=2)], usual(4, 3, salt=3).to(torch.float64).T
    x, gaps = usual(3, 16, salt=4), usual(32, salt=5)[::2]

    def run() -> list[Tensor]:
        out, slopes = [torch.empty(3, width) for width in (4, 4, 16, 4)], torch.empty(3, 16)
        cells.LSTM.step(x, x.to(torch.float64), gaps, before, out)
        earlier = cells.LSTM.slopes([across, across], before, out[2:], [slopes])
        return [*out, slopes, *(one for one in earlier if one is not None)]

    assert_same(kernels, run)


@pytest.mark.parametrize("special", [0.0, -0.0, 1e-45, 3e38, math.inf, math.nan])
@pytest.mark.parametrize("terms", [1, 7, 90])
@pytest.mark.parametrize("shape", [(1,), (9,), (4, 5), (3, 1, 70), (2, 6, 1, 3)], ids=str)
def test_sums_into_places(kernels: Library, shape: tuple[int, ...], terms: int, special: float) -> None:
    for dim in range(len(shape)):
        of_terms = (*shape[:dim], terms, *shape[dim + 1 :])
        x, source = (usual_floats(torch.Size(s).numel(), 3, CPU).view(s).clone() for s in (shape, of_terms))
        source.view(-1)[:: max(source.numel() // 5, 1)] = special
        x.view(-1)[::4] *= 2.0**-140
        places = torch.arange(terms).mul(5).add(2).remainder(shape[dim])
        each = torch.arange(source.numel()).mul(7).view(of_terms).remainder(shape[dim])

        def found(dim: int = dim, x: Tensor = x, source: Tensor = source, both: Any = (places, each)) -> list[Tensor]:
            return [index_add(x, dim, both[0], source), scatter_add(x, dim, both[1], source)]

        assert_same(kernels, found)


@pytest.mark.parametrize("special", [0.0, -0.0, 1e-45, 3e38, math.inf, math.nan])
@pytest.mark.parametrize("shape", [(1,), (90,), (0, 3), (4, 5), (3, 1, 70), (2, 600, 1, 3)], ids=str)
def test_running_sums(kernels: Library, shape: tuple[int, ...], special: float) -> None:
    x = usual_floats(torch.Size(shape).numel(), 3, CPU).view(shape).clone()
    x.view(-1)[::4] *= 2.0**-140
    x.view(-1)[:: max(x.numel() // 3, 1)] = special
    assert_same(kernels, lambda: [cumsum(x, dim) for dim in range(-1, x.dim())])


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("function", [index_add, scatter_add])
@pytest.mark.parametrize(
    "places",
    [
        [0, -1, 1], [0, 1, 3], [0, 1], [0, 1, 2, 0], [[0, 1, 2]], [[0, 1], [2, 2]], [0.0, 1.0, 2.0],
        [[0], [3], [1]], [[0.0], [1.0], [2.0]], [[0], [1], [2], [0]],
    ],
    ids=str,
)  # fmt: skip
def test_wrong_places_are_an_error_as_before(kernels: Library, function: Any, places: list[Any], width: int) -> None:
    """Most of index_add's are no error of scatter_add's, and the other way round; then both have the same bits."""
    said = []
    for library in (None, kernels):
        with using(library):
            try:
                said.append(function(torch.ones(3, 1), 0, torch.tensor(places), torch.ones(3, width)).tolist())
            except (IndexError, RuntimeError) as error:
                said.append(str(error))
    assert said[0] == said[1]


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("rows", [3, 100])
def test_embeddings_by_indices_of_either_type(kernels: Library, kind: torch.dtype, rows: int) -> None:
    slopes, index = usual(7, 5, salt=3), torch.tensor([0, 2, 1, 2, 2, 0, 1], dtype=kind)
    found = partial(embedding_dense_backward, slopes, index, rows, 1, False)
    assert_same(kernels, lambda: [found()])
    assert torch.equal(bits(found()[:3]), bits(embedding_dense_backward(slopes, index.long(), 3, 1, False)))


def on_threads(count: int, kernels: Library, compute: Callable[[], Sequence[Tensor]]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        assert_same(kernels, compute)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("rows", "height", "width"), [(8, 900, 300), (1, 3, 2), (200, 30, 40), (900, 7, 33)])
@pytest.mark.parametrize("odd", [1.0, math.inf, math.nan])
def test_sums_of_products(kernels: Library, rows: int, height: int, width: int, threads: int, odd: float) -> None:
    """Tiles with a part of their rows and columns, and of one shard after another where rows are many."""
    left, right = usual(3, rows, height, salt=3), usual(3, rows, width, salt=4)
    left[1, 0, 0], right[2, 0, 1], left[0, 0, 1] = -0.0, 1e-45, odd
    on_threads(threads, kernels, lambda: sum_of_products(left, right, 20, SpareMemory(), 3 * 2.0**30))
    on_threads(threads, kernels, lambda: [products_of_shards(left, right, 20)])


def factors(rows: int, terms: int, width: int, odd: float, is_transposed: bool) -> tuple[Tensor, Tensor]:
    """Lines differ in size, and have zeros, a subnormal number and an odd one among them."""
    sizes = 2.0 ** (torch.arange(width).view(-1, 1) % 50 - 25)
    x, matrix = usual(rows, terms, salt=3), usual(width, terms, salt=4).mul(sizes)
    x[0, 0], x[-1], matrix[-1, -1], matrix[0] = -0.0, 1e-45, odd, 0.0
    return x, matrix.T.contiguous().T if is_transposed else matrix


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("odd", [1.0, math.inf, math.nan])
@pytest.mark.parametrize(("rows", "terms", "width"), [(1, 1, 1), (7, 5, 3), (300, 40, 70), (40, 900, 33)])
def test_products_by_tiles(
    kernels: Library, rows: int, terms: int, width: int, odd: float, is_transposed: bool, threads: int
) -> None:
    """Tiles with a part of their rows and columns, and of some rows after others where terms are many."""
    x, matrix = factors(rows, terms, width, odd, is_transposed)
    on_threads(threads, kernels, lambda: [product_of_lines(x, matrix, 20)])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_products_with_parts_of_a_large_matrix(
    kernels: Library, is_transposed: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last part is smaller than the others, of rows and of lines."""
    x, matrix = factors(520, 130, 500, math.inf, is_transposed)
    monkeypatch.setattr(products, "_LARGE", 50_000)
    kernels_called, call = set[str](), Library.call
    monkeypatch.setattr(
        Library, "call", lambda self, name, *given: (kernels_called.add(name), call(self, name, *given))
    )
    on_threads(threads, kernels, lambda: [product_of_lines(x, matrix, 20)])
    assert "product_of_lines" not in kernels_called


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_columns_beyond_those_that_are_read_together(
    kernels: Library, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (grid, sums):
        monkeypatch.setattr(module, "threads", lambda: threads)
    x = usual(40, 1100, salt=9)
    assert_same(kernels, lambda: (snap(x, 0, 20), snap(x[:, :600], 0, 20), fixed_order_sum(x, (0,))))


@pytest.mark.parametrize("special", [0.0, math.inf, math.nan])
@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("kernel", [(1,), (5,), (3, 3), (2, 7)], ids=str)
def test_depthwise_convolutions(kernels: Library, kernel: tuple[int, ...], each: int, special: float) -> None:
    """Also of numbers that are not finite, which meet the zeros of the padding."""
    axes = len(kernel)
    for stride, padding, dilation, samples in itertools.product((1, 2, 3), (0, 1, 3), (1, 2), (1, 3)):
        layout = Layout((stride,) * axes, (padding,) * axes, (dilation,) * axes, False, (0,) * axes, 4)
        x = usual(samples, 4, *(9, 16)[-axes:], salt=20).to(torch.float64)
        weight = usual(4 * each, 1, *kernel, salt=21).to(torch.float64)
        x, weight = (snap_(one, 3 * 2.0**40) for one in (x, weight))
        grad = snap_(usual(*convolved(x, weight, layout).shape, salt=22).to(torch.float64), 3 * 2.0**40)
        x.view(-1)[5], weight.view(-1)[0], grad.view(-1)[3] = (special or number for number in (1.0, 2.0, 3.0))
        for run in (
            partial(convolved, x, weight, layout),
            partial(gradient_of_images, grad, x.shape, weight, layout),
            partial(gradient_of_kernels, grad, x, weight.shape, layout),
        ):
            assert_same(kernels, lambda run=run: [run()])  # type: ignore[misc]


@pytest.mark.parametrize("special", [0.0, math.inf, math.nan])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("channels", "each", "groups"), [(3, 5, 1), (4, 9, 2), (16, 3, 4)])
@pytest.mark.parametrize("kernel", [(1,), (4,), (3, 2), (1, 1), (2, 3, 2)], ids=str)
def test_convolutions(
    kernels: Library, kernel: tuple[int, ...], channels: int, each: int, groups: int, transposed: bool, special: float
) -> None:
    """Also of numbers that are not finite, which meet the zeros of the padding."""
    axes = len(kernel)
    for stride, padding, dilation in ((1, 0, 1), (1, 1, 1), (2, 1, 1), (3, 2, 1), (1, 2, 2), (2, 1, 2)):
        moves = ((stride,) * axes, (padding,) * axes, (dilation,) * axes)
        layout = Layout(*moves, transposed, (0,) * axes, groups)
        x = usual(3, channels, *(7, 6, 5)[:axes], salt=20).to(torch.float64)
        shape = (channels, each) if transposed else (groups * each, channels // groups)
        weight = usual(*shape, *kernel, salt=21).to(torch.float64)
        x, weight = (snap_(one, 3 * 2.0**40) for one in (x, weight))
        with using(None):
            y = convolved(x, weight, layout)
        grad = snap_(usual(*y.shape, salt=22).to(torch.float64), 3 * 2.0**40)
        x.view(-1)[5], weight.view(-1)[0], grad.view(-1)[3] = (special or number for number in (1.0, 2.0, 3.0))
        for run in (
            partial(convolved, x, weight, layout),
            partial(gradient_of_images, grad, x.shape, weight, layout),
            partial(gradient_of_kernels, grad, x, weight.shape, layout),
        ):
            assert_same(kernels, lambda run=run: [run()])  # type: ignore[misc]


@pytest.mark.parametrize("groups", [1, 3])
def test_one_number_of_a_convolution_stands_for_all_axes(kernels: Library, groups: int) -> None:
    """As PyTorch hands ``padding="valid"`` on."""
    x = snap_(usual(2, 3, 9, 8, salt=25).to(torch.float64), 3 * 2.0**40)
    weight = snap_(usual(6, 3 // groups, 3, 2, salt=26).to(torch.float64), 3 * 2.0**40)
    layout = Layout((2, 1), (0,), (1,), False, (0,), groups)
    grad = snap_(usual(2, 6, 4, 7, salt=27).to(torch.float64), 3 * 2.0**40)
    assert_same(kernels, lambda: [convolved(x, weight, layout), gradient_of_images(grad, x.shape, weight, layout)])
    assert_same(kernels, lambda: [gradient_of_kernels(grad, x, weight.shape, layout)])


@pytest.mark.parametrize("images", [1, 2, 56])
def test_threads_share_images_of_a_convolution_or_where_they_are_few_their_channels(
    kernels: Library, images: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, size = Layout((2, 1), (1, 1), (1, 1), False, (0, 0), 2), (24, 25) if images > 2 else (64, 65)
    shapes = (images, 24, *size), (60, 12, 3, 3), (images, 60, size[0] // 2, size[1])
    x, weight, grad = (
        snap_(usual_floats(math.prod(s), 23, CPU).to(torch.float64).view(s), 3 * 2.0**40) for s in shapes
    )
    for threads in (1, 2, 3, 7):
        monkeypatch.setattr(convolution_kernels, "threads", lambda threads=threads: threads)
        for run in (
            partial(convolved, x, weight, layout),
            partial(gradient_of_images, grad, x.shape, weight, layout),
            partial(gradient_of_kernels, grad, x, weight.shape, layout),
        ):
            assert_same(kernels, lambda run=run: [run()])  # type: ignore[misc]


def test_a_grid_of_any_bits(kernels: Library) -> None:
    patterns = floats(3 * 2**14, 10, CPU)
    for width in (1, 3, 64):
        x = patterns.view(-1, width)
        known = torch.where(x.isnan(), math.inf, x)  # of NaN a whole product is NaN, whatever the grid
        assert_same(kernels, lambda x=x, known=known: (snap_rows(x, 20), snap(known, 0, 20), *snapped(x, 3 * 2.0**40)))  # type: ignore[misc]


def trained(make: Callable[..., Any], terms: int, clip: float | None, **settings: Any) -> list[Tensor]:
    """Parameters and states after some steps; one parameter has no gradient."""
    wide = [torch.nn.Parameter(usual(*shape, salt=11).to(torch.float64)) for shape in ((40, 7), (9, 4096), (5,))]
    optimizer = make(wide, lr=1e-3, terms=terms, clip=clip, **settings)
    for step in range(3):
        for index, p in enumerate(wide):
            p.grad = None if index == 0 else usual(*p.shape, salt=20 * step + index).to(torch.float64)
        optimizer.step()
    states = [state for p in wide for state in optimizer.state[p].values() if isinstance(state, torch.Tensor)]
    return [*(p.detach() for p in wide), *states]


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("terms", [64, 48])
def test_optimizers_have_the_bits_of_pythons_own(kernels: Library, terms: int, clip: float | None) -> None:
    for momentum, decay in ((0.9, 0.01), (0.0, 0.0)):
        assert_same(kernels, lambda m=momentum, d=decay: trained(SGD, terms, clip, momentum=m, weight_decay=d))  # type: ignore[misc]
        assert_same(kernels, lambda d=decay: trained(AdamW, terms, clip, weight_decay=d))  # type: ignore[misc]


def test_threads_share_rows_and_change_no_bit(kernels: Library) -> None:
    x = usual(700, 300, salt=12)
    alone = snap_rows(x, 20)
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            with using(kernels):
                assert torch.equal(snap_rows(x, 20), alone)
    finally:
        torch.set_num_threads(threads)


_TEAM = """
import torch
from samebits.numerics.exact.compiled import check, library
from samebits.numerics.exact.grid import snap_rows

assert check.start() is None
torch.set_num_threads(3)
x = torch.arange(300 * 700, dtype=torch.float32).view(300, 700)
fast = snap_rows(x, 20)
with library.using(None):
    assert torch.equal(fast, snap_rows(x, 20))
"""


@pytest.mark.parametrize("limit", ["OMP_THREAD_LIMIT=1", "OMP_THREAD_LIMIT=2", "OMP_DYNAMIC=true"])
def test_a_team_that_is_smaller_than_asked_for_leaves_no_row_out(limit: str) -> None:
    name, _, value = limit.partition("=")
    subprocess.run([sys.executable, "-c", _TEAM], env={**os.environ, name: value}, check=True)


def test_kernels_with_other_bits_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(Library):
        def call(self, name: str, *arguments: Any) -> None:
            super().call(name, *arguments)
            if name == "tanh_double":
                arguments[1].add_(1)

    monkeypatch.setattr(check, "_loaded", lambda device: Wrong(build.library()))
    found = check._found.__wrapped__(CPU)
    assert str(found).startswith("compiled kernels give other bits on cpu: tanh. hint: report it")


def test_the_check_reaches_every_kernel(kernels: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    called = set()
    real = Library._function
    monkeypatch.setattr(Library, "_function", lambda self, name, given: called.add(name) or real(self, name, given))
    assert check.differing(kernels) == []
    source = "".join(part.read_text() for part in (build.SOURCE, *build.PARTS))
    exported = set(re.findall(r"^(?:API \w+ |ROW_API\(|UPDATE\()(\w+)[(,)]", source, re.M))
    functions = set(re.findall(r"^(?:MAP|TABLE)\((\w+),", source, re.M))
    assert functions == {one.__name__ for one in OF_NUMBERS}
    sums = {f"sum_{type_}" for type_ in re.findall(r"^SUM_OF\((\w+),", source, re.M)}
    assert called == (exported - {"use_threads", "all_near_float"}) | sums | {f"{name}_double" for name in functions}


def compiled_by(command: list[str], folder: Path, level: str | None, flags: Sequence[str] = build.FLAGS) -> Library:
    target = folder / f"{level}.so"
    build.compile_to(target, level, command, flags)
    return Library(target)


def levels() -> list[str | None]:
    """The instruction sets that this host has, among those that kernels are compiled for."""
    capability = torch.backends.cpu.get_cpu_capability()
    known = list(build.LEVELS)
    return [None, *(build.LEVELS[name] for name in known[known.index(capability) :])] if capability in known else [None]


def compilations() -> Iterator[Any]:
    """Each compiler with each instruction set; quick is the first one's with the narrowest registers."""
    for command, level in itertools.product(build.compilers(), levels()):
        quick = command == build.compilers()[0] and level is None
        yield pytest.param(command, level, marks=() if quick else pytest.mark.slow, id=f"{command[-1]}-{level}")


@pytest.mark.parametrize(("command", "level"), [*compilations()])
def test_every_compiler_and_instruction_set_gives_the_same_bits(
    tmp_path: Path, command: list[str], level: str | None
) -> None:
    assert check.differing(compiled_by(command, tmp_path, level)) == []


@pytest.mark.skipif("x86-64-v3" not in levels(), reason="needs an instruction that multiplies and adds at once")
def test_a_compiler_that_joins_products_and_sums_is_found_out(tmp_path: Path) -> None:
    joined = [flag.replace("contract=off", "contract=fast") for flag in build.FLAGS]
    wrong = check.differing(compiled_by(build.compilers()[0], tmp_path, "x86-64-v3", joined))
    assert {"exp", "log", "optimizers"} <= set(wrong)


FUSED = re.compile(rb"\bv?fn?m(?:add|sub|la|ls)\w*")
"""Instructions that multiply and add without rounding in between, of x86-64 and of Arm."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "cpu"), [("aarch64", "baseline"), ("aarch64", "neoverse_v1"), ("x86_64", "x86_64_v4")]
)
def test_no_instruction_of_any_processor_multiplies_and_adds_at_once(tmp_path: Path, target: str, cpu: str) -> None:
    def fused(contract: str) -> int:
        flags = [f.replace("contract=off", f"contract={contract}") for f in build.FLAGS if f != "-shared"]
        listing = tmp_path / "kernels.s"
        caches = dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), str(tmp_path))
        command = [*build.ZIG, *flags, "-target", f"{target}-linux-gnu", f"-mcpu={cpu}", "-S", "-o", str(listing)]
        subprocess.run([*command, str(build.SOURCE)], check=True, capture_output=True, env={**os.environ, **caches})
        functions = re.split(rb"^(\w+):", listing.read_bytes(), flags=re.MULTILINE)[1:]
        bodies = dict(zip(functions[::2], functions[1::2], strict=True))
        assert FUSED.search(bodies.pop(b"tile_of_products"))  # whose products are exact
        return sum(len(FUSED.findall(body)) for body in bodies.values())

    assert "-ffp-contract=off" in build.FLAGS
    assert fused("off") == 0
    assert fused("fast") > 500


@pytest.mark.parametrize(("machine", "level"), [("aarch64", None), ("x86_64", "x86-64")])
def test_the_instruction_set_is_one_of_this_processor(
    monkeypatch: pytest.MonkeyPatch, machine: str, level: str | None
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")  # what PyTorch says of Arm too
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine=machine))
    assert build.instruction_set() == level


def test_without_a_compiler_python_answers_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "compilers", list)
    with pytest.raises(HostError, match="no C compiler"):
        build.compile_to(tmp_path / "kernels.so", None)
    with pytest.raises(HostError, match="cannot compile the kernels of exact"):
        build.compile_to(tmp_path / "kernels.so", None, ["false"])
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "own_folder", lambda: tmp_path)
    monkeypatch.setattr(build, "library", cache(build.library.__wrapped__))
    build.library().write_bytes(b"damaged")
    assert check.differing(check._loaded(CPU)) == []


def test_kernels_can_be_switched_off() -> None:
    code = "from samebits.numerics.exact.compiled import check, library; print(check.start(), library.chosen() is None)"
    said = {
        value: subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, KERNELS: value},
            capture_output=True, text=True, check=True,
        ).stdout.strip()
        for value in ("python", "")
    }  # fmt: skip
    assert said["python"].startswith("SAMEBITS_KERNELS is set to python")
    assert said["python"].endswith("faster True")
    assert said[""] == "None False"
