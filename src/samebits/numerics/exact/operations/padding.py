"""Gradients of padding: sums over the copies of an element."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING

import torch

from samebits.numerics.exact.operations.indexing import onto
from samebits.numerics.exact.operations.registry import EXACT

if TYPE_CHECKING:
    from torch import Tensor

aten = torch.ops.aten


def _padded_backward(axes: int, grad: Tensor, x: Tensor, padding: list[int]) -> Tensor:
    """The gradient of padding with the nearest element: the sum of the gradients of its copies, axis by axis."""
    for axis in range(-1, -1 - axes, -1):
        before, size = padding[2 * (-1 - axis)], x.shape[axis]
        after = grad.shape[axis] - before - size
        if min(before, after) < 0 or size == 1:
            places = torch.arange(grad.shape[axis], device=grad.device).sub_(before).clamp_(0, size - 1)
            grad = onto(grad, axis, places, size)
            continue
        whole, grad = grad, grad.narrow(axis, before, size).add(0.0)  # zero has one sign
        for end, start, count in ((0, 0, before + 1), (size - 1, before + size - 1, after + 1)):
            copies = whole.narrow(axis, start, count)
            places = torch.zeros(count, dtype=torch.int64, device=grad.device)
            grad.narrow(axis, end, 1).copy_(onto(copies, axis, places, 1))
    return grad


def _reflected_backward(axes: int, grad: Tensor, x: Tensor, padding: list[int]) -> Tensor:
    """The gradient of reflecting at the ends of axes: float32 sums of an area and its reflections, in a fixed order."""
    total, first = grad.new_zeros(x.shape), x.dim() - axes
    parts = []  # where an axis and its reflections begin, in x and in grad, and how long they are
    for axis in range(first, x.dim()):
        size, (before, after) = x.shape[axis], padding[2 * (x.dim() - 1 - axis) :][:2]
        cut = max(-before, 0)
        itself = cut, before + cut, size - cut - max(-after, 0)
        parts.append({-1: (1, 0, before), 0: itself, 1: (size - 1 - after, before + size, after)})
    for sides in sorted(itertools.product((-1, 0, 1), repeat=axes), key=any):  # x itself first
        areas = [(axis, *part[side]) for axis, part, side in zip(range(first, x.dim()), parts, sides, strict=True)]
        if any(count <= 0 for *_, count in areas):
            continue
        here, there = total, grad
        for axis, start, from_, count in areas:
            here, there = here.narrow(axis, start, count), there.narrow(axis, from_, count)
        here.add_(there.flip([first + i for i, side in enumerate(sides) if side]))
    return total


for _axes in (1, 2, 3):
    EXACT[getattr(aten, f"replication_pad{_axes}d_backward")] = partial(_padded_backward, _axes)
    EXACT[getattr(aten, f"reflection_pad{_axes}d_backward")] = partial(_reflected_backward, _axes)
