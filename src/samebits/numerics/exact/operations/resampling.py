"""Interpolation by products with the matrix of each axis, which says how much of an element each result has.

PyTorch's decompositions make the results of elementary operations; their gradients are kernels that add in any order.
Antialiased resizing has neither. The gradient of the nearest element is a sum over its copies.
"""

from __future__ import annotations

import math
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from samebits.numerics.exact.operations.indexing import onto
from samebits.numerics.exact.operations.registry import EXACT, check_float32
from samebits.numerics.exact.products import matmul_along

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Weights = Callable[[float, int, float], list[tuple[int, float]]]
    """What a result has of which elements: by its place, their number, and the distance of two places."""

aten = torch.ops.aten
_CUBIC = -0.75  # as in PyTorch's kernels (Keys 1981)


def _linear(place: float, size: int, step: float) -> list[tuple[int, float]]:  # noqa: ARG001
    place = max(place, 0.0)
    low = min(math.floor(place), size - 1)
    part = place - low
    return [(low, 1.0 - part), (min(low + 1, size - 1), part)]


def _cubic(place: float, size: int, step: float) -> list[tuple[int, float]]:  # noqa: ARG001
    low = math.floor(place)
    part = place - low

    def near(t: float) -> float:
        return ((_CUBIC + 2.0) * t - (_CUBIC + 3.0)) * t * t + 1.0

    def far(t: float) -> float:
        return ((_CUBIC * t - 5.0 * _CUBIC) * t + 8.0 * _CUBIC) * t - 4.0 * _CUBIC

    weights = (far(part + 1.0), near(part), near(1.0 - part), far(2.0 - part))
    return [(min(max(low + offset, 0), size - 1), weight) for offset, weight in zip(range(-1, 3), weights, strict=True)]


def _hat(t: float) -> float:
    return max(0.0, 1.0 - abs(t))


def _bell(t: float) -> float:
    """The cubic of antialiased resizing, whose parameter is not that of ``_cubic``, as in PyTorch's kernels."""
    t, a = abs(t), -0.5
    if t < 1.0:
        return ((a + 2.0) * t - (a + 3.0)) * t * t + 1.0
    return (((t - 5.0) * t + 8.0) * t - 4.0) * a if t < 2.0 else 0.0


def _smooth(shape: Callable[[float], float], reach: float) -> Weights:
    """Weights of antialiased resizing: a result has what is within ``reach`` of its place, or within its own size."""

    def weights(place: float, size: int, step: float) -> list[tuple[int, float]]:
        widened = max(step, 1.0)
        first = max(int(place - reach * widened + 0.5), 0)
        last = min(int(place + reach * widened + 0.5), size)
        each = [shape((element - place + 0.5) / widened) for element in range(first, last)]
        total = math.fsum(each)
        return [(first + number, weight / total if total else 0.0) for number, weight in enumerate(each)]

    return weights


@cache
def _matrix(
    weights: Weights, size: int, count: int, align: bool, scale: float | None, middle: bool, device: torch.device
) -> Tensor:
    """How much of each of ``size`` elements each of ``count`` results has, (count, size), in float32.

    A place is that of the result's first edge, or with ``middle`` of its middle.
    """
    rows = torch.zeros((count, size), dtype=torch.float64)
    step = (size - 1) * (count > 1) / max(count - 1, 1) if align else 1.0 / scale if scale else size / count
    for result in range(count):
        place = result * (size - 1) / max(count - 1, 1) if align else (result + 0.5) * step - 0.5
        if middle:
            place += step / 2 if align else 0.5
        for element, weight in weights(place, size, step):
            rows[result, element] += weight
    return rows.to(torch.float32).to(device)


def _enter(name: str, axes: int, weights: Weights, *, middle: bool = False) -> None:
    """Enter an interpolation over so many axes, if PyTorch has no decomposition, and its gradient."""

    def matrices(
        device: torch.device, output_size: list[int], input_size: list[int], align: bool, *scales: float | None
    ) -> list[Tensor]:
        given = scales if len(scales) == axes else (None,) * axes
        sizes = zip(input_size[2:], output_size, given, strict=True)
        return [_matrix(weights, size, count, align, scale, middle, device) for size, count, scale in sizes]

    def forward(x: Tensor, output_size: list[int], *settings: Any) -> Tensor:
        check_float32(x)
        for axis, matrix in enumerate(matrices(x.device, output_size, list(x.shape), *settings)):
            x = matmul_along(x, 2 + axis, matrix.mT).to(torch.float32)
        return x.contiguous()

    def backward(grad: Tensor, output_size: list[int], *settings: Any) -> Tensor:
        check_float32(grad)
        for axis, matrix in reversed([*enumerate(matrices(grad.device, output_size, *settings))]):
            grad = matmul_along(grad, 2 + axis, matrix).to(torch.float32)
        return grad.contiguous()

    if middle:
        EXACT[getattr(aten, name)] = forward
    EXACT[getattr(aten, f"{name}_backward")] = backward


_enter("upsample_linear1d", 1, _linear)
_enter("upsample_bilinear2d", 2, _linear)
_enter("upsample_trilinear3d", 3, _linear)
_enter("upsample_bicubic2d", 2, _cubic)
_enter("_upsample_bilinear2d_aa", 2, _smooth(_hat, 1.0), middle=True)
_enter("_upsample_bicubic2d_aa", 2, _smooth(_bell, 2.0), middle=True)


def _nearest_backward(
    middle: float, grad: Tensor, output_size: list[int], input_size: list[int], *scales: float | None
) -> Tensor:
    """The gradient of nearest upsampling: the sum of the gradients of an element's copies, axis by axis.

    ``middle`` is where a result is looked up between one element and the next.
    """
    axes = len(output_size)
    for axis, count, size in zip(range(2, 2 + axes), output_size, input_size[2:], strict=True):
        scale = scales[axis - 2] if len(scales) == axes else None
        step = torch.tensor(1.0 / scale if scale else size / count, dtype=torch.float32)
        places = torch.arange(count, dtype=torch.float32).add(middle).mul(step).floor().clamp(max=size - 1)
        grad = onto(grad, axis, places.to(torch.int64).to(grad.device), size)
    return grad


for _axes in (1, 2, 3):
    EXACT[getattr(aten, f"upsample_nearest{_axes}d_backward")] = partial(_nearest_backward, 0.0)
    EXACT[getattr(aten, f"_upsample_nearest_exact{_axes}d_backward")] = partial(_nearest_backward, 0.5)
