"""Normalisation over a batch under ``exact``: each shard by itself, with running statistics that change once a step.

A shard is normalised by its own samples, as a device of ``ddp`` is by its part of the batch. So a result depends on
that shard alone, and the model is the one that ``exact.shards`` devices would train. The running statistics get the
mean over the statistics of all shards, so they too are the same for every split.

PyTorch's kernels differ between devices. A batch's channels are normalised like groups of channels, by the exact
``native_group_norm``.
"""

from __future__ import annotations

import hashlib
import math
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from samebits.errors import RefusedError
from samebits.numerics.exact.global_norm import normalized
from samebits.numerics.exact.operations.normalization import affine
from samebits.numerics.exact.operations.reductions import divided
from samebits.numerics.exact.sums import fixed_order_sum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from samebits.numerics.exact.engine import Engine
    from samebits.numerics.exact.global_norm import JoinedBatch
    from samebits.numerics.exact.windows import Windows

    AllReduce = Callable[[Tensor], Tensor]

_COUNT = "num_batches_tracked"
_ABSENT = -(1 << 62)  # below the bits of every number, in a maximum over ranks
_UNLIKE = "the shards of a batch reach other BatchNorm layers, so there are no running statistics of all"
_ALIKE = "have all samples normalised by the same layers, or set train.numerics: [fast]"
_GLOBAL = "set exact.batch_norm to shard, or train.numerics to [fast]"
_FEW = "make shards larger by a lower exact.shards or a larger train.global_batch_size, or set train.numerics: [fast]"


class Call(NamedTuple):
    """One normalisation of a shard: the buffers that follow it, how fast, and what they follow, (2, channels)."""

    mean: str
    variance: str
    counter: str | None
    momentum: float
    found: Tensor


_Form = tuple[tuple[str, int], ...]  # the buffers of each call of a shard, and how many numbers they hold


class RunningStatistics:
    """The statistics of all ``shards`` of a step, until it is settled. All ranks have the same calls for each shard."""

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._calls: dict[int, list[Call]] = {}
        self._form: _Form | None = None
        self.changes = 0
        """How often the model's buffers may have changed."""

    def clear(self) -> None:
        """Forget the statistics of a step that is run again, or after the model was given another state."""
        self._calls = {}
        self.changes += 1

    def start(self, shard: int) -> list[Call]:
        """The list to which a pass over a shard adds its calls."""
        calls = self._calls[shard] = []
        return calls

    def note(self, shards: Sequence[int], calls: Sequence[Call], found: Sequence[Tensor]) -> None:
        """Add the calls of a pass over several shards; ``found`` has a row for each shard."""
        for index, shard in enumerate(shards):
            self._calls[shard] = [call._replace(found=rows[index]) for call, rows in zip(calls, found, strict=True)]

    def taken(self) -> dict[int, list[Call]]:
        """The calls of passes so far, which count for this step no longer."""
        calls, self._calls = self._calls, {}
        return calls

    def give(self, calls: Mapping[int, list[Call]]) -> None:
        """Let calls of passes count for this step."""
        self._calls.update(calls)

    def check(self, windows: Windows, device: torch.device) -> None:
        """Have a step refused, on all ranks, in which a shard was normalised in other places than before."""
        known = {_form(calls) for calls in self._calls.values()}
        if self._form is not None:
            known.add(self._form)
        if len(known) > 1:
            windows.defer(RefusedError(_UNLIKE, hint=_ALIKE), torch.ones((), dtype=torch.bool, device=device))

    def settle(self, model: nn.Module, largest_of_all: AllReduce, device: torch.device) -> None:
        """Give the model's buffers the mean of all shards. Every rank calls it. Raises RefusedError: see ``check``."""
        calls = self.taken()
        if self._form == ():
            return
        buffers = dict(model.named_buffers())
        if not buffers:
            return
        one = next(iter(calls.values()))
        if self._form is None:
            self._form = _form(one)
            told = hashlib.blake2b(repr(self._form).encode(), digest_size=7).digest()
            number = int.from_bytes(told, "big")
            most, least = largest_of_all(torch.tensor([number, -number], device=device)).tolist()
            if most != -least:
                raise RefusedError(_UNLIKE, hint=_ALIKE)
            if not one:
                return
        width = sum(call.found.numel() for call in one)
        self.changes += 1
        bits = torch.full((self._shards, width), _ABSENT, dtype=torch.int64, device=device)
        for shard, found in calls.items():
            bits[shard] = torch.cat([call.found.flatten().to(device) for call in found]).view(torch.int32)
        known = largest_of_all(bits).to(torch.int32).view(torch.float32).to(torch.float64)
        means = divided(fixed_order_sum(known, (0,)), self._shards).view(-1)
        for call in one:
            now, means = means[: call.found.numel()].view(2, -1), means[call.found.numel() :]
            for name, value in zip((call.mean, call.variance), now, strict=True):
                old = buffers[name]
                old.copy_(old.to(torch.float64).mul_(1.0 - call.momentum).add_(value.to(old.device) * call.momentum))
            if call.counter is not None:
                buffers[call.counter].add_(1)


def _form(calls: Sequence[Call]) -> _Form:
    return tuple((call.mean, call.found.numel()) for call in calls)


class ShardNorms:
    """Normalisation in a pass over one shard of ``model``; what buffers shall follow is added to ``calls``.

    With ``batch`` BatchNorm is over all shards of that, or cannot be, which a string says why. Refusals are the
    engine's, which names the module.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        calls: list[Call] | None = None,
        batch: JoinedBatch | str | None = None,
    ) -> None:
        self._model, self._engine, self._calls, self._batch = model, engine, calls, batch

    @cached_property
    def _names(self) -> dict[int, tuple[str, bool]]:
        """The name of each buffer by its id, and whether its module counts batches. Most models never ask."""
        return {
            id(buffer): (f"{path}.{name}".lstrip("."), isinstance(module, _BatchNorm))
            for path, module in self._model.named_modules()
            if isinstance(module, _NormBase)
            for name, buffer in module.named_buffers(recurse=False)
        }

    def batch_norm(
        self,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """``F.batch_norm``: each channel over samples and positions, or by the running statistics.

        Raises:
            RefusedError: a shard has one value for each channel, or the statistics are in no buffer of the model.
        """
        if not training:
            assert running_mean is not None
            assert running_var is not None
            shape = (1, -1, *(1,) * (x.dim() - 2))
            scale = (running_var + eps).rsqrt()
            return affine((x - running_mean.view(shape)) * scale.view(shape), weight, bias, axes=x.dim() - 2)
        if isinstance(self._batch, str):
            raise self._engine.refusal(f"exact.batch_norm is global, and {self._batch}", _GLOBAL)
        if self._batch is not None and (not self._batch.at_once or x.numel() * self._batch.shards > x.shape[1]):
            y, *found = normalized(x, eps, self._batch)
            if running_mean is not None and running_var is not None:
                self._note(lambda: torch.stack(found), running_mean, running_var, momentum)
            return affine(y, weight, bias, axes=x.dim() - 2)
        if x.numel() == x.shape[1]:
            raise self._engine.refusal("it has one value for each channel of a shard, expected more", _FEW)
        rows = x.transpose(0, 1).reshape(1, x.shape[1], -1).contiguous()
        y = self._by_rows(rows, running_mean, running_var, weight, bias, momentum, eps)
        return y.view(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1)

    def instance_norm(
        self,
        x: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        use_input_stats: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """``F.instance_norm``: each channel of each sample over its positions, or by the running statistics."""
        if not use_input_stats:
            return self.batch_norm(x, running_mean, running_var, weight, bias, eps=eps)
        if math.prod(x.shape[2:]) == 1:
            raise self._engine.refusal("it has one value for each channel of a sample, expected more", _FEW)
        rows = x.reshape(*x.shape[:2], -1)
        return self._by_rows(rows, running_mean, running_var, weight, bias, momentum, eps).view(x.shape)

    def _by_rows(
        self,
        rows: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        momentum: float,
        eps: float,
    ) -> Tensor:
        """Each row of (samples, channels, values) normalised by itself, and noted for the buffers, if there are any."""
        samples, channels, count = rows.shape
        if running_mean is not None and running_var is not None:
            self._note(lambda: _statistics(rows), running_mean, running_var, momentum)
        y = torch.native_group_norm(rows, None, None, samples, channels, count, channels, eps)[0]
        return affine(y, weight, bias, axes=1)

    def _note(self, found: Callable[[], Tensor], running_mean: Tensor, running_var: Tensor, momentum: float) -> None:
        """Add statistics, (2, channels), which the buffers shall follow."""
        first, second = self._names.get(id(running_mean)), self._names.get(id(running_var))
        if first is None or second is None:
            why = "running statistics are expected in the buffers of a module of PyTorch's own"
            raise self._engine.refusal(why, "derive the layer from nn.BatchNorm2d, or set train.numerics: [fast]")
        if self._calls is None:
            return
        (mean_name, counts), (variance_name, _) = first, second
        counter = f"{mean_name.removesuffix('running_mean')}{_COUNT}" if counts else None
        self._calls.append(Call(mean_name, variance_name, counter, momentum, found()))


def _statistics(rows: Tensor) -> Tensor:
    """The mean over samples of mean and unbiased variance, (2, channels), of (samples, channels, values)."""
    with torch.no_grad():
        variance, mean = torch.var_mean(rows, 2, correction=1)
        return torch.stack([mean, variance]).mean(1)


@contextmanager
def counting_apart(model: nn.Module) -> Iterator[None]:
    """Let forward count batches in copies, so that every shard begins with the same number."""
    counts = [
        (module._buffers, count)
        for module in model.modules()
        if isinstance(module, _NormBase) and (count := module._buffers.get(_COUNT)) is not None
    ]
    try:
        for buffers, count in counts:
            buffers[_COUNT] = count.clone()
        yield
    finally:
        for buffers, count in counts:
            buffers[_COUNT] = count
