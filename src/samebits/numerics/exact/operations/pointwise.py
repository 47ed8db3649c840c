"""Operations element by element: functions, arithmetic, activations and conversions."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from samebits.numerics.dispatch import storage_of
from samebits.numerics.exact import activations, elementary, gamma
from samebits.numerics.exact.compiled.library import compiled, threads
from samebits.numerics.exact.elementary import divisor
from samebits.numerics.exact.operations import complex_numbers
from samebits.numerics.exact.operations.registry import EXACT, NotExactError, elementwise, exact

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from samebits.numerics.exact.compiled.library import Kernels

aten = torch.ops.aten
Number = float | int | bool


def _floated(x: Tensor) -> Tensor:
    """Integers in the default floating-point type, other numbers unchanged."""
    return x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())


def _enter(packet: Any, function: Callable[[Tensor], Tensor]) -> None:
    EXACT[packet] = lambda x: elementwise(function, _floated(x))


for _function in elementary.FUNCTIONS:
    _enter(getattr(aten, _function.__name__), _function)
_enter(aten.sqrt, elementary.root_of_float)  # faster, for float32 numbers alone
_enter(aten.log2, lambda x: elementary.log(x).div_(divisor(x, elementary.LN2)))
_enter(aten.log10, lambda x: elementary.log(x).div_(divisor(x, elementary.LN10)))
_enter(aten.exp2, lambda x: elementary.exp(x.mul(elementary.LN2)))
_enter(aten.tan, lambda x: elementary.sin(x).div_(elementary.cos(x)))
_enter(aten.lgamma, gamma.lgamma)
_enter(aten.digamma, gamma.digamma)
_enter(aten.silu, activations.silu)
_enter(aten.log_sigmoid, activations.log_sigmoid)


def _are_complex(*values: object) -> bool:
    """Whether complex numbers are among the values. Raises NotExactError: a tensor's type has no exact arithmetic."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            if value.dtype not in (torch.float32, torch.float64):
                raise NotExactError(f"{value.dtype} is rounded in other ways on other devices; use float32")
        elif isinstance(value, complex) or (isinstance(value, torch.Tensor) and value.is_complex()):
            return complex_numbers.is_complex(*values)
    return False


def _check_types(*values: object) -> None:
    if _are_complex(*values):
        raise NotExactError("complex numbers have no exact version")


def _of_reals(packet: Any, function: Callable[..., Tensor], of_complex: Callable[..., Tensor]) -> None:
    """Enter an operation that is correctly rounded in one step for real numbers, but not for complex ones."""

    def version(*values: Tensor | Number) -> Tensor:
        return (of_complex if _are_complex(*values) else function)(*values)

    EXACT[packet] = version


_of_reals(aten.mul, torch.mul, complex_numbers.mul)
_of_reals(aten.abs, torch.abs, complex_numbers.absolute)
_of_reals(aten.sgn, torch.sgn, complex_numbers.sgn)


def _of_scaled(packet: Any, function: Callable[..., Tensor]) -> None:
    """Enter ``x + alpha * y`` or ``x - alpha * y``, with the product rounded first."""

    def version(x: Tensor, y: Tensor | Number, *, alpha: Number = 1) -> Tensor:
        multiply = complex_numbers.mul if _are_complex(x, y, alpha) else torch.mul
        return function(x, y if alpha == 1 else multiply(y, alpha))

    EXACT[packet] = version


_of_scaled(aten.add, torch.add)
_of_scaled(aten.sub, torch.sub)


@exact(aten.div)
def div(x: Tensor, y: Tensor | Number, *, rounding_mode: str | None = None) -> Tensor:
    """``x / y`` by a true division, also where ``y`` is a number."""
    if rounding_mode is None and _are_complex(x, y):
        return complex_numbers.div(x, y)
    if rounding_mode is not None:
        _check_types(x, y)
        if torch.result_type(x, y).is_floating_point:
            return _whole_quotient(*_pair(x, y), floor=rounding_mode == "floor").to(torch.float32)
        return torch.div(x, y, rounding_mode=rounding_mode)
    if isinstance(y, torch.Tensor):
        return torch.div(x, y.to(x.device) if y.dim() == 0 else y)
    return torch.div(_floated(x), divisor(_floated(x), y))


def _pair(x: Tensor | Number, y: Tensor | Number) -> tuple[Tensor, Tensor]:
    """Both as float64 tensors of one shape. Raises NotExactError: their common type is not float32."""
    common = torch.result_type(x, y)
    if common != torch.float32:
        raise NotExactError(f"{common} has no exact version; use float32")
    wide_x, wide_y = broadcast(x, y, common)
    return wide_x.contiguous(), wide_y.contiguous()


def broadcast(x: Tensor | Number, y: Tensor | Number, common: torch.dtype) -> tuple[Tensor, Tensor]:
    """Both in their ``common`` type and then in float64, in one shape."""
    device = max((t for t in (x, y) if isinstance(t, torch.Tensor)), key=torch.Tensor.dim).device
    tensors = (torch.as_tensor(t, dtype=common, device=device).to(torch.float64) for t in (x, y))
    wide: tuple[Tensor, Tensor] = torch.broadcast_tensors(*tensors)  # type: ignore[no-untyped-call]
    return wide


def _of_pair(packet: Any, function: Callable[[Tensor, Tensor], Tensor], *, whole: bool = True) -> None:
    """Enter a function of two float32 numbers that is computed in float64 and rounded once.

    Of integers the kernel's own result is one too if it is ``whole``; else they count as floating-point numbers.
    """

    def version(x: Tensor | Number, y: Tensor | Number) -> Tensor:
        common = torch.result_type(x, y)
        if common.is_floating_point or common.is_complex:
            return function(*_pair(x, y)).to(torch.float32)
        if whole:
            result: Tensor = packet(x, y)
            return result
        x, y = (_floated(t) if isinstance(t, torch.Tensor) else t for t in (x, y))
        return function(*_pair(x, y)).to(torch.float32)

    EXACT[packet] = version


def _remainder(x: Tensor, y: Tensor) -> Tensor:
    """What is left of ``x``, with the sign of ``y``; ``fmod`` is exact in itself (IEEE 754)."""
    left = torch.fmod(x, y)
    return torch.where((left != 0) & (left.signbit() != y.signbit()), left.add(y), left)


def _whole_quotient(x: Tensor, y: Tensor, *, floor: bool) -> Tensor:
    """``x / y`` rounded to an integer, downwards or towards zero."""
    left = _remainder(x, y) if floor else torch.fmod(x, y)
    return torch.where(y == 0, x.div(y), x.sub(left).div_(y).round_())


_of_pair(aten.fmod, torch.fmod)
_of_pair(aten.remainder, _remainder)
_of_pair(aten.floor_divide, partial(_whole_quotient, floor=True))
_of_pair(aten.atan2, elementary.atan2, whole=False)


_of_pair(aten.hypot, elementary.hypot, whole=False)


def _shrink_backward(grad: Tensor, x: Tensor, lambd: Number) -> Tensor:
    """The gradient outside of -``lambd`` to ``lambd``, within which the function is zero."""
    return torch.where(x.abs() <= lambd, torch.zeros((), dtype=grad.dtype, device=grad.device), grad)


EXACT[aten.hardshrink_backward] = EXACT[aten.softshrink_backward] = _shrink_backward


@exact(aten.arange)
def arange(start: Number, end: Number | None = None, step: Number = 1, **options: Any) -> Tensor:
    """``start + step * i``, counted in float64 and then rounded: kernels differ in the type in which they count."""
    start, end = (0, start) if end is None else (start, end)
    native = torch.arange(start, end, step, **options)
    if not native.is_floating_point():
        return native
    return torch.arange(native.numel(), device=native.device).to(torch.float64).mul_(step).add_(start).to(native.dtype)


@exact(aten.reciprocal)
def reciprocal(x: Tensor) -> Tensor:
    """``1 / x`` by a true division."""
    _check_types(x)
    return torch.div(torch.ones_like(_floated(x)), x)


@exact(aten.pow)
def pow_(x: Tensor | Number, y: Tensor | Number) -> Tensor:
    """``x**y``: whole exponents up to 64 by multiplication, a half by the root, others by exp and log.

    Raises:
        NotExactError: the exponents are a tensor, and the result is not float32.
    """
    common = torch.result_type(x, y)
    if not common.is_floating_point and not common.is_complex:
        return torch.pow(x, y)  # type: ignore[arg-type]
    if isinstance(y, torch.Tensor):
        return _power_of_tensors(x, y)
    assert isinstance(x, torch.Tensor)
    x = x.to(common)
    if abs(y) <= 64 and y == int(y):
        return elementwise(lambda v: elementary.whole_power(v, int(y)), x)
    if y == 0.5:
        return elementwise(elementary.root_of_float, x)
    if y == -0.5:
        return elementwise(elementary.rsqrt, x)
    return elementwise(lambda v: elementary.power(v, torch.full_like(v, y)), x)


def _power_of_tensors(x: Tensor | Number, y: Tensor) -> Tensor:
    return elementary.power(*_pair(x, y)).to(torch.float32)


@exact(aten.gelu)
def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """``x`` times the normal distribution function, or its form with tanh (Hendrycks and Gimpel 2016), rounded once."""
    return elementwise(activations.gelu if approximate == "none" else activations.gelu_tanh, x)


@exact(aten.gelu_backward)
def gelu_backward(grad: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    """``grad`` times the slope of ``gelu``, which is rounded to float32 first."""
    return grad.mul(elementwise(activations.gelu_slope if approximate == "none" else activations.gelu_tanh_slope, x))


@exact(aten.silu_backward)
def silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """``grad * (s + x * s * (1 - s))`` with s the sigmoid; the slope is rounded to float32 first."""
    return grad.mul(elementwise(activations.silu_slope, x))


@exact(aten.softplus)
def softplus(x: Tensor, beta: Number = 1, threshold: Number = 20) -> Tensor:
    """log(1 + e**(beta * x)) / beta, rounded once; x itself where beta * x is above ``threshold``."""

    def function(v: Tensor) -> Tensor:
        scaled = v.mul(beta)
        soft = elementary.log1p(elementary.exp(scaled.abs().neg_())).add_(scaled.clamp(min=0.0))
        return torch.where(scaled > threshold, v, soft.div_(divisor(soft, beta)))

    return elementwise(function, x)


@exact(aten.softplus_backward)
def softplus_backward(grad: Tensor, x: Tensor, beta: Number, threshold: Number) -> Tensor:
    """``grad`` times the sigmoid of beta * x, which is rounded to float32 first."""
    slope = elementwise(lambda v: torch.where(v.mul(beta) > threshold, 1.0, elementary.sigmoid(v.mul(beta))), x)
    return grad.mul(slope)


def positive_zero(x: Tensor) -> Tensor:
    """``x`` with positive zeros, where a kernel may have chosen either sign; in place, integers unchanged."""
    return x.add_(0.0) if x.is_floating_point() else x


def _compiled_relu(library: Kernels, x: Tensor) -> Tensor | None:
    if not library.takes(x):
        return None
    out = torch.empty_like(x)
    library.call("relu", x, out, x.numel(), threads())
    return out


@exact(aten.relu)
@compiled(_compiled_relu)
def relu(x: Tensor) -> Tensor:
    """``x`` where it is above zero or NaN, else positive zero."""
    return torch.where(x <= 0, torch.zeros((), dtype=x.dtype, device=x.device), x)


def enter_extreme(packet: Any) -> None:
    """Enter an operation that chooses between numbers, and may choose either of two zeros."""
    EXACT[packet] = lambda *args, **kwargs: positive_zero(packet(*args, **kwargs))


for _packet in (aten.maximum, aten.minimum, aten.clamp):
    enter_extreme(_packet)


@exact(aten.leaky_relu)
def leaky_relu(x: Tensor, negative_slope: Number = 0.01) -> Tensor:
    """``x`` where it is above zero, else ``x`` times the slope, rounded once."""
    _check_types(x)
    return torch.where(x > 0, x, x.mul(negative_slope))


def _of_joined(packet: Any, join: Callable[..., Tensor]) -> None:
    """Enter ``x + value * (y * z)`` or ``x + value * (y / z)``, each step rounded."""

    def version(x: Tensor, y: Tensor, z: Tensor, *, value: Number = 1) -> Tensor:
        _check_types(x, y, z)
        joined = join(y, z)
        return x.add(joined if value == 1 else joined.mul_(value))

    EXACT[packet] = version


_of_joined(aten.addcmul, torch.mul)
_of_joined(aten.addcdiv, torch.div)


@exact(aten.lerp)
def lerp(x: Tensor, y: Tensor, weight: Tensor | Number) -> Tensor:
    """``x + weight * (y - x)``, from the nearer end as in PyTorch, each step rounded."""
    _check_types(x, y, weight)
    from_x = x.add(y.sub(x).mul(weight))
    from_y = y.sub(y.sub(x).mul(1 - weight))
    return torch.where(abs(torch.as_tensor(weight, device=x.device)) < 0.5, from_x, from_y)


@exact(aten._to_copy)
def to_copy(
    x: Tensor | Number,
    *,
    dtype: torch.dtype | None = None,
    non_blocking: bool = False,  # noqa: ARG001
    **options: Any,
) -> Tensor:
    """``x`` in another type, on another device or in another layout.

    The copy blocks: a read before its end would give old values.
    """
    if not isinstance(x, torch.Tensor):  # as ``torch.func.vmap`` gives a number that meets a tensor
        return torch.tensor(x, dtype=dtype)
    converted: Tensor = aten._to_copy(to_fit(x, dtype or x.dtype), dtype=dtype or x.dtype, **options)
    return converted


@exact(aten.copy, aten.copy_)
def copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:  # noqa: ARG001
    """``source`` in the type and shape of ``x``; its values from before the copy if the two share memory."""
    return (
        to_fit(source.clone() if storage_of(source) == storage_of(x) else source, x.dtype).to(x.dtype).expand(x.shape)
    )


def to_fit(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` within the range of an integer type, NaN as zero: devices convert other values differently."""
    if not x.is_floating_point() or dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return x
    limits = torch.iinfo(dtype)
    most = float(limits.max) if limits.bits < 64 else 2.0**63 - 1024
    return x.to(torch.float64).nan_to_num(0.0).clamp(float(limits.min), most)
