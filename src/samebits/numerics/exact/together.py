"""All shards of a device in one pass, each as if it were alone, by ``torch.func.vmap`` over an axis of shards.

An operation on all shards gives each the bits that it would give this shard alone, since each element of its result
depends on no more than the elements that it joins (``operations``). PyTorch's rules for ``vmap`` take some operations
apart; ``forms`` and ``operations`` round where the parts do.
"""

from __future__ import annotations

import math
import operator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from samebits.errors import first_line
from samebits.host.variables import SHARDS, chosen
from samebits.models.nested import leaves_of, refilled
from samebits.numerics.allocators import is_out_of_memory
from samebits.numerics.dispatch import calling_module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from samebits.models.nested import Nested

S = TypeVar("S")
T = TypeVar("T")
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


class DividedError(BaseException):  # which a model that catches its own errors does not catch
    """Shards of a pass answer differently what the model asks; ``groups`` have the places of those that agree."""

    def __init__(self, groups: list[list[int]]) -> None:
        super().__init__("shards give different answers to what the model asks of its data, as by .item()")
        self.groups = groups


def _answer(convert: Callable[[Any], Any], x: Tensor) -> Any:
    """What each shard of a pass answers. Raises DividedError: some answer otherwise."""
    groups: dict[Any, list[int]] = {}
    for place, one in enumerate(physical(x).detach().flatten().cpu().unbind()):
        value = convert(one.item())
        groups.setdefault(math.nan if value != value else value, []).append(place)
    if len(groups) > 1:
        raise DividedError(list(groups.values()))
    return next(iter(groups))


ANSWERS: dict[Any, Callable[[Any], Any]] = {
    Tensor.item: lambda value: value, Tensor.__bool__: bool, Tensor.is_nonzero: bool, torch.is_nonzero: bool,
    Tensor.__int__: int, Tensor.__float__: float, Tensor.__index__: operator.index,
}  # fmt: skip
"""Functions that ask a tensor for its number, and what they make of it."""


def answer(func: Any, x: Tensor, *others: Any) -> Any:
    """What ``func``, one of ``ANSWERS`` or ``Tensor.__contains__``, says of a tensor of one pass, for all its shards.

    Raises:
        DividedError: it is not the same for all.
    """
    if func is Tensor.__contains__:
        func, x = Tensor.__bool__, (x == others[0]).any()
    batched = torch._C._functorch.is_batchedtensor(x) and not torch._C._functorch.is_batchedtensor(
        torch._C._functorch.get_unwrapped(x)
    )
    return _answer(ANSWERS[func], x) if batched and x.numel() == 1 else func(x)


def rows_of(places: Sequence[int], x: Tensor) -> Tensor:
    """Rows of a tensor; neighbours are not copied."""
    first, last = places[0], places[-1] + 1
    return x[first:last] if len(places) == last - first else x[places]


def divided(shards: Sequence[S], run: Callable[[Sequence[S]], T]) -> Iterator[tuple[Sequence[S], T]]:
    """``run`` of shards in one pass, or of each group of them whose forward pass takes the same way.

    Raises RuntimeError: that would be more passes, with those that end early, than one for each shard.
    """
    waiting, begun = [shards], 0
    while waiting:
        here = waiting.pop()
        begun += 1
        try:
            found = run(here)
        except DividedError as error:
            waiting += [[here[place] for place in group] for group in reversed(error.groups)]
            if begun + len(waiting) > max(len(shards), 3):
                raise RuntimeError(UNLIKE).with_traceback(error.__traceback__) from None
        else:
            yield here, found


UNLIKE = "vmap: its shards take almost as many ways through forward as there are shards"
_ASKS, _SHAPE = "it asks for a number of its data, as .item() does", "a shape depends on its data"
_WRITES = "it writes numbers of its inputs into a tensor that is not made of them"
_WHY = {
    UNLIKE: UNLIKE.removeprefix("vmap: "),
    ".item()": _ASKS,
    "Cannot access data pointer": _ASKS,  # of tolist() and numpy()
    "control flow": "an `if` depends on its data",
    "dynamic shape": _SHAPE,
    "masked_select": _SHAPE,
    "to be equal size": _SHAPE,
    "register a hook on a tensor": "it registers a hook for a gradient",
    "setup_context": "its autograd.Function has no rule for vmap; setup_context and generate_vmap_rule give it one",
    "different inplace randomness": "it draws in place into a tensor that is not made of its inputs",
    "inplace arithmetic": _WRITES,
    "does not fit into": _WRITES,
    "requires_grad_()": "it asks for a derivative in forward (requires_grad_)",
    "vjp method for your custom": "it takes a derivative in forward, of which PyTorch has no second one under vmap",
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
    why = next((why for part, why in _WHY.items() if part in text), text.partition(". ")[0])
    return why if module is None else f"{module.path} ({module.kind}): {why}"
