"""Recordings of passes on a CPU: their operations and kernels, run again in the same order on the same memory.

What is recorded lies below every mode and every ``vmap``, so a replay has neither autograd's part of a pass nor the
kit's own; of a small model's step that is the most.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from samebits.errors import first_line
from samebits.numerics.dispatch import EagerDispatchMode, storage_of, tensors_in
from samebits.numerics.exact.compiled import library
from samebits.numerics.exact.compiled.library import Kernels, Library
from samebits.numerics.exact.engine import (
    COLLECTIVES,
    NO_ARITHMETIC,
    UNWRITTEN,
    below,
    places_written,
    require_subnormal_numbers,
)
from samebits.numerics.exact.recorders import StoppedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from samebits.numerics.exact.compiled.library import Argument
    from samebits.numerics.exact.recorders import Made

aten = torch.ops.aten
_MOST = 2**28  # bytes of all numbers that both passes make, since none of their memory is used twice
_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_OTHER_VIEWS = {aten.as_strided_, aten.detach_, aten.squeeze_, aten.swapaxes_, aten.swapdims_, aten.t_, aten.transpose_,
                aten.unsqueeze_}  # fmt: skip
"""In place, and of the same memory."""
_ZEROS = {aten.new_zeros, aten.zeros, aten.zeros_like}
_OPTIONS = frozenset({"dtype", "layout", "device", "pin_memory"})  # which a tensor to write into has itself


class Traces:
    """See ``recorders.Recorder``."""

    def __init__(self) -> None:
        self._room = _MOST

    def record(self, run: Callable[[], Made]) -> tuple[Made, Callable[[], object]]:
        """See ``Recorder``."""
        trace = _Trace(self._room)
        with trace.watching():
            made = run()
        self._room = trace.room
        return made, trace.replay


class _Trace(EagerDispatchMode):
    """Notes operations and calls of kernels, and keeps their memory."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self._steps: list[Callable[[], object]] = []
        self._held: dict[int, Tensor] = {}
        self._made: set[int] = set()
        self.structures: list[Argument] = []
        """Of kernels, which read them again."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context whose operations and kernels are recorded."""
        inner = library.chosen()
        watched = _Watched(inner, self) if isinstance(inner, Library) else None
        with self, below.watched_by(self), library.using(watched):
            yield

    def replay(self) -> None:
        """Give everything that was made the values of another run."""
        require_subnormal_numbers()
        try:
            with below(), torch.no_grad():
                for step in self._steps:
                    step()
        except Exception as error:  # as for an index out of range
            raise StoppedError(first_line(str(error))) from error

    def then(self, step: Callable[[], object]) -> None:
        """Note a step."""
        self._steps.append(step)

    def hold(self, tensor: Tensor) -> None:
        """Keep a tensor's memory for the replays."""
        self._held.setdefault(storage_of(tensor), tensor.detach())

    def _hold_new(self, tensor: Tensor) -> None:
        self.hold(tensor)
        self._made.add(storage_of(tensor))
        self.room -= tensor.untyped_storage().nbytes()
        if self.room < 0:
            raise RuntimeError(f"a recording takes more than {_MOST >> 20} MiB")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace in NO_ARITHMETIC or func.overloadpacket in _OTHER_VIEWS:
            return func(*args, **kwargs)
        if func.namespace in COLLECTIVES or _depends_on_numbers(func, args):
            name = ".item()" if func.overloadpacket is aten._local_scalar_dense else func.name()
            raise RuntimeError(f"what {name} does depends on the numbers of a step")
        with self:  # an operation that is made of others is recorded as these
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        result = func(*args, **kwargs)
        given, made = tensors_in((args, kwargs)), tensors_in(result)
        for x in given:
            self.hold(x)
        known = set(map(storage_of, given))
        new = [x for x in made if storage_of(x) not in known]
        for x in new:
            self._hold_new(x)
        written = tensors_in([kwargs.get(one) if isinstance(one, str) else args[one] for one in places_written(func)])
        if not self._made.issuperset(map(storage_of, written)):
            raise RuntimeError(f"{func.name()} writes to memory from before the pass")
        if (written and new) or result is None:
            raise RuntimeError(f"{func.name()} does more than to return a result")
        if written:
            self.then(partial(func, *_detached(args), **_detached(kwargs)))
        elif new and func.overloadpacket not in UNWRITTEN:
            self.then(_again(func, _detached(args), _detached(kwargs), _detached(made)))
        return result


def _depends_on_numbers(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation reads numbers on the host, or the shape of its result or its memory follows from them."""
    if func.overloadpacket is aten.index:  # by masks
        return any(one.dtype in (torch.bool, torch.uint8) for one in tensors_in(args[1]))
    moves = torch.Tag.inplace_view in func.tags
    return moves or not _READS.isdisjoint(func.tags) or func.overloadpacket is aten._pack_padded_sequence


def _detached(value: Any) -> Any:
    return tree_map_only(Tensor, Tensor.detach, value)


def _again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Tensor]) -> Callable[[], object]:
    """An operation that writes its results into tensors that it made before."""
    if func.overloadpacket is aten._to_copy:
        return partial(made[0].copy_, args[0])
    if func.overloadpacket in _ZEROS:
        return made[0].zero_
    into = _into(func)
    if into is not None and len(into.names) == len(made):
        kwargs = {name: value for name, value in kwargs.items() if name not in into.left_out}
        return partial(into.func, *args, **kwargs, **dict(zip(into.names, made, strict=True)))

    def again() -> None:
        for to, x in zip(made, tensors_in(func(*args, **kwargs)), strict=True):
            to.copy_(x)

    return again


class _Into(NamedTuple):
    """The overload of an operation that writes into given tensors, their names, and the arguments that it lacks."""

    func: Any
    names: list[str]
    left_out: frozenset[str]


@cache
def _into(func: Any) -> _Into | None:
    wanted = [(one.name, str(one.type)) for one in func._schema.arguments]
    needed = [one for one in wanted if one[0] not in _OPTIONS]
    for name in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, name)
        rest = [(one.name, str(one.type)) for one in other._schema.arguments if not one.is_out]
        if (outs := [one.name for one in other._schema.arguments if one.is_out]) and rest in (wanted, needed):
            return _Into(other, outs, frozenset() if rest == wanted else _OPTIONS)
    return None


class _Watched(Kernels):
    """A library whose calls are recorded."""

    def __init__(self, inner: Library, trace: _Trace) -> None:
        self._inner, self._trace = inner, trace

    def has(self, name: str, kept: int = 0) -> bool:
        """See ``Kernels.has``."""
        return self._inner.has(name, kept)

    def number(self, value: Tensor | float, like: Tensor) -> Argument:
        """See ``Kernels.number``: one that is read anew from its memory at each call."""
        if not isinstance(value, Tensor):
            return self._inner.number(value, like)
        self._trace.hold(value)
        return ctypes.c_double.from_address(value.data_ptr())

    def call(self, name: str, *arguments: Argument) -> None:
        """See ``Kernels.call``."""
        step = self._prepared(name, arguments)
        self._trace.then(step)
        step()

    def answer(self, name: str, *arguments: Argument) -> bool:
        """See ``Kernels.answer``."""
        step = self._prepared(name, arguments)
        expected = step()

        def again() -> None:
            if step() != expected:
                raise StoppedError(f"a kernel, {name}, answers otherwise than in its recording")

        self._trace.then(again)
        return bool(expected)

    def _prepared(self, name: str, arguments: tuple[Argument, ...]) -> Callable[[], int]:
        for one in arguments:
            if isinstance(one, Tensor):
                self._trace.hold(one)
        self._trace.structures += [one for one in arguments if isinstance(one, (ctypes.Structure, ctypes.Array))]
        return self._inner.prepared(name, *arguments)
