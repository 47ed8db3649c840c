"""What must be caught above ATen, where a call still has its meaning, because devices take it apart in other ways."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


class OneForm(TorchFunctionMode):
    """Enter it around a forward pass: each of these functions is computed by the same operations on every device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _FORMS.get(func, func)(*args, **(kwargs or {}))


def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """``F.rms_norm``, which is a kernel with a gradient of its own on a GPU."""
    dims = tuple(range(-len(shape), 0))
    mean = x.pow(2).mean(dims, keepdim=True)
    scaled = x.mul(mean.add(torch.finfo(x.dtype).eps if eps is None else eps).rsqrt())
    return scaled if weight is None else scaled.mul(weight)


_FORMS: dict[Any, Callable[..., Any]] = {F.rms_norm: rms_norm, torch.rms_norm: rms_norm}
