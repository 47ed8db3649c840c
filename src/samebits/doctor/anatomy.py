"""What a model keeps beside its parameters and buffers, what its forward writes, where it makes its tensors.

Only modules of the user's own classes are looked into: PyTorch's are known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from samebits.errors import place_of

if TYPE_CHECKING:
    from collections.abc import Iterator

_INTERNAL = frozenset(vars(nn.Module()))
_DEPTH = 3  # of lists in lists; one may hold itself


def _own(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if not type(module).__module__.startswith("torch."):
            yield f"{name}." if name else "", module


def _leaves(path: str, value: object, depth: int = 0) -> Iterator[tuple[str, object]]:
    """A value, or what the list or the mapping holds that it is."""
    if isinstance(value, dict) and depth < _DEPTH:
        for key, item in value.items():
            yield from _leaves(f"{path}[{key!r}]", item, depth + 1)
    elif isinstance(value, list | tuple) and depth < _DEPTH:
        for index, item in enumerate(value):
            yield from _leaves(f"{path}[{index}]", item, depth + 1)
    else:
        yield path, value


def _attributes(model: nn.Module) -> Iterator[tuple[str, object]]:
    """Everything that the user's modules hold outside ``nn.Module``'s own tables, by its path."""
    for prefix, module in _own(model):
        for name, value in vars(module).items():
            if name not in _INTERNAL:
                yield from _leaves(prefix + name, value)


def unregistered(model: nn.Module) -> tuple[list[str], list[str]]:
    """Paths of tensors and of modules that ``.to(device)``, ``state_dict()`` and replicas do not see."""
    known = {id(item) for item in (*model.parameters(), *model.buffers(), *model.modules())}
    loose = [(path, value) for path, value in _attributes(model) if id(value) not in known]
    return (
        [path for path, value in loose if isinstance(value, Tensor)],
        [path for path, value in loose if isinstance(value, nn.Module)],
    )


def state(model: nn.Module) -> dict[str, object]:
    """What forward could write to, by its path, in a form that can be compared; running statistics aside."""
    found = {path: _value(value) for path, value in _attributes(model)}
    for prefix, module in _own(model):
        if not isinstance(module, _NormBase):
            found |= {prefix + name: _value(buffer) for name, buffer in module.named_buffers(recurse=False)}
    return found


def _value(value: object) -> object:
    if isinstance(value, Tensor) and value.layout is torch.strided:
        return str(value.dtype), tuple(value.shape), _bytes(value)
    return repr(value) if isinstance(value, int | float | complex | str | bytes | None) else id(value)


def _bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())


def written(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """Attributes that differ between two states, each once."""
    paths = [path for path in before | after if before.get(path) != after.get(path)]
    return list(dict.fromkeys(path.partition("[")[0] for path in paths))


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
