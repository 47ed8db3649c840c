"""Windows of an image as rows of a matrix, so that a convolution is a product, and the transpose."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import EllipsisType

    from torch import Tensor

MOST_AXES = 3  # of an image that kernels take


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """How a kernel moves over an image: one number for each axis behind batch and channels."""

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil: bool = False
    """Whether a last window may hang over the edge, as with ``ceil_mode``."""

    @classmethod
    def of(cls, size: Sequence[int], *, ceil: bool = False, **numbers: int | Sequence[int]) -> Geometry:
        """Geometry from kernel, stride, padding and dilation, each a number for each axis or one for all."""
        each = {name: _per_axis(value, len(size)) for name, value in numbers.items()}
        return cls(size=tuple(size), ceil=ceil, **each)

    def transposed(self, output_padding: Sequence[int]) -> Geometry:
        """Geometry of the image that has a window for each element of this one.

        That image is ``output_padding`` elements larger than its windows need.
        """
        rest = _per_axis(output_padding, len(self.size))
        axes = zip(self.size, self.kernel, self.stride, self.padding, self.dilation, rest, strict=True)
        return replace(self, size=tuple((n - 1) * t - 2 * p + d * (k - 1) + o + 1 for n, k, t, p, d, o in axes))

    @property
    def positions(self) -> tuple[int, ...]:
        """Number of windows along each axis, which is the shape of a convolution's result."""
        return tuple(self._count(axis) for axis in range(len(self.size)))

    def _count(self, axis: int) -> int:
        size, padding, stride = self.size[axis], self.padding[axis], self.stride[axis]
        room = size + 2 * padding - self.dilation[axis] * (self.kernel[axis] - 1) - 1
        if not self.ceil:
            return room // stride + 1
        count = -(-room // stride) + 1
        return count - 1 if (count - 1) * stride >= size + padding else count

    def along(self, axes: int) -> list[int] | None:
        """Sizes, positions, kernel, strides, padding and dilation along so many axes; None if it has more.

        Axes that it lacks come first, with one element and without padding.
        """
        lacking = axes - len(self.size)
        if lacking < 0:
            return None
        named = (
            (self.size, 1),
            (self.positions, 1),
            (self.kernel, 1),
            (self.stride, 1),
            (self.padding, 0),
            (self.dilation, 1),
        )
        return [number for numbers, one in named for number in (*(one,) * lacking, *numbers)]

    @property
    def overhang(self) -> tuple[int, ...]:
        """Number of elements by which windows reach beyond the padding at the far end."""
        ends = (
            (n - 1) * t + d * (k - 1) + 1 - (s + 2 * p)
            for n, t, d, k, s, p in zip(
                self.positions, self.stride, self.dilation, self.kernel, self.size, self.padding, strict=True
            )
        )
        return tuple(max(0, end) for end in ends)


def _per_axis(value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    numbers = (value,) if isinstance(value, int) else tuple(value)
    return numbers * axes if len(numbers) == 1 else numbers


def windows_of(x: Tensor, geometry: Geometry, fill: float = 0.0) -> Tensor:
    """The windows of an image, edges filled with ``fill``.

    Shapes: (batch, channels, *size) to a view (batch, channels, *positions, *kernel).
    """
    around = zip(reversed(geometry.padding), reversed(geometry.overhang), strict=True)
    pads = [pad for p, over in around for pad in (p, p + over)]
    padded = F.pad(x, pads, value=fill) if any(pads) else x
    strides = padded.stride()
    across = [s * t for s, t in zip(strides[2:], geometry.stride, strict=True)]
    within = [s * d for s, d in zip(strides[2:], geometry.dilation, strict=True)]
    shape = (*x.shape[:2], *geometry.positions, *geometry.kernel)
    return padded.as_strided(shape, (*strides[:2], *across, *within))


def _meeting(size: int, positions: int, kernel: int, stride: int, padding: int, dilation: int) -> list[int]:
    """The places of a kernel that meet the image at some position, along one axis; it may be far larger than that."""
    inside = range(padding, padding + size)
    return [one for one in range(kernel) if any(one * dilation + n * stride in inside for n in range(positions))]


def fold(windows: Tensor, geometry: Geometry) -> Tensor:
    """The transpose of ``windows_of``: float64 sums over all windows that hold an element, in a fixed order.

    Shapes: (batch, channels, *positions, *kernel) to (batch, channels, *size).
    """
    padded = [s + 2 * p + o for s, p, o in zip(geometry.size, geometry.padding, geometry.overhang, strict=True)]
    total = torch.zeros((*windows.shape[:2], *padded), dtype=torch.float64, device=windows.device)
    moves = list(zip(geometry.positions, geometry.stride, geometry.dilation, strict=True))
    axes = (geometry.size, geometry.positions, geometry.kernel, geometry.stride, geometry.padding, geometry.dilation)
    for offset in itertools.product(*map(_meeting, *axes)):
        place: list[slice | EllipsisType] = [...]
        term: list[int | EllipsisType] = [..., *offset]
        place += [slice(o * d, o * d + (n - 1) * t + 1, t) for o, (n, t, d) in zip(offset, moves, strict=True)]
        total[tuple(place)].add_(windows[tuple(term)])
    inner: list[slice | EllipsisType] = [...]
    inner += [slice(p, p + s) for p, s in zip(geometry.padding, geometry.size, strict=True)]
    return total[tuple(inner)]
