"""Gradients of interpolation: products with the matrix of each axis, which says how much of an element each result has.

PyTorch's decompositions make the results of elementary operations; their gradients are kernels that add in any order.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from samebits.numerics.exact.grid import matmul
from samebits.numerics.exact.operations.registry import EXACT, check_float32

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Weights = Callable[[float, int], list[tuple[int, float]]]

aten = torch.ops.aten
_CUBIC = -0.75  # as in PyTorch's kernels (Keys 1981)


def _linear(place: float, size: int) -> list[tuple[int, float]]:
    place = max(place, 0.0)
    low = min(math.floor(place), size - 1)
    part = place - low
    return [(low, 1.0 - part), (min(low + 1, size - 1), part)]


def _cubic(place: float, size: int) -> list[tuple[int, float]]:
    low = math.floor(place)
    part = place - low

    def near(t: float) -> float:
        return ((_CUBIC + 2.0) * t - (_CUBIC + 3.0)) * t * t + 1.0

    def far(t: float) -> float:
        return ((_CUBIC * t - 5.0 * _CUBIC) * t + 8.0 * _CUBIC) * t - 4.0 * _CUBIC

    weights = (far(part + 1.0), near(part), near(1.0 - part), far(2.0 - part))
    return [(min(max(low + offset, 0), size - 1), weight) for offset, weight in zip(range(-1, 3), weights, strict=True)]


@cache
def _matrix(weights: Weights, size: int, count: int, align: bool, scale: float | None, device: torch.device) -> Tensor:
    """How much of each of ``size`` elements each of ``count`` results has, (count, size), in float32."""
    rows = torch.zeros((count, size), dtype=torch.float64)
    for result in range(count):
        if align:
            place = result * (size - 1) / (count - 1) if count > 1 else 0.0
        else:
            place = (result + 0.5) * (1.0 / scale if scale else size / count) - 0.5
        for element, weight in weights(place, size):
            rows[result, element] += weight
    return rows.to(torch.float32).to(device)


def _enter(packet: Any, axes: int, weights: Weights) -> None:
    """Enter the gradient of an interpolation over so many axes: one product for each of them, the last first."""

    def version(
        grad: Tensor, output_size: list[int], input_size: list[int], align_corners: bool, *scales: float | None
    ) -> Tensor:
        check_float32(grad)
        for axis in reversed(range(axes)):
            size, count = input_size[2 + axis], output_size[axis]
            scale = scales[axis] if len(scales) == axes else None
            matrix = _matrix(weights, size, count, align_corners, scale, grad.device)
            lines = grad.movedim(2 + axis, -1).contiguous()
            grad = matmul(lines, matrix).to(torch.float32).movedim(-1, 2 + axis)
        return grad.contiguous()

    EXACT[packet] = version


_enter(aten.upsample_linear1d_backward, 1, _linear)
_enter(aten.upsample_bilinear2d_backward, 2, _linear)
_enter(aten.upsample_trilinear3d_backward, 3, _linear)
_enter(aten.upsample_bicubic2d_backward, 2, _cubic)
