"""Products of several shards at once, of which ``vmap`` would compute a gradient by other steps than those of a shard.

``torch.matmul`` makes one product of all samples where the smaller factor has a gradient, which ``vmap`` hides from it.
``torch.addmm`` and its kin multiply a gradient by ``alpha`` after the product, and the parts of it before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from samebits.numerics.exact.of_shards import linear
from samebits.numerics.exact.together import physical

if TYPE_CHECKING:
    from collections.abc import Callable

Number = float | int
Function = torch.autograd.Function


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """``torch.matmul``, by the rows of the larger factor if the smaller one has a gradient."""
    larger, smaller = (a, b.mT if b.dim() > 1 else b) if a.dim() >= b.dim() else (b.mT, a)
    if larger.dim() < 3 or smaller.dim() > 2 or not physical(smaller).requires_grad:
        return torch.matmul(a, b)
    y = linear(larger, smaller if smaller.dim() > 1 else smaller.unsqueeze(0))
    if smaller.dim() == 1:
        return y.squeeze(-1)
    return y if a.dim() >= b.dim() else y.mT


class _Scaled(Function):
    """``x`` times a factor, and its gradient times another one."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, factor: Number, of_gradient: Number) -> Tensor:  # noqa: ARG004
        return x.clone() if factor == 1 else x.mul(factor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Number, Number], output: Tensor) -> None:  # noqa: ARG004
        ctx.of_gradient = inputs[2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (grad if ctx.of_gradient == 1 else grad.mul(ctx.of_gradient)), None, None


class _Outer(Function):
    """The outer product of two vectors; its gradients are products of matrices and vectors."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return x.unsqueeze(1).mul(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG004
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return grad.mv(y), grad.t().mv(x)


def _added(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """``beta * c + alpha * product(a, b)``."""

    def version(
        input: Tensor,  # noqa: A002 - PyTorch's name
        *factors: Tensor,
        beta: Number = 1,
        alpha: Number = 1,
        **named: Tensor,
    ) -> Tensor:
        a, b = (*factors, *(named[name] for name in sorted(named)))  # as mat1 and mat2, or mat and vec
        if not a.is_floating_point():
            return product(a, b).mul(int(alpha)).add(input.mul(int(beta)))
        y = product(_Scaled.apply(a, 1, alpha), _Scaled.apply(b, 1, alpha)) if alpha != 1 else product(a, b)  # type: ignore[no-untyped-call]
        y = _Scaled.apply(y, alpha, 1) if alpha != 1 else y  # type: ignore[no-untyped-call]
        return y.add(input.expand(y.shape).mul(beta) if beta != 1 else input) if beta else y

    return version


_ADDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "addmm": torch.mm,
    "baddbmm": torch.bmm,
    "addmv": torch.mv,
    "addbmm": lambda a, b: torch.bmm(a, b).sum(0),
    "addr": _Outer.apply,
}
FORMS: dict[Any, Callable[..., Tensor]] = {
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), _matmul),
    Tensor.__rmatmul__: lambda b, a: _matmul(a, b),
    **{getattr(owner, name): _added(product) for name, product in _ADDED.items() for owner in (torch, Tensor)},
}
