"""Functions that devices decompose in different ways, and that a pass asks nothing of: seen above ATen, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from samebits.numerics.exact.parameters import Entry
from samebits.numerics.exact.recurrent import Recurrence

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from samebits.numerics.exact.batch_norm import ShardNorms
    from samebits.numerics.exact.engine import Engine

_CHANGES_LEAVES = {Tensor.requires_grad_, Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
_TO_NUMPY = {Tensor.numpy, Tensor.__array__, Tensor.__dlpack__}
_GRADIENT = {Tensor.grad.__get__, Tensor.grad.__set__}  # type: ignore[union-attr]


class _Functions(TorchFunctionMode):
    """Sees PyTorch's functions before they become operations. Refusals go to the engine."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine

    def _refuse(self, why: str, hint: str) -> None:
        self._engine.refuse(self._engine.refusal(why, hint))


class OneForm(_Functions):
    """Mode for a forward pass that computes certain functions by the same operations on every device.

    ``norms`` computes those that join the samples of a batch.
    """

    def __init__(self, engine: Engine, norms: ShardNorms) -> None:
        super().__init__(engine)
        self._forms = {**_FORMS, **Recurrence(engine).forms()}
        self._forms |= {F.batch_norm: norms.batch_norm, F.instance_norm: norms.instance_norm}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.data_ptr:
            self._refuse("forward asks where a tensor lies in memory", "compare tensors with `is`")
        if func in _TO_NUMPY:
            self._refuse("forward hands a tensor to NumPy, whose arithmetic differs between hosts", "use PyTorch's")
        if func in _CHANGES_LEAVES and not args[0].is_leaf and isinstance(args[0].grad_fn, Entry._backward_cls):
            self._refuse("forward changes whether a parameter is trained (requires_grad)", "do so in the factory")
            return args[0]
        return self._forms.get(func, func)(*args, **(kwargs or {}))


class GradientsUnread(_Functions):
    """Mode for a backward pass that refuses access to ``.grad``, which is the sum of the shards done so far."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _GRADIENT:
            why = "a parameter's gradient (.grad) is asked for or set before the pass has ended"
            self._refuse(why, "compute with the gradient that backward is given")
        return func(*args, **(kwargs or {}))


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """``F.rms_norm``. On a GPU, PyTorch's is a kernel with a gradient of its own."""
    dims = tuple(range(-len(shape), 0))
    mean = x.pow(2).mean(dims, keepdim=True)
    scaled = x.mul(mean.add(torch.finfo(x.dtype).eps if eps is None else eps).rsqrt())
    return scaled if weight is None else scaled.mul(weight)


def _grid_sample(
    x: Tensor, grid: Tensor, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool | None = None
) -> Tensor:
    """``F.grid_sample`` by PyTorch's decomposition, whose gradient is that of look-ups, which add on grids."""
    sampler = decomposition_table[torch.ops.aten.grid_sampler_2d.default] if x.dim() == 4 else torch.grid_sampler_3d
    between, beyond = (
        ("bilinear", "nearest", "bicubic").index(mode),
        ("zeros", "border", "reflection").index(padding_mode),
    )
    return sampler(x, grid, between, beyond, bool(align_corners))


def _bilinear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.bilinear`` by products. On a GPU, PyTorch's is a sum in an order of its own."""
    z = torch.einsum("...i,oij,...j->...o", x, weight, y)
    return z if bias is None else z + bias


_FORMS: dict[Any, Callable[..., Any]] = {
    F.bilinear: _bilinear,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    F.grid_sample: _grid_sample,
}
