"""Whether compiled kernels give the bits of Python's functions on this host, asked once in each process."""

from __future__ import annotations

import itertools
import math
from functools import cache, partial
from typing import TYPE_CHECKING

import torch

from samebits.errors import HostError
from samebits.host.variables import KERNELS, chosen
from samebits.numerics.exact import cells, convolution, integer_products, losses, optimizers, root_mean_square
from samebits.numerics.exact.compiled import HINT, build
from samebits.numerics.exact.compiled.gpu import GpuLibrary
from samebits.numerics.exact.compiled.library import OF_NUMBERS, Library, unused, use, using
from samebits.numerics.exact.convolution import Layout, snap_groups
from samebits.numerics.exact.forward_draws import Draws
from samebits.numerics.exact.grid import snap, snap_rows, snapped, snapped_sum
from samebits.numerics.exact.operations import indexing, pooling, reductions
from samebits.numerics.exact.operations import normalization as rows
from samebits.numerics.exact.operations.pointwise import relu
from samebits.numerics.exact.products import product_of_lines, products_of_shards, rounded_matmul, sum_of_products
from samebits.numerics.exact.self_test.check import agrees
from samebits.numerics.exact.self_test.numbers import digest, floats, usual_floats
from samebits.numerics.exact.spare import SpareMemory
from samebits.numerics.exact.sums import fixed_order_sum
from samebits.numerics.exact.unfolding import Geometry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from samebits.numerics.exact.compiled.library import Kernels

CPU = torch.device("cpu")
_COUNT, _WIDTH = 1050, 35


def _usual(device: torch.device, *shape: int, salt: int) -> Tensor:
    return usual_floats(_COUNT, salt, device)[: torch.Size(shape).numel()].view(shape)


def _of_rows(device: torch.device) -> Iterable[Tensor]:
    x, grad = _usual(device, 30, _WIDTH, salt=1), _usual(device, 30, _WIDTH, salt=2)
    weight, bias = _usual(device, _WIDTH, salt=3), _usual(device, _WIDTH, salt=4)
    yield from (rows.softmax(x, -1, False), rows.log_softmax(x, -1, False))
    yield rows.softmax_backward(grad, rows.softmax(x, -1, False), -1, torch.float32)
    yield rows.log_softmax_backward(grad, rows.log_softmax(x, -1, False), -1, torch.float32)
    y, mean, scale = rows.layer_norm(x, [_WIDTH], weight, bias, 1e-5)
    yield from (y, mean, scale, rows.layer_norm(x, [_WIDTH], None, None, 1e-5)[0])
    wanted = [True] * 3
    grads = rows.layer_norm_backward(grad, x, [_WIDTH], mean, scale, weight, bias, wanted)
    yield from (one for one in grads if one is not None)
    sizes = 2, 6, _COUNT // 12
    images, factor = _usual(device, *sizes, salt=16), _usual(device, 6, salt=17)
    yield from rows.group_norm(images, factor, factor, *sizes, 3, 1e-5)
    _, mean, scale = rows.group_norm(images, None, None, *sizes, 3, 1e-5)
    back = rows.group_norm_backward(images, images.neg(), mean, scale, factor, *sizes, 3, wanted)
    yield from (*(one for one in back if one is not None), relu(images))
    yield from (root_mean_square.normed(x, 1e-6), root_mean_square.normed(x, 1e-6, grad))
    yield from losses.cross_entropies(x, torch.arange(30, device=device) % _WIDTH)


def _of_grids(device: torch.device) -> Iterable[Tensor]:
    x = _usual(device, 30, _WIDTH, salt=5)
    yield from (snap_rows(x, 20), snap_rows(floats(_COUNT, 6, device).view(-1, 30), 20), snap(x, 0, 20))
    yield from (snap(x[:, 3 : _WIDTH - 1], 0, 20), snap_groups(x, 5, 3, 20))
    yield snap_rows(x.repeat(40, 1), 20)  # by several threads, if there are any
    yield from (*snapped(x, 3 * 2.0**40), *snapped_sum(x.view(5, 6, _WIDTH), 3 * 2.0**40))
    yield products_of_shards(x.view(5, 6, _WIDTH), x.neg().view(5, 6, _WIDTH), 20)
    yield from sum_of_products(x.view(5, 6, _WIDTH), x.neg().view(5, 6, _WIDTH), 20, SpareMemory(), 3 * 2.0**40)
    yield from (product_of_lines(x, x.neg(), 20), product_of_lines(x, x.mT.contiguous().mT, 20))
    yield rounded_matmul(x.to(torch.float64), x.mT.to(torch.float64))
    wide = x.to(torch.float64).view(5, 6, _WIDTH).mul(1.1)
    for numbers, dims in itertools.product((wide, wide.to(torch.float32)), ((0,), (1,), (2,), (0, 2), (0, 1, 2))):
        yield fixed_order_sum(numbers, dims)


def _of_convolutions(device: torch.device) -> Iterable[Tensor]:
    for size, channels, each, groups, (stride, padding, dilation), transposed in (
        ((12, 11), 3, 1, 3, (2, 1, 3), False),  # depthwise
        ((40,), 3, 2, 3, (1, 2, 1), False),
        ((7, 6), 6, 5, 2, (2, 1, 1), False),
        ((5, 4, 3), 2, 9, 1, (1, 1, 1), False),
        ((6, 5), 6, 4, 2, (2, 1, 2), True),
    ):
        axes = len(size)
        moves = Layout((stride,) * axes, (padding,) * axes, (dilation,) * axes, transposed, (0,) * axes, groups)
        x = snap_groups(_usual(device, 2, channels, *size, salt=18), 1, 2 * groups, 20)
        shape = (channels, each) if transposed else (groups * each, channels // groups)
        weight = snap_groups(_usual(device, *shape, *(3, 2, 2)[:axes], salt=19), 1, groups, 20)
        y = convolution.convolved(x, weight, moves)
        grad = snap_groups(y.to(torch.float32), 1, 1, 20)
        yield from (y, convolution.gradient_of_images(grad, x.shape, weight, moves))
        yield convolution.gradient_of_kernels(grad, snap_groups(x.to(torch.float32), 1, 1, 20), weight.shape, moves)


def _of_windows(device: torch.device) -> Iterable[Tensor]:
    for size, kernel, stride, padding, dilation in (
        ((5,), 2, 1, 1, 1),
        ((5, 6), 3, 2, 1, 1),
        ((6, 4), 2, 2, 0, 2),
        ((3, 4, 5), 2, 1, 1, 1),
    ):
        geometry = Geometry.of(size, kernel=kernel, stride=stride, padding=padding, dilation=dilation)
        groups, batch, channels = 2, 2, 3
        windows, taps = math.prod(geometry.positions), math.prod(geometry.kernel)
        rows = snap(usual_floats(groups * batch * windows * channels * taps, 20, device).view(groups, -1), 0, 20)
        rows = rows.view(groups, batch * windows, channels * taps)
        yield convolution.folded(rows, (batch, groups * channels, *size), geometry)


def _of_places(device: torch.device) -> Iterable[Tensor]:
    x, source = _usual(device, 2, 5, _WIDTH, salt=23), _usual(device, 2, 15, _WIDTH, salt=24)
    rows = torch.arange(15, device=device).mul(2).remainder(5)
    each = rows.view(1, -1, 1).add(torch.arange(_WIDTH, device=device)).remainder(5).expand(source.shape)
    yield from (indexing.index_add(x, 1, rows, source), indexing.scatter_add(x, 1, each, source))
    yield from (indexing.index_add(x.mT, 2, rows, source.mT), indexing.scatter_add(x.mT, 2, each.mT, source.mT))
    yield from (reductions.cumsum(source, 1), reductions.cumsum(source, 2))


def _of_maxima(device: torch.device) -> Iterable[Tensor]:
    for size, settings in (
        ((9,), ([3], [2], [1], [1], False)),
        ((6, 7), ([3, 2], [2, 1], [1, 0], [1, 1], True)),
        ((4, 3, 5), ([2] * 3, [1] * 3, [1] * 3, [1] * 3, False)),
    ):
        axes, x = len(size), _usual(device, 3, 2, *size, salt=21).mul(4).round_()  # among them equal ones
        y, places = pooling.max_pool(axes, x, *settings)
        grad = _usual(device, *y.shape, salt=22)
        yield from (y, places, pooling.max_pool_backward(axes, grad, x, *settings, places))


def _of_products(device: torch.device) -> Iterable[Tensor]:
    return (integer_products.by_digits(a, b) for a, b in integer_products.tried(device))


def _of_draws(device: torch.device) -> Iterable[Tensor]:
    for shards, each, p in ((1, 7, 0.9), (3, _COUNT, 0.3)):
        yield Draws(0, 1, range(shards)).bernoulli(torch.empty(shards * each, device=device), p)


def _of_optimizers(device: torch.device) -> Iterable[Tensor]:
    for make, settings in ((optimizers.SGD, {"momentum": 0.9}), (optimizers.AdamW, {})):
        for terms, clip in ((64, None), (48, 1.0)):
            p = torch.nn.Parameter(_usual(device, _COUNT, salt=7).to(torch.float64))
            optimizer = make([p], lr=0.01, terms=terms, clip=clip, weight_decay=0.1, **settings)
            for salt in (8, 9):
                p.grad = _usual(device, _COUNT, salt=salt).to(torch.float64)
                optimizer.step()
            yield from (p.detach(), *(t for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)))


def _of_cells(device: torch.device) -> Iterable[Tensor]:
    rows, width = 2, 2 * _WIDTH  # more than a kernel has at a time
    states = [_usual(device, rows, width, salt=salt) for salt in (11, 12)]
    for cell, gates in ((cells.LSTM, 4), (cells.GRU, 3)):
        x, product = (_usual(device, rows, gates * width, salt=salt) for salt in (13, 14))
        for bias in (None, _usual(device, gates * width, salt=15)):
            before = states[: cell.states]
            after = [torch.empty_like(one) for one in before]
            kept = [x.new_empty((rows, times * width)) for times in cell.kept]
            cell.step(x, product.to(torch.float64), bias, before, [*after, *kept])
            slopes = [torch.empty_like(x) for _ in range(cell.inputs)]
            earlier = cell.slopes([one.to(torch.float64) for one in before], after, kept, slopes)
            yield from (*after, *kept, *slopes, *(one for one in earlier if one is not None))


def _of_numbers(function: Callable[[Tensor], Tensor], device: torch.device) -> Iterable[Tensor]:
    x = floats(_COUNT, 10, device).to(torch.float64)
    return (function(torch.where(x.abs() > 2.0**19, 1.0, x)),)


CASES: dict[str, Callable[[torch.device], Iterable[Tensor]]] = {
    "rows": _of_rows,
    "grids and sums": _of_grids,
    "convolutions": _of_convolutions,
    "sums over windows": _of_windows,
    "sums into places": _of_places,
    "maxima of windows": _of_maxima,
    "products by digits": _of_products,
    "draws": _of_draws,
    "optimizers": _of_optimizers,
    "recurrent cells": _of_cells,
    **{function.__name__: partial(_of_numbers, function) for function in OF_NUMBERS},
}
"""What is compared, by name."""
_KERNELS = {
    "sums over windows": "folded",
    "products by digits": "digits",
    "convolutions": "convolved",
    **{function.__name__: f"{function.__name__}_double" for function in OF_NUMBERS},
}
"""A kernel of a case, where not every library has one."""


def differing(library: Kernels, device: torch.device = CPU) -> list[str]:
    """The names of the cases in which a library gives other bits than Python's functions."""
    found = (name for name in CASES if library.has(_KERNELS.get(name, "relu")))
    return [name for name in found if not agrees(*(_digest(CASES[name], one, device) for one in (library, None)))]


def _digest(run: Callable[[torch.device], Iterable[Tensor]], library: Kernels | None, device: torch.device) -> str:
    with using(library):
        return digest(run(device))


def start(device: torch.device = CPU) -> HostError | None:
    """Use the compiled kernels from now on if this device can have them and they are right; why not, else None."""
    found = _OFF if chosen(KERNELS) == "python" else _found(device)
    if isinstance(found, HostError):
        unused(device.type)
        return found
    use(found)
    return None


_OFF = HostError(f"{KERNELS} is set to python", hint="unset it; compiled kernels give the same bits faster")


def _loaded(device: torch.device) -> Kernels:
    if device.type == "cuda":
        return GpuLibrary()
    try:
        return Library(build.library())
    except OSError:  # of a damaged file
        return Library(build.library(anew=True))


@cache
def _found(device: torch.device) -> Kernels | HostError:
    try:
        library = _loaded(device)
        if wrong := differing(library, device):
            text = f"compiled kernels give other bits on {device}: {', '.join(wrong)}"
            return HostError(text, hint="report it; Python's functions give the right bits")
    except HostError as error:
        return error
    except OSError as error:
        return HostError(str(error), hint=HINT)
    return library
