"""All shards of a device in one pass, each as if it were alone, by ``torch.func.vmap`` over an axis of shards.

An operation on all shards gives each the bits that it would give this shard alone, since each element of its result
depends on no more than the elements that it joins (``operations``). PyTorch's rules for ``vmap`` take some operations
apart; ``forms`` and ``operations`` round where the parts do.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import torch

from samebits.errors import first_line
from samebits.host.variables import SHARDS, chosen
from samebits.models.nested import leaves_of, refilled
from samebits.numerics.allocators import is_out_of_memory
from samebits.numerics.dispatch import calling_module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from samebits.models.nested import Nested


UNTRIED = "they have not been tried in one pass"
_MOST_TRIED = 2**28  # elements of the gradients of all parameters and of all shards in a trial
_MOST = 2**27  # elements of the largest parameter's gradients, of all shards in one pass


def physical(x: Tensor) -> Tensor:
    """A tensor of all shards, in whose place ``vmap`` shows that of one, which never requires a gradient."""
    while torch._C._functorch.is_batchedtensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def why_apart_at_first() -> str:
    """Why shards run one by one before a trial: there was none, or the user does not want one."""
    return f"{SHARDS} is set to apart" if chosen(SHARDS) == "apart" else UNTRIED


def tried(shards: range, values: dict[str, Tensor]) -> range:
    """Shards of a trial, which holds all their gradients at once: at least two."""
    largest = max(sum(value.numel() for value in values.values()), 1)
    return shards[: max(2, _MOST_TRIED // largest)]


def passes(shards: range, values: dict[str, Tensor], *, whole: bool = False) -> Iterator[range]:
    """Shards that run in one pass: all of a ``whole`` batch, or as many as leave room for a gradient of each."""
    largest = max((value.numel() for value in values.values()), default=0)
    step = len(shards) if whole else max(1, _MOST // max(largest, 1))
    return (shards[start : start + step] for start in range(0, len(shards), step))


class Pass(NamedTuple):
    """Results of a pass over shards: outputs (shards, samples, ...), and of each what ``notes`` returned."""

    outputs: Tensor
    noted: tuple[Tensor, ...]


def run(
    compute: Callable[[dict[str, Tensor], Nested], Tensor],
    entered: dict[str, Tensor],
    part: Nested,
    notes: Callable[[], Iterable[Tensor]],
) -> Pass:
    """Call ``compute`` with parameters (shards, ...) and nested tensors (shards, samples, ...), for all shards at once.

    ``notes`` returns further tensors that the call has made.
    """

    def one(parameters: dict[str, Tensor], leaves: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        outputs = compute(parameters, refilled(part, leaves))
        return outputs, tuple(notes())

    with suppress(AttributeError):  # of an operation without a rule of its own, which runs shard by shard
        torch._C._functorch._set_vmap_fallback_warning_enabled(False)  # type: ignore[attr-defined]
    leaves = tuple(tensor for _, tensor in leaves_of(part))
    return Pass(*torch.func.vmap(one, randomness="different")(entered, leaves))


_ASKS, _SHAPE = "it asks for a number of its data, as .item() does", "a shape depends on its data"
_WHY = {
    ".item()": _ASKS,
    "Cannot access data pointer": _ASKS,  # of tolist() and numpy()
    "control flow": "an `if` depends on its data",
    "dynamic shape": _SHAPE,
    "masked_select": _SHAPE,
    "to be equal size": _SHAPE,
    "register a hook on a tensor": "it registers a hook for a gradient",
    "setup_context": "its autograd.Function has no rule for vmap; setup_context and generate_vmap_rule give it one",
    "may have escaped": "it keeps a tensor beyond a function, as activation checkpointing does",
}
"""What stands in the way, by a part of PyTorch's message."""


def stands_in_the_way(error: Exception) -> bool:
    """Whether an error says that ``vmap`` cannot run the model."""
    return any(part in str(error) for part in (*_WHY, "vmap", "Batching rule"))


def why_apart(error: Exception) -> str:
    """Why shards do not run in one pass, and in which module."""
    if is_out_of_memory(error):
        return "a trial of one pass ran out of memory"
    text, module = first_line(str(error)), calling_module(error)
    why = next((why for part, why in _WHY.items() if part in text), text)
    return why if module is None else f"{module.path} ({module.kind}): {why}"
