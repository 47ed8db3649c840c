"""State that a model could keep from one forward pass to the next, and whether a pass has changed any of it.

A result may depend on nothing but parameters, samples and draws. So all other state that the model's own code can reach
and write to is compared after each pass: attributes of all modules, buffers, hooks, generators of random numbers,
closures, default arguments, attributes of classes, globals of the user's own files, and the contents of all these.
``docs/concepts/exact.md`` lists the state that cannot be seen.
"""

from __future__ import annotations

import functools
import itertools
import mmap
import random
import sys
import threading
import types
from array import array
from collections import deque
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.weight_norm import WeightNorm

from samebits.errors import is_own
from samebits.numerics.exact.engine import written_in_forward
from samebits.numerics.exact.switches import switches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MAPPINGS = (dict, types.MappingProxyType)
_PLAIN = (int, float, complex, str, bytes, bool, type(None), range, slice, torch.dtype, torch.device)
_OPAQUE = {"torch", "samebits", "numpy", "logging", "threading", "_thread", "re", "enum", "typing", "abc"}
_DEPTH = 12
_MOST = 50_000  # things that are compared
_MOST_BYTES = 2**26  # size of all tensors and arrays that are compared by their bytes


class _Thing(NamedTuple):
    """Something that can be written to: its name, how to look at it, and what it was at first.

    A container (``holder``) is first compared with its ``copy``, which is quick; ``look`` decides if they differ.
    """

    name: str
    look: Callable[[], object]
    before: object
    holder: object = None
    copy: object = None


class Kept:
    """A snapshot of the state that a model could keep.

    Raises:
        RefusedError: the model holds an iterator, whose place nobody can see.
    """

    def __init__(self, model: nn.Module) -> None:
        self._things: list[_Thing] = []
        self._empty: list[tuple[str, Any]] = []  # most containers of modules are empty
        self._seen: dict[int, object] = {}  # by id, which is theirs while this dict holds them
        self._classes: set[type] = set()
        self._between: list[int] = []  # the things that change between steps: running statistics
        self._bytes = 0
        self._parameters = {id(parameter) for parameter in model.parameters()}
        self._add("Python's random numbers", _python_state)
        self._add("NumPy's random numbers", _numpy_state)
        self._drawn = len(self._things)  # before which things are what a pass draws from
        self._add("a switch of PyTorch's", switches)
        for path, module in model.named_modules():
            if id(module) in self._seen:
                continue
            self._module(f"model.{path}" if path else "model", module)

    def renew(self) -> None:
        """Look anew at running statistics, which have changed between two passes."""
        for index in self._between:
            thing = self._things[index]
            self._things[index] = thing._replace(before=thing.look())

    def changes(self, *, drawn: bool = True) -> Iterator[str]:
        """The names of all state that has changed since the snapshot; on demand without random numbers ``drawn``."""
        for name, holder in self._empty:
            if len(holder):
                yield from _more(name, holder, {})
        for name, look, before, holder, copy in itertools.islice(self._things, 0 if drawn else self._drawn, None):
            if holder is not None and _equal(holder, copy):
                continue
            now = look()
            if now is not before and not _same(now, before):
                yield from _more(name, now, before)

    def _add(self, name: str, look: Callable[[], object], holder: Any = None) -> None:
        if holder is not None and len(holder) == 0:
            self._empty.append((name, holder))
        elif len(self._things) < _MOST:
            copy = None if holder is None else _items(holder) if isinstance(holder, _MAPPINGS) else holder.copy()
            self._things.append(_Thing(name, look, look(), holder, copy))

    def _module(self, path: str, module: nn.Module) -> None:
        self._seen[id(module)] = module
        attributes, made = vars(module), made_anew(module)
        for name, value in attributes.items():
            if name in made:
                continue
            if name == "_parameters":
                self._add(path, lambda: (*module._parameters,), module._parameters)
            elif name == "_buffers" and isinstance(module, _NormBase):
                first = len(self._things)
                self._walk(path, value, 0)
                self._between += range(first, len(self._things))
            else:
                place = path if name in {"_buffers", "_modules"} else f"{path}.{name}"
                self._walk(place, value, 0)
        self._add(
            path, lambda: {name: value for name, value in _items(attributes).items() if name not in made}, attributes
        )
        self._add(f"the class of {path}", lambda: (type(module),))
        self._class(type(module))

    def _walk(self, name: str, value: object, depth: int) -> None:
        """Add a value and its contents, as far as they can be written to."""
        if isinstance(value, _PLAIN) or id(value) in self._seen or depth > _DEPTH or id(value) in self._parameters:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self._tensor(name, value)
        elif isinstance(value, dict):
            self._add(name, lambda: _items(value), value)
            for key, item in _items(value).items():
                self._walk(f"{name}.{key}" if isinstance(key, str) else f"{name}[{key!r}]", item, depth + 1)
        elif isinstance(value, list | tuple | set | frozenset | deque):
            if not isinstance(value, tuple | frozenset):
                self._add(name, lambda: (*value,), value)
            for index, item in enumerate(list(value)):
                self._walk(f"{name}[{index}]", item, depth + 1)
        elif (look := _looking_at(value)) is not None:
            self._add(name, look)
        elif isinstance(value, np.ndarray):
            if value.dtype != object and self._has_room(value.nbytes):
                self._add(name, value.tobytes)
        elif isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            self._function(name, value, depth)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.ModuleType):
            if _is_own(value.__name__):
                self._globals(value.__name__)
        elif isinstance(value, nn.Module):
            self._module(name, value)
        elif hasattr(value, "__next__") and not hasattr(value, "read"):
            raise written_in_forward(f"{name}, an iterator")
        elif not _is_opaque(type(value).__module__):
            self._object(name, value, depth)

    def _tensor(self, name: str, tensor: Tensor) -> None:
        """Add a tensor's gradient, and its bytes where NumPy may share them; any other write is an operation."""
        if tensor.is_leaf:
            self._add(f"{name}.grad", lambda: (tensor.grad,))
            if tensor.grad is not None:
                self._walk(f"{name}.grad", tensor.grad, _DEPTH)
        if tensor.device.type == "cpu" and tensor.layout is torch.strided and self._has_room(tensor.nbytes):
            self._add(name, lambda: bits(tensor))

    def _has_room(self, count: int) -> bool:
        """Take room for so many bytes. What is too large leaves the room to others."""
        fits = self._bytes + count <= _MOST_BYTES
        self._bytes += count if fits else 0
        return fits

    def _function(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._walk(name, part, depth + 1)
            return
        function = getattr(value, "__func__", value)
        if isinstance(value, types.MethodType):
            self._walk(name, value.__self__, depth + 1)
        made = _is_made_from_text(function)
        if not made and _is_opaque(function.__module__):
            return
        own = made or _is_own(function.__module__)  # a library's may keep state, and may hold the user's objects
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            what = f"{variable} of {function.__qualname__}"
            if own:
                self._add(what, lambda cell=cell: (_content(cell),))  # type: ignore[misc]
            self._walk(what, _content(cell), depth + 1)
        if own:
            what = f"arguments or code of {function.__qualname__}"
            self._add(what, lambda: (function.__defaults__, function.__kwdefaults__, function.__code__))
        for part in (function.__defaults__, function.__kwdefaults__, function.__dict__) if own else ():
            self._walk(f"an argument of {function.__qualname__}", part, depth + 1)
        self._globals(function.__module__, function.__globals__ if made else None)

    def _class(self, kind: type) -> None:
        for one in kind.__mro__:
            if one in self._classes or not _is_own(one.__module__):
                continue
            self._classes.add(one)
            self._add(one.__qualname__, lambda one=one: _without_code(vars(one)), vars(one))  # type: ignore[misc]
            for name, value in list(vars(one).items()):
                self._walk(f"{one.__qualname__}.{name}", getattr(value, "__wrapped__", value), 1)
            self._globals(one.__module__)

    def _globals(self, module: str | None, names: dict[str, Any] | None = None) -> None:
        """Add the globals of one of the user's own files, or of a function made from text."""
        if names is None:
            names = vars(sys.modules[module]) if module and _is_own(module) else {}
        if names and id(names) not in self._seen:
            self._seen[id(names)] = names
            self._add(f"a global of {module}", lambda: _without_code(names), names)
            for name, value in list(names.items()):
                if not name.startswith("__"):
                    self._walk(f"{module}.{name}", value, 1)

    def _object(self, name: str, value: object, depth: int) -> None:
        if isinstance(held := getattr(value, "__dict__", None), dict):
            self._walk(name, held, depth)
        slots = [slot for one in type(value).__mro__ for slot in _slots(one)]
        if slots:
            self._add(name, lambda: {slot: getattr(value, slot, None) for slot in slots})
            for slot in slots:
                self._walk(f"{name}.{slot}", getattr(value, slot, None), depth + 1)
        if _is_own(type(value).__module__):
            self._class(type(value))


def _is_opaque(module: str | None) -> bool:
    """Whether objects defined in a module are not looked into."""
    return module is None or module.partition(".")[0] in _OPAQUE


def _is_made_from_text(function: types.FunctionType) -> bool:
    """Whether a function's globals belong to no module, as after ``exec`` in a dictionary."""
    return function.__module__ in {None, "builtins"}


def _slots(kind: type) -> list[str]:
    slots = kind.__dict__.get("__slots__", ())
    return [slots] if isinstance(slots, str) else [name for name in slots if not name.startswith("__")]


def _looking_at(value: object) -> Callable[[], object] | None:
    """How to read the state of a value that is no container: a random generator, a counter, a buffer."""
    match value:
        case random.Random():
            return value.getstate
        case np.random.Generator():
            return lambda: repr(value.bit_generator.state)
        case np.random.RandomState():
            return lambda: repr(value.get_state())
        case torch.Generator():
            return lambda: bits(value.get_state())
        case itertools.count():
            return lambda: repr(value)
        case bytearray() | mmap.mmap():
            return lambda: bytes(value)
        case threading.local():
            return lambda: dict(vars(value))
        case types.GeneratorType():
            return lambda: value.gi_frame and (value.gi_frame.f_lasti, dict(value.gi_frame.f_locals))
        case ContextVar():
            return lambda: (value.get(None),)
    return None


def made_anew(module: nn.Module) -> set[str]:
    """Attributes that ``torch.nn.utils.weight_norm`` computes from parameters before each call of a module."""
    return {hook.name for hook in module._forward_pre_hooks.values() if isinstance(hook, WeightNorm)}


def _items(mapping: types.MappingProxyType[str, Any] | dict[Any, Any]) -> dict[Any, Any]:
    """The stored items. A subclass of the user's may create what it returns anew each time."""
    return dict(dict.items(mapping)) if isinstance(mapping, dict) else dict(mapping)


def _without_code(names: types.MappingProxyType[str, Any] | dict[str, Any]) -> dict[str, Any]:
    """Names without functions, classes and modules, which may be created at their first use."""
    code = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
    return {name: value for name, value in names.items() if not isinstance(value, code) and name[:2] != "__"}


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return None


def bits(tensor: Tensor) -> bytes:
    """The bytes of a dense CPU tensor."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return data.tobytes()


def _equal(holder: object, copy: object) -> bool:
    """Whether two containers hold the same or equal objects; False if Python cannot tell."""
    try:
        return bool(holder == copy)
    except Exception:  # noqa: BLE001 - arrays and tensors have no single answer, and a class may raise anything
        return False


def _same(now: object, before: object) -> bool:
    """Whether two values are one object or equal and of a plain type; containers are compared item by item."""
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    if isinstance(now, dict):
        assert isinstance(before, dict)
        return now.keys() == before.keys() and all(_same(value, before[key]) for key, value in now.items())
    if isinstance(now, tuple | list):
        assert isinstance(before, tuple | list)
        return len(now) == len(before) and all(map(_same, now, before))
    if isinstance(now, bytes):  # whose text is long
        return now == before
    return isinstance(now, _PLAIN) and (now == before and repr(now) == repr(before))


def _more(name: str, now: object, before: object) -> list[str]:
    """The name, or for dictionaries the name of each key that differs."""
    if not (isinstance(now, dict) and isinstance(before, dict)):
        return [name]
    keys = [key for key in now | before if key not in now or key not in before or not _same(now[key], before[key])]
    return [f"{name}.{key}" for key in keys]


def _python_state() -> tuple[object, ...]:
    version, numbers, following = random.getstate()
    return version, array("Q", numbers).tobytes(), following


def _numpy_state() -> tuple[object, ...]:
    state: tuple[Any, ...] = np.random.get_state()  # type: ignore[assignment]  # noqa: NPY002
    return (*state[:1], state[1].tobytes(), *state[2:])


@functools.cache
def _is_own(module: str) -> bool:
    """Whether a module is the user's."""
    file: str | None = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and module.partition(".")[0] not in {"samebits", "__main__"} and is_own(Path(file))
