"""The whole batch at once, for models that treat each sample by itself: only gradients of parameters join samples.

Every other operation depends on one sample alone, so its result does not depend on how a batch is split (``grid``,
``operations``). The gradient of a parameter is a sum over samples. Its terms are rounded to a window (``windows``) that
is the same for every split.

The functions here replace PyTorch's own of the same name. A parameter is a float64 tensor that holds float32 numbers;
any other operation refuses it for its type.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from samebits.errors import RefusedError
from samebits.numerics.exact.compiled.library import compiled, gathered, threads
from samebits.numerics.exact.convolution import (
    Layout,
    convolved,
    gradient_of_images,
    gradient_of_kernels,
    samples_on_grids,
)
from samebits.numerics.exact.engine import below
from samebits.numerics.exact.grid import (
    FEWEST_BITS,
    bits_of_products,
    bits_of_sum,
    blocks,
    largest,
    shifter,
    top_of_magnitude,
)
from samebits.numerics.exact.products import product_of_rows
from samebits.numerics.exact.unfolding import Geometry
from samebits.numerics.exact.windows import GRADIENTS_AT, INPUTS_OF

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from samebits.numerics.exact.compiled.library import Kernels
    from samebits.numerics.exact.windows import Windows

Function = torch.autograd.Function


@dataclass(frozen=True, kw_only=True)
class Scope:
    """A forward pass: its windows, the samples of a global batch and of this device, and the rounded weights."""

    windows: Windows
    global_batch: int
    samples: int
    rounded: WeightCache

    def terms(self, x: Tensor) -> int:
        """Number of terms of a sum over the rows of ``x`` in a global batch.

        The first axis of ``x`` must be that of the samples; otherwise terms would be summed before they are rounded.
        """
        assert x.shape[0] == self.samples, "a parameter met something that is not a batch"
        rows = x.numel() // x.shape[-1] // self.samples if x.dim() > 1 else 1
        return self.global_batch * rows


class WeightCache:
    """Weights rounded to their grid, kept until they change; both passes and all micro-batches share them."""

    def __init__(self) -> None:
        self._entries: dict[str, _Rounded] = {}

    def rounded(self, place: str, weight: Tensor, bits: int) -> Tensor:
        """A weight (outputs, inputs, ...) on one grid, as float64."""
        if not weight.is_leaf:  # the copy of a replica lives for one step
            return on_grid(weight, bits)
        entry = self._entries.get(place)
        if entry is None or entry.weight is not weight:
            entry = self._entries[place] = _Rounded(weight, bits)
        if entry.is_stale:
            with gathered(weight):  # all others that an optimizer has changed too
                for one in self._entries.values():
                    one.renew()
        assert entry.values is not None
        return entry.values


class _Rounded:
    """A weight of a model and its rounded values, once there are some."""

    def __init__(self, weight: Tensor, bits: int) -> None:
        self.weight, self._bits = weight, bits
        self._version = -1
        self.values: Tensor | None = None

    @property
    def is_stale(self) -> bool:
        """Whether the weight has changed since it was rounded."""
        return self._version != self.weight._version

    def renew(self) -> None:
        """Round the weight again if it has changed."""
        if self.is_stale:
            self.values, self._version = None, self.weight._version
            self.values = on_grid(self.weight.detach(), self._bits)


def _compiled_on_grid(library: Kernels, weight: Tensor, bits: int) -> Tensor | None:
    if not library.takes(weight, dtype=torch.float64):
        return None
    out = torch.empty_like(weight)
    library.call("snap_all", weight, out, weight.numel(), bits, threads())
    return out


@compiled(_compiled_on_grid)
def on_grid(weight: Tensor, bits: int) -> Tensor:
    """A float64 weight, rounded to one grid."""
    shift = shifter(top_of_magnitude(largest(weight)).reshape(1), bits)
    out = torch.empty_like(weight, dtype=torch.float64)
    for part in blocks(weight.shape[0], weight[0].numel(), weight.device):
        torch.add(weight[part], shift, out=out[part]).sub_(shift)
    return out


def _checked(bits: int, why: str, place: str) -> int:
    if bits < FEWEST_BITS:
        raise RefusedError(why, hint="make samples or layers smaller", at=f"model.{place}")
    return bits


def _bits_of_gradient(terms: int, place: str) -> int:
    """Bits of both factors of so many products, whose sum is a gradient."""
    bits = bits_of_products(terms)
    if bits < FEWEST_BITS:
        hint = "lower train.global_batch_size, or the length or size of a sample"
        why = f"its gradient has {terms} terms, expected at most 2**21"
        raise RefusedError(why, hint=hint, at=f"model.{place}")
    return bits


class _Linear(Function):
    """``F.linear``; the gradients of its parameters are sums in a window."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, scope: Scope, place: str) -> Tensor:
        most = max(weight.shape)
        bits = _checked(bits_of_products(most), f"it has {most:,} inputs or outputs, expected at most 2**21", place)
        with below():
            rounded = scope.rounded.rounded(place, weight, bits)
            rows = x.reshape(-1, x.shape[-1])
            y = product_of_rows(rows, bits, rounded.T, bias)
            ctx.save_for_backward(x, rounded)
            ctx.scope, ctx.place, ctx.bits = scope, place, bits
            return y.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, rounded = ctx.saved_tensors
        scope, place = ctx.scope, ctx.place
        with below():
            rows = grad.reshape(-1, grad.shape[-1])
            grad_x = None
            if ctx.needs_input_grad[0]:
                grad_x = product_of_rows(rows, ctx.bits, rounded).view(x.shape)
            bits = _bits_of_gradient(scope.terms(x), place)
            places = f"{GRADIENTS_AT} {place}", f"{INPUTS_OF} {place}"
            grad_weight, grad_bias = scope.windows.products(places, rows, x.reshape(-1, x.shape[-1]), bits)
            return grad_x, grad_weight, grad_bias if ctx.needs_input_grad[2] else None, None, None


class _Spread(Function):
    """A parameter as float32, broadcast over samples; its gradient is a sum in a window."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, shape: torch.Size, scope: Scope, place: str) -> Tensor:
        ctx.shape, ctx.scope, ctx.place = parameter.shape, scope, place
        with below():
            return parameter.to(torch.float32).expand(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scope = ctx.scope
        with below():
            assert grad.shape[0] == scope.samples, "a parameter met something that is not a batch"
            lead = grad.dim() - len(ctx.shape)
            dims = [d for d in range(grad.dim()) if d < lead or (ctx.shape[d - lead] == 1 and grad.shape[d] > 1)]
            terms = scope.global_batch * math.prod(grad.shape[d] for d in dims[1:])
            values = scope.windows.round(f"{GRADIENTS_AT} {ctx.place}", grad, bits_of_sum(terms))
            if values is None:
                return grad.new_zeros(ctx.shape, dtype=torch.float64), None, None, None
            return values.sum(dims).reshape(ctx.shape), None, None, None


class _Lookup(Function):
    """Rows of an embedding as float32; the gradient of its weight is a sum in a window."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, index: Tensor, scope: Scope, place: str) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows, ctx.scope, ctx.place = weight.shape[0], scope, place
        with below():
            rows = weight.index_select(0, index.reshape(-1)).to(torch.float32)
            return rows.view(*index.shape, weight.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        with below():
            terms = ctx.scope.terms(grad)
            rows = grad.reshape(-1, grad.shape[-1])
            values = ctx.scope.windows.round(f"{GRADIENTS_AT} {ctx.place}", rows, bits_of_sum(terms))
            total = torch.zeros((ctx.rows, grad.shape[-1]), dtype=torch.float64, device=grad.device)
            if values is not None:
                total.index_add_(0, index.reshape(-1), values)
            return total, None, None, None


class _Convolution(Function):
    """``F.conv2d``; the gradients of its parameters are sums in a window."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layout: Layout, scope: Scope, place: str
    ) -> Tensor:
        with below():
            bits = _checked(bits_of_products(layout.terms(weight)), "its kernels join more than 2**21 numbers", place)
            rounded = scope.rounded.rounded(place, weight, bits)
            y = convolved(samples_on_grids(x, layout.groups, bits), rounded, layout)
            if bias is not None:
                y.add_(bias.view(-1, 1, 1))
            ctx.save_for_backward(x, rounded)
            ctx.layout, ctx.scope, ctx.place, ctx.bits = layout, scope, place, bits
            return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, rounded = ctx.saved_tensors
        layout, windows, place = ctx.layout, ctx.scope.windows, ctx.place
        with below():
            grad_x = None
            if ctx.needs_input_grad[0]:
                grad_x = gradient_of_images(
                    samples_on_grids(grad, layout.groups, ctx.bits), x.shape, rounded, layout
                ).to(x.dtype)
            bits = _bits_of_gradient(ctx.scope.global_batch * math.prod(grad.shape[2:]), place)
            inputs = windows.round(f"{INPUTS_OF} {place}", x, bits)
            grads = windows.round(f"{GRADIENTS_AT} {place}", grad, bits)
            if inputs is None or grads is None:
                grad_weight, grad_bias = torch.zeros_like(rounded), rounded.new_zeros(rounded.shape[0])
            else:
                grad_weight = gradient_of_kernels(grads, inputs, rounded.shape, layout)
                grad_bias = grads.sum((0, 2, 3))
            return grad_x, grad_weight, grad_bias if ctx.needs_input_grad[2] else None, None, None, None


class WholeBatch(TorchFunctionMode):
    """Mode for a forward pass; ``place_of`` returns the place of a parameter."""

    def __init__(self, scope: Scope, place_of: Callable[[Tensor], str]) -> None:
        super().__init__()
        self._scope, self._place_of = scope, place_of

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        version = _VERSIONS.get(func)
        if version is None:
            return func(*args, **(kwargs or {}))
        return version(self, *args, **(kwargs or {}))

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``F.linear`` of a batch and two parameters."""
        return _Linear.apply(x, weight, bias, self._scope, self._place_of(weight))  # type: ignore[no-any-return,no-untyped-call]

    def spread(self, parameter: Tensor, shape: Sequence[int], axes: int) -> Tensor:
        """A parameter with ``axes`` more axes of size 1 at its end, broadcast to the shape of a batch."""
        wide = parameter.view(*parameter.shape, *(1,) * axes) if axes else parameter
        return _Spread.apply(wide, shape, self._scope, self._place_of(parameter))  # type: ignore[no-any-return,no-untyped-call]

    def affine(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, axes: int = 0) -> Tensor:
        """``x * weight + bias``, where ``x`` has ``axes`` more axes behind those of the parameters."""
        if weight is not None:
            x = x * self.spread(weight, x.shape, axes)
        return x if bias is None else x + self.spread(bias, x.shape, axes)

    def embedding(self, index: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
        """``F.embedding``, whose options no built-in model uses."""
        return _Lookup.apply(weight, index, self._scope, self._place_of(weight))  # type: ignore[no-any-return,no-untyped-call]

    def layer_norm(
        self,
        x: Tensor,
        shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        """``F.layer_norm`` followed by its affine map, in which the parameters meet the samples."""
        return self.affine(F.layer_norm(x, shape, None, None, eps), weight, bias)

    def group_norm(
        self, x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
    ) -> Tensor:
        """``F.group_norm`` followed by its affine map, in which the parameters meet the samples."""
        return self.affine(F.group_norm(x, groups, None, None, eps), weight, bias, axes=x.dim() - 2)

    def conv2d(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> Tensor:
        """``F.conv2d`` of a batch and two parameters."""
        geometry = Geometry.of(x.shape[2:], kernel=weight.shape[2:], stride=stride, padding=padding, dilation=dilation)
        layout = Layout(geometry.stride, geometry.padding, geometry.dilation, False, (0, 0), groups)
        place = self._place_of(weight)
        return _Convolution.apply(x, weight, bias, layout, self._scope, place)  # type: ignore[no-any-return,no-untyped-call]


_VERSIONS: dict[Any, Callable[..., Any]] = {
    F.linear: WholeBatch.linear,
    F.embedding: WholeBatch.embedding,
    F.layer_norm: WholeBatch.layer_norm,
    F.group_norm: WholeBatch.group_norm,
    F.conv2d: WholeBatch.conv2d,
}
