"""RMSNorm, row by row (Zhang and Sennrich 2019)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from samebits.numerics.exact import elementary
from samebits.numerics.exact.compiled.library import compiled, threads
from samebits.numerics.exact.engine import below
from samebits.numerics.exact.of_shards import UnderVmap, first
from samebits.numerics.exact.operations.normalization import affine
from samebits.numerics.exact.operations.reductions import divided
from samebits.numerics.exact.operations.registry import wide
from samebits.numerics.exact.sums import fixed_order_sum

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from samebits.numerics.exact.compiled.library import Kernels


def _by_kernel(library: Kernels, x: Tensor, eps: float, grad: Tensor | None = None) -> Tensor | None:
    width = x.shape[-1]
    name = "rms_norm" if grad is None else "rms_norm_backward"
    if not library.has(name, 2 * width) or not library.takes(x, grad):
        return None
    out = torch.empty_like(x)
    library.call(name, x, grad, out, x.numel() // width, width, float(eps), threads())
    return out


@compiled(_by_kernel)
def normed(x: Tensor, eps: float, grad: Tensor | None = None) -> Tensor:
    """Rows over their root mean square, rounded once; or with a gradient of these the gradient of the rows."""
    rows = wide(x)
    count = x.shape[-1]
    scale = elementary.rsqrt(divided(fixed_order_sum(rows.mul(rows), (-1,)), count).add_(eps))
    rows.mul_(scale)
    if grad is None:
        return rows.to(x.dtype)
    slopes = wide(grad)
    along = divided(fixed_order_sum(slopes.mul(rows), (-1,)), count)
    return slopes.sub_(rows.mul_(along)).mul_(scale).to(x.dtype)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.eps = eps
        with below():
            return normed(x, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        with below():
            return normed(x, ctx.eps, grad.contiguous()), None


def _norm(x: Tensor, eps: float) -> Tensor:
    y: Tensor = _Norm.apply(x, eps)  # type: ignore[no-untyped-call]
    return y


class _NormOfShards(UnderVmap):
    """``_Norm`` under ``torch.func.vmap``."""

    @staticmethod
    def forward(x: Tensor, eps: float) -> Tensor:
        return _norm(x, eps)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, eps: float) -> tuple[Tensor, int]:
        """The rows with the axis of shards in front."""
        return _norm(first(x, in_dims[0], info.batch_size), eps), 0


def _form(norm: Callable[[Tensor, float], Tensor]) -> Callable[..., Tensor]:
    def version(
        x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        shape = tuple(normalized_shape)
        if x.dtype != torch.float32 or not shape or x.shape[-len(shape) :] != shape:
            return F.rms_norm(x, shape, weight, eps)
        rows = x.reshape(*x.shape[: -len(shape)], math.prod(shape))
        y = norm(rows, torch.finfo(x.dtype).eps if eps is None else eps).view(x.shape)
        return affine(y, weight, None)

    version.__name__ = "rms_norm"
    return version


FORMS: dict[Any, Callable[..., Any]] = dict.fromkeys((F.rms_norm, torch.rms_norm), _form(_norm))
"""By PyTorch's function."""
OF_SHARDS: dict[Any, Callable[..., Any]] = dict.fromkeys(FORMS, _form(_NormOfShards.apply))
"""The same for several shards in one pass."""
