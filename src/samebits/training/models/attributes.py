"""Finds what a model holds beside its parameters and buffers, and what its forward writes.

Only modules of the user's own classes are searched: PyTorch's are known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

if TYPE_CHECKING:
    from collections.abc import Iterator

_INTERNAL = frozenset(vars(nn.Module()))
_DEPTH = 3  # of nested lists; a list may contain itself


def _user_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if not type(module).__module__.startswith("torch."):
            yield f"{name}." if name else "", module


def _leaves(path: str, value: object, depth: int = 0) -> Iterator[tuple[str, object]]:
    """The value itself, or the values in it if it is a list, tuple or mapping; each with its path."""
    if isinstance(value, dict) and depth < _DEPTH:
        for key, item in value.items():
            yield from _leaves(f"{path}[{key!r}]", item, depth + 1)
    elif isinstance(value, list | tuple) and depth < _DEPTH:
        for index, item in enumerate(value):
            yield from _leaves(f"{path}[{index}]", item, depth + 1)
    else:
        yield path, value


def _attributes(model: nn.Module) -> Iterator[tuple[str, object]]:
    """All attributes of the user's modules but the tables of ``nn.Module``, each with its path."""
    for prefix, module in _user_modules(model):
        for name, value in vars(module).items():
            if name not in _INTERNAL:
                yield from _leaves(prefix + name, value)


def unregistered(model: nn.Module) -> tuple[list[str], list[str]]:
    """Paths of tensors and of modules that ``.to(device)``, ``state_dict()`` and replicas miss."""
    known = {id(item) for item in (*model.parameters(), *model.buffers(), *model.modules())}
    loose = [(path, value) for path, value in _attributes(model) if id(value) not in known]
    return (
        [path for path, value in loose if isinstance(value, Tensor)],
        [path for path, value in loose if isinstance(value, nn.Module)],
    )


def state(model: nn.Module) -> dict[str, object]:
    """Everything that forward could write, except running statistics, by path and in comparable form."""
    values = {path: _value(value) for path, value in _attributes(model)}
    for prefix, module in _user_modules(model):
        if not isinstance(module, _NormBase):
            values |= {prefix + name: _value(buffer) for name, buffer in module.named_buffers(recurse=False)}
    return values


def _value(value: object) -> object:
    if isinstance(value, Tensor) and value.layout is torch.strided:
        data = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return str(value.dtype), tuple(value.shape), data
    return repr(value) if isinstance(value, int | float | complex | str | bytes | None) else id(value)


def written(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """Paths of attributes that differ between two states, each once."""
    paths = [path for path in before | after if before.get(path) != after.get(path)]
    return list(dict.fromkeys(path.partition("[")[0] for path in paths))
