"""Random numbers drawn in forward: the modules that draw, and draws that follow the sample."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from samebits.numerics.dispatch import EagerDispatchMode, calling_module
from samebits.numerics.initialization import answer, bernoulli, generator_of, is_draw
from samebits.portable.random import Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from samebits.numerics.interface import MicroBatch

aten = torch.ops.aten
_RATES = {"dropout_p", "p"}  # rates of dropout; at 0 nothing is drawn


def draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation draws random numbers. Attention and dropout draw only at a rate above 0."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    named = {one.name: i for i, one in enumerate(func._schema.arguments)}
    values = {name: kwargs.get(name, args[i] if i < len(args) else None) for name, i in named.items()}
    rates = [values[name] for name in _RATES & values.keys()]
    if values.get("train") is False or values.get("training") is False:
        return False
    return ("attention" not in func.name() and "dropout" not in func.name()) or any(rates)


class SeenDraws(EagerDispatchMode):
    """Records which modules draw random numbers, each by its class and path."""

    def __init__(self) -> None:
        super().__init__()
        self.modules: dict[str, None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if draws(func, args, kwargs):
            module = calling_module()
            self.modules["the model" if module is None else f"{module.kind} in {module.path or 'the model'}"] = None
        return func(*args, **kwargs)


class SharedDraws(EagerDispatchMode):
    """Answers random operations with draws that depend on seed, step, number of the draw in the step, and sample.

    Every draw is made for a whole global batch of ``samples``, and a rank takes its own rows. A tensor whose first axis
    is not that of the samples is the same for all ranks. ``unshared`` names operations that have no such answer.
    """

    def __init__(self, seed: int, samples: int) -> None:
        super().__init__()
        self.unshared: set[str] = set()
        self._seed, self._samples = seed, samples
        self._batch: MicroBatch | None = None
        self._count = 0

    @contextmanager
    def of(self, batch: MicroBatch) -> Iterator[None]:
        """Context for the forward pass of a micro-batch."""
        self._batch, self._count = batch, 0
        with self:
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not draws(func, args, kwargs):
            return func(*args, **kwargs)
        self._count += 1
        if func.overloadpacket is aten.native_dropout:
            x, p, _ = args
            kept = self._filled(torch.empty_like(x), lambda stream, part: bernoulli(stream, part, 1.0 - p))
            return x * kept / (1.0 - p), kept.bool()
        if is_draw(func) and generator_of(kwargs) is None:
            return answer(func, args, kwargs, self._filled)
        self.unshared.add(func.name())
        return func(*args, **kwargs)

    def _filled(self, tensor: Tensor, fill: Callable[[Stream, Tensor], object]) -> Tensor:
        batch = self._batch
        assert batch is not None
        stream, rows = Stream(self._seed, "shared draws", batch.step, self._count), batch.rows
        if not tensor.dim() or tensor.shape[0] % rows:
            fill(stream, tensor)
            return tensor
        each = tensor.shape[0] // rows
        whole = torch.empty((self._samples * each, *tensor.shape[1:]), dtype=tensor.dtype)
        fill(stream, whole)
        return tensor.copy_(whole[batch.start * each : (batch.start + rows) * each])
