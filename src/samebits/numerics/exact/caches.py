"""What a model makes at its first forward pass and keeps as an attribute, such as a mask or a table of positions.

It may stay if passes over other samples, among them zeros, and with other parameters make the same: then so does every
rank, however the shards are shared out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from samebits.errors import RefusedError
from samebits.numerics.exact.engine import written_in_forward

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from samebits.numerics.exact.kept import Kept

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.Size, torch.dtype, torch.device)
_CONTAINERS = (dict, list, set)
_OF_MODULES = frozenset(vars(nn.Module()))  # parameters, buffers, modules and hooks, in dictionaries of their own
_MISSING = object()


class _Made(NamedTuple):
    """An attribute that a pass has made: where it is kept, and its value, or what a container there now holds."""

    holder: dict[str, Any]
    key: str
    value: Any
    container: Any = None

    def take_back(self, before: Any) -> None:
        """Restore what was there ``before``."""
        if self.container is not None:
            self.container.clear()
        elif before is _MISSING:
            del self.holder[self.key]
        else:
            self.holder[self.key] = before

    def put(self) -> None:
        """Keep it after all."""
        if self.container is None:
            self.holder[self.key] = self.value
        else:
            (self.container.extend if isinstance(self.container, list) else self.container.update)(self.value)


class Attributes:
    """The attributes of a model's modules, as they are before a pass."""

    def __init__(self, model: nn.Module) -> None:
        self._before = [
            (f"model.{path}." if path else "model.", vars(module), self._of(vars(module)), self._empty(vars(module)))
            for path, module in model.named_modules()
        ]

    @staticmethod
    def _of(holder: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in holder.items() if key not in _OF_MODULES}

    @staticmethod
    def _empty(holder: dict[str, Any]) -> set[str]:
        return {key for key, value in holder.items() if type(value) in _CONTAINERS and not value}

    def taken_back(self) -> dict[str, _Made]:
        """What a pass has made, by name; the attributes are again as they were."""
        found = {}
        for path, holder, before, empty in self._before:
            for key, value in self._of(holder).items():
                old = before.get(key, _MISSING)
                if value is old and key in empty and value:
                    made = _Made(holder, key, value.copy(), value)
                elif value is not old:
                    made = _Made(holder, key, value)
                else:
                    continue
                made.take_back(old)
                found[path + key] = made
        return found


def settle(attributes: Attributes, kept: Kept, passes: Sequence[Callable[[], object]]) -> None:
    """Let a model keep what its first pass has made, before which ``attributes`` and ``kept`` were looked at.

    ``passes`` are over other samples and with other parameters.

    Raises:
        RefusedError: it depends on them, or the pass has written to something else.
    """

    def taken() -> dict[str, _Made]:
        found = attributes.taken_back()
        for name in kept.changes():
            raise written_in_forward(name)
        return found

    made = [taken()]
    for run in passes:
        try:
            run()
        except RefusedError:
            raise
        except Exception:  # noqa: BLE001 - a model may take no such samples
            raise written_in_forward(next(iter(made[0]))) from None
        made.append(taken())
    for name in _unlike(made):
        raise written_in_forward(name)
    for one in made[0].values():
        one.put()


def _unlike(made: Sequence[dict[str, _Made]]) -> Iterator[str]:
    """The names of what some passes make otherwise, or not at all."""
    for name in dict.fromkeys(name for one in made for name in one):
        if not all(name in one and _alike(one[name].value, made[0][name].value) for one in made):
            yield name


def _alike(value: Any, other: Any) -> bool:
    """Whether two values have the same bits, as far as that can be told, and no gradient."""
    if type(value) is not type(other):
        return False
    if isinstance(value, Tensor):
        if value.requires_grad or (value.dtype, value.shape, value.device) != (other.dtype, other.shape, other.device):
            return False
        return torch.equal(_bits(value), _bits(other))
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(_alike(one, other[key]) for key, one in value.items())
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(_alike, value, other))
    return isinstance(value, _PLAIN) and repr(value) == repr(other)


def _bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(-1).view(torch.uint8)
