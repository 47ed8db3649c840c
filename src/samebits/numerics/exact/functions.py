"""A user's ``autograd.Function`` without a rule for ``vmap``: in one pass it is called for each shard as if alone."""

from __future__ import annotations

import functools
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from samebits.numerics.exact.forms import OneForm

Function = torch.autograd.Function


class _Running(threading.local):
    form: OneForm | None = None


_RUNNING = _Running()


@contextmanager
def taken_apart(form: OneForm) -> Iterator[None]:
    """Context of one pass in which such a function has its shards one by one, by the operations of ``form``."""
    replace_apply()
    before, _RUNNING.form = _RUNNING.form, form
    try:
        yield
    finally:
        _RUNNING.form = before


@functools.cache
def replace_apply() -> None:
    """Let ``Function.apply`` ask for the context, for the life of this process."""
    apply = Function.apply.__func__  # type: ignore[attr-defined]

    @functools.wraps(apply)
    def applied(cls: Any, *operands: Any, **named: Any) -> Any:
        in_one_pass = _RUNNING.form is not None and len(torch._C._functorch.get_interpreter_stack() or ()) == 1
        if not in_one_pass or cls is _Each or cls.generate_vmap_rule or cls.vmap is not Function.vmap:
            return apply(cls, *operands, **named)
        return apply(_Each, cls, *operands, **named)

    Function.apply = classmethod(applied)  # type: ignore[assignment, method-assign]


class _Each(Function):
    """``function.apply`` for each shard by itself."""

    @staticmethod
    def forward(function: Any, *operands: Any) -> Any:  # noqa: ARG004
        raise RuntimeError(f"{function.__name__} has no rule for vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """What PyTorch asks of a function under ``vmap``."""

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[Any], function: Any, *operands: Any) -> Any:
        form = _RUNNING.form
        assert form is not None
        parts = [_parts(x, dim, info.batch_size) for x, dim in zip(operands, in_dims[1:], strict=True)]
        tensors = [x for x in operands if isinstance(x, Tensor)]
        versions = [x._version for x in tensors]
        results = []
        with form.one_by_one() as shards:
            for _, part in zip(shards, zip(*parts, strict=True), strict=True):
                results.append(function.apply(*part))
        if versions != [x._version for x in tensors]:
            raise RuntimeError(f"vmap: {function.__name__} writes to what it is given")
        if not isinstance(results[0], tuple):
            joined, dim = _joined(function, results)
            return joined, dim
        pairs = [_joined(function, values) for values in zip(*results, strict=True)]
        return tuple(joined for joined, _ in pairs), tuple(dim for _, dim in pairs)


def _parts(x: Any, dim: Any, shards: int) -> Sequence[Any]:
    """What each shard has of an operand; ``unbind``'s gradient adds no zeros of others, which could change a sign."""
    if isinstance(x, Tensor) and dim is not None:
        return x.unbind(dim)
    if _holds_axes(dim):
        raise RuntimeError("vmap: tensors in a list or a dict are given to an autograd.Function")
    return [x] * shards


def _holds_axes(dim: Any) -> bool:
    """Whether some tensor of an operand has an axis of shards, by what ``vmap`` says of each."""
    if isinstance(dim, dict | list | tuple):
        return any(map(_holds_axes, dim.values() if isinstance(dim, dict) else dim))
    return dim is not None


def _joined(function: Any, values: Sequence[Any]) -> tuple[Any, int | None]:
    """The results of all shards as one, and the axis of the shards in it."""
    if isinstance(values[0], Tensor):
        return torch.stack(list(values)), 0
    if any(value != values[0] for value in values):
        raise RuntimeError(f"vmap: {function.__name__} returns other values for other shards")
    return values[0], None
