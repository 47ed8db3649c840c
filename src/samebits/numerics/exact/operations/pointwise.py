"""Elementwise operations."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from samebits.numerics.exact import elementary
from samebits.numerics.exact.elementary import divisor
from samebits.numerics.exact.operations.registry import EXACT, NotExactError, elementwise, exact

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

aten = torch.ops.aten
Number = float | int | bool


def _floated(x: Tensor) -> Tensor:
    """Integers as the default floating type."""
    return x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())


def _enter(packet: Any, function: Callable[[Tensor], Tensor]) -> None:
    EXACT[packet] = lambda x: elementwise(function, _floated(x))


for _name in ("exp", "expm1", "log", "log1p", "sigmoid", "tanh", "erf", "sin", "cos", "rsqrt"):
    _enter(getattr(aten, _name), getattr(elementary, _name))
_enter(aten.sqrt, elementary.root_of_float)
_enter(aten.log2, lambda x: elementary.log(x).div_(divisor(x, elementary.LN2)))
_enter(aten.log10, lambda x: elementary.log(x).div_(divisor(x, elementary.LN10)))
_enter(aten.exp2, lambda x: elementary.exp(x.mul(elementary.LN2)))
_enter(aten.tan, lambda x: elementary.sin(x).div_(elementary.cos(x)))
_enter(aten.silu, lambda x: elementary.sigmoid(x).mul_(x))
_enter(aten.log_sigmoid, lambda x: elementary.log1p(elementary.exp(x.abs().neg_())).neg_().add_(x.clamp(max=0.0)))


def _floating(*values: object) -> bool:
    return any(isinstance(v, torch.Tensor) and v.is_floating_point() for v in values)


def _check_types(*values: object) -> None:
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            if value.dtype not in (torch.float32, torch.float64):
                raise NotExactError(f"{value.dtype} is rounded in other ways on other devices; use float32")
        elif isinstance(value, torch.Tensor) and value.is_complex():
            raise NotExactError("complex numbers have no exact version")


@exact(aten.add)
def add(x: Tensor, y: Tensor | Number, *, alpha: Number = 1) -> Tensor:
    """The product with ``alpha`` is rounded before the sum."""
    _check_types(x, y)
    return torch.add(x, y if alpha == 1 else torch.mul(y, alpha))


@exact(aten.sub)
def sub(x: Tensor, y: Tensor | Number, *, alpha: Number = 1) -> Tensor:
    """The product with ``alpha`` is rounded before the difference."""
    _check_types(x, y)
    return torch.sub(x, y if alpha == 1 else torch.mul(y, alpha))


@exact(aten.rsub)
def rsub(x: Tensor, y: Tensor | Number, alpha: Number = 1) -> Tensor:
    """Give y - alpha * x."""
    _check_types(x, y)
    x = x.to(torch.result_type(x, y))
    x = x if alpha == 1 else torch.mul(x, alpha)
    return torch.sub(y, x) if isinstance(y, torch.Tensor) else torch.add(torch.neg(x), y)


@exact(aten.mul)
def mul(x: Tensor, y: Tensor | Number) -> Tensor:
    """One rounding."""
    _check_types(x, y)
    return torch.mul(x, y)


@exact(aten.div)
def div(x: Tensor, y: Tensor | Number, *, rounding_mode: str | None = None) -> Tensor:
    """A true division, also by a number."""
    _check_types(x, y)
    if rounding_mode is not None:
        if _floating(x, y) or isinstance(y, float):
            raise NotExactError("division with a rounding mode is exact for integers alone")
        return torch.div(x, y, rounding_mode=rounding_mode)
    if isinstance(y, torch.Tensor):
        return torch.div(x, y.to(x.device) if y.dim() == 0 else y)
    return torch.div(_floated(x), divisor(_floated(x), y))


@exact(aten.abs)
def abs_(x: Tensor) -> Tensor:
    """Only the sign is changed; that of a complex number would be a root."""
    _check_types(x)
    return torch.abs(x)


@exact(aten.sgn)
def sgn(x: Tensor) -> Tensor:
    """As ``abs_``."""
    _check_types(x)
    return torch.sgn(x)


@exact(aten.arange)
def arange(start: Number, end: Number | None = None, step: Number = 1, **options: Any) -> Tensor:
    """In float64, then rounded: kernels differ in the type in which they count."""
    start, end = (0, start) if end is None else (start, end)
    found = torch.arange(start, end, step, **options)
    if not found.is_floating_point():
        return found
    return torch.arange(found.numel(), device=found.device).to(torch.float64).mul_(step).add_(start).to(found.dtype)


@exact(aten.reciprocal)
def reciprocal(x: Tensor) -> Tensor:
    """A true division."""
    _check_types(x)
    return torch.div(torch.ones_like(_floated(x)), x)


@exact(aten.pow)
def pow_(x: Tensor | Number, y: Tensor | Number) -> Tensor:
    """Whole exponents up to 64 by multiplication, a half by the root, others by exp and log."""
    common = torch.result_type(x, y)
    if not common.is_floating_point and not common.is_complex:
        return torch.pow(x, y)  # type: ignore[arg-type]
    if isinstance(y, torch.Tensor):
        return _power_of_tensors(x, y)
    assert isinstance(x, torch.Tensor)
    x = x.to(common)
    if abs(y) <= 64 and y == int(y):
        if y >= 0:
            return elementwise(lambda v: elementary.integer_power(v, int(y)), x)
        return elementwise(lambda v: torch.ones_like(v).div_(elementary.integer_power(v, -int(y))), x)
    if y == 0.5:
        return elementwise(elementary.root_of_float, x)
    if y == -0.5:
        return elementwise(elementary.rsqrt, x)
    return elementwise(lambda v: elementary.power(v, torch.full_like(v, y)), x)


def _power_of_tensors(x: Tensor | Number, y: Tensor) -> Tensor:
    common = torch.result_type(x, y)
    if common != torch.float32:
        raise NotExactError(f"{common} has no exact version; use float32")
    base = x if isinstance(x, torch.Tensor) else torch.full((), float(x), dtype=common, device=y.device)
    shape = torch.broadcast_shapes(base.shape, y.shape)  # type: ignore[no-untyped-call]
    wide_base, wide_exponent = (t.to(common).to(torch.float64).expand(shape).contiguous() for t in (base, y))
    return elementary.power(wide_base, wide_exponent).to(torch.float32)


@exact(aten.gelu)
def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """Both forms."""
    return elementwise(elementary.gelu if approximate == "none" else _gelu_tanh, x)


_GELU_SCALE, _GELU_CUBE = math.sqrt(2.0 / math.pi), 0.044715


def _gelu_inner(x: Tensor) -> Tensor:
    return x.mul(x).mul_(x).mul_(_GELU_CUBE).add_(x).mul_(_GELU_SCALE)


def _gelu_tanh(x: Tensor) -> Tensor:
    return elementary.tanh(_gelu_inner(x)).add_(1.0).mul_(x).mul_(0.5)


def _gelu_tanh_slope(x: Tensor) -> Tensor:
    t = elementary.tanh(_gelu_inner(x))
    inner_slope = x.mul(x).mul_(3.0 * _GELU_CUBE).add_(1.0).mul_(_GELU_SCALE)
    return t.mul(t).neg_().add_(1.0).mul_(inner_slope).mul_(x).add_(t).add_(1.0).mul_(0.5)


@exact(aten.gelu_backward)
def gelu_backward(grad: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    """The slope is rounded to float32, then multiplied."""
    return grad.mul(elementwise(elementary.gelu_slope if approximate == "none" else _gelu_tanh_slope, x))


@exact(aten.silu_backward)
def silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Slope s + x * s * (1 - s), with s the sigmoid."""

    def slope(v: Tensor) -> Tensor:
        s = elementary.sigmoid(v)
        return s.neg().add_(1.0).mul_(s).mul_(v).add_(s)

    return grad.mul(elementwise(slope, x))


@exact(aten.sigmoid_backward)
def sigmoid_backward(grad: Tensor, y: Tensor) -> Tensor:
    """Grad * (1 - y) * y, each rounded."""
    return y.neg().add_(1.0).mul_(y).mul_(grad)


@exact(aten.tanh_backward)
def tanh_backward(grad: Tensor, y: Tensor) -> Tensor:
    """Grad * (1 - y * y), each rounded."""
    return y.mul(y).neg_().add_(1.0).mul_(grad)


@exact(aten.softplus)
def softplus(x: Tensor, beta: Number = 1, threshold: Number = 20) -> Tensor:
    """log(1 + e**(beta * x)) / beta."""

    def of(v: Tensor) -> Tensor:
        scaled = v.mul(beta)
        soft = elementary.log1p(elementary.exp(scaled.abs().neg_())).add_(scaled.clamp(min=0.0))
        return torch.where(scaled > threshold, v, soft.div_(divisor(soft, beta)))

    return elementwise(of, x)


@exact(aten.softplus_backward)
def softplus_backward(grad: Tensor, x: Tensor, beta: Number, threshold: Number) -> Tensor:
    """The slope is the sigmoid of beta * x."""
    slope = elementwise(lambda v: torch.where(v.mul(beta) > threshold, 1.0, elementary.sigmoid(v.mul(beta))), x)
    return grad.mul(slope)


def _positive_zero(x: Tensor) -> Tensor:
    """Give zeros one sign, where a kernel may have chosen either."""
    return x.add_(0.0) if x.is_floating_point() else x


@exact(aten.relu)
def relu(x: Tensor) -> Tensor:
    """Zero for what is not above it."""
    return torch.where(x <= 0, torch.zeros((), dtype=x.dtype, device=x.device), x)


@exact(aten.maximum)
def maximum(x: Tensor, y: Tensor) -> Tensor:
    """NaN wins."""
    return _positive_zero(torch.maximum(x, y))


@exact(aten.minimum)
def minimum(x: Tensor, y: Tensor) -> Tensor:
    """NaN wins."""
    return _positive_zero(torch.minimum(x, y))


@exact(aten.clamp)
def clamp(x: Tensor, min: Any = None, max: Any = None) -> Tensor:  # noqa: A002 - as PyTorch calls them
    """Limits as numbers or tensors."""
    return _positive_zero(torch.clamp(x, min, max))


@exact(aten.clamp_min)
def clamp_min(x: Tensor, min: Any) -> Tensor:  # noqa: A002
    """One limit."""
    return _positive_zero(torch.clamp(x, min=min))


@exact(aten.clamp_max)
def clamp_max(x: Tensor, max: Any) -> Tensor:  # noqa: A002
    """One limit."""
    return _positive_zero(torch.clamp(x, max=max))


@exact(aten.hardtanh)
def hardtanh(x: Tensor, min_val: Number = -1, max_val: Number = 1) -> Tensor:
    """Two limits, of the type of ``x``."""
    kind = float if x.is_floating_point() else int
    return clamp(x, kind(min_val), kind(max_val))


@exact(aten.hardtanh_backward)
def hardtanh_backward(grad: Tensor, x: Tensor, min_val: Number, max_val: Number) -> Tensor:
    """Zero outside the limits."""
    return torch.where((x <= min_val) | (x >= max_val), 0.0, grad)


@exact(aten.leaky_relu)
def leaky_relu(x: Tensor, negative_slope: Number = 0.01) -> Tensor:
    """One product."""
    _check_types(x)
    return torch.where(x > 0, x, x.mul(negative_slope))


@exact(aten.leaky_relu_backward)
def leaky_relu_backward(grad: Tensor, x: Tensor, negative_slope: Number, self_is_result: bool) -> Tensor:  # noqa: ARG001
    """One product."""
    return torch.where(x > 0, grad, grad.mul(negative_slope))


@exact(aten.addcmul)
def addcmul(x: Tensor, y: Tensor, z: Tensor, *, value: Number = 1) -> Tensor:
    """Products first, each rounded."""
    _check_types(x, y, z)
    product = y.mul(z)
    return x.add(product if value == 1 else product.mul_(value))


@exact(aten.addcdiv)
def addcdiv(x: Tensor, y: Tensor, z: Tensor, *, value: Number = 1) -> Tensor:
    """The quotient first, rounded."""
    _check_types(x, y, z)
    quotient = y.div(z)
    return x.add(quotient if value == 1 else quotient.mul_(value))


@exact(aten.lerp)
def lerp(x: Tensor, y: Tensor, weight: Tensor | Number) -> Tensor:
    """From the nearer end, as PyTorch does it: each step rounded."""
    _check_types(x, y, weight)
    from_x = x.add(y.sub(x).mul(weight))
    from_y = y.sub(y.sub(x).mul(1 - weight))
    return torch.where(abs(torch.as_tensor(weight, device=x.device)) < 0.5, from_x, from_y)


@exact(aten._to_copy)
def to_copy(x: Tensor, *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    """A conversion."""
    found: Tensor = aten._to_copy(to_fit(x, dtype or x.dtype), dtype=dtype or x.dtype, **options)
    return found


@exact(aten.copy, aten.copy_)
def copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:  # noqa: ARG001
    """What is written."""
    return to_fit(source, x.dtype).to(x.dtype).expand(x.shape)


def to_fit(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers that an integer type can hold: of others, and of NaN, devices make different integers."""
    if not x.is_floating_point() or dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return x
    limits = torch.iinfo(dtype)
    most = float(limits.max) if limits.bits < 64 else 2.0**63 - 1024
    return x.to(torch.float64).nan_to_num(0.0).clamp(float(limits.min), most)
