"""Where a model's forward makes its tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from samebits.errors import place_of

if TYPE_CHECKING:
    from torch import nn


class _MixedDevices(Exception):  # noqa: N818 - it never leaves this module
    """An operation got tensors of two devices."""


_ATEN = torch.ops.aten
_TAKES_BOTH = frozenset(
    {_ATEN._to_copy, _ATEN.copy_, _ATEN.index, _ATEN.index_put, _ATEN.index_put_, _ATEN._index_put_impl_,
     _ATEN._pack_padded_sequence}
)  # fmt: skip


class _OneDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations on tensors of two devices as CUDA does, which lets single numbers and indices pass."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket not in _TAKES_BOTH:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            if any(t.is_meta for t in tensors) and any(not t.is_meta and t.dim() for t in tensors):
                raise _MixedDevices(func.name())
        return func(*args, **(kwargs or {}))


def mixes_devices(model: nn.Module, inputs: Tensor) -> str | None:
    """The line where a forward pass on a GPU would meet a tensor of the CPU, told without a GPU.

    The model is moved to the meta device, which has no values, and loses its weights. None if nothing was found, also
    where forward cannot be followed because it looks at values.
    """
    try:
        with torch.no_grad(), _OneDevice():  # type: ignore[no-untyped-call]
            model.to("meta")(inputs.to("meta"))
    except _MixedDevices as error:
        return place_of(error) or f"an operation {error}"
    except Exception:  # noqa: BLE001 - forward did run on the CPU, so this is the meta device's own limit
        return None
    return None
