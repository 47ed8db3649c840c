"""A model's float64 parameters under ``exact``, and the modules and parameters that it refuses."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from samebits.errors import RefusedError
from samebits.numerics.exact.engine import below
from samebits.numerics.exact.grid import bits_of_sum
from samebits.numerics.exact.windows import GRADIENTS_OF

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from samebits.numerics.exact.windows import Windows


def _places(model: nn.Module) -> list[tuple[str, dict[str, nn.Parameter | None], str]]:
    """Path, holder and name of each parameter; a tied one appears under each of its names."""
    return [
        (f"{path}.{name}" if path else name, module._parameters, name)
        for path, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def tied_places(model: nn.Module) -> dict[str, list[str]]:
    """All paths of each parameter, by its first path."""
    ties: dict[int, list[str]] = {}
    for place, holder, name in _places(model):
        ties.setdefault(id(holder[name]), []).append(place)
    return {places[0]: places for places in ties.values()}


def refused_parts(model: nn.Module) -> Iterator[RefusedError]:
    """Refusals that need no pass.

    Refused are modules that the engine cannot see into or that run in other kernels on other devices, and parameters
    that are not float32 or have a hook for their gradient, which the parameter in their place would not have.
    """
    compiler = "torch._dynamo" in sys.modules  # there is no compiled module before it is imported
    for path, module in model.named_modules():
        at = f"model.{path}" if path else "model"
        compiled = compiler and isinstance(module, torch._dynamo.eval_frame.OptimizedModule)
        if compiled or module._compiled_call_impl is not None:
            why, hint = "a compiler may fuse what must be rounded apart", "leave torch.compile to train.compile"
        elif isinstance(module, torch.jit.ScriptModule):
            why, hint = "TorchScript may fuse what must be rounded apart", "use the module itself"
        elif isinstance(module, nn.SyncBatchNorm):
            why = "it normalises by the batch of all ranks by PyTorch's own communication"
            hint = "use nn.BatchNorm with exact.batch_norm: global, or set train.numerics: [fast]"
        else:
            continue
        yield RefusedError(why, hint=hint, at=at, kind=type(module).__name__)
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            why = f"its values are {parameter.dtype}, expected float32"
            yield RefusedError(why, hint="build the model in float32", at=f"model.{name}")
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            hint = "do in forward what the hook does, or set train.numerics: [fast]"
            yield RefusedError("it has a hook for its gradient, expected none", hint=hint, at=f"model.{name}")


def widen(model: nn.Module) -> dict[str, Tensor]:
    """Give a model float64 parameters with the same values, one for each.

    Returns the replaced parameters by place, which nothing may use any more.
    """
    wide: dict[int, nn.Parameter] = {}
    replaced: dict[str, Tensor] = {}  # keeps the replaced parameters alive, and so their ids unique
    for place, holder, name in _places(model):
        parameter = holder[name]
        assert parameter is not None
        if id(parameter) not in wide:
            values = parameter.detach().to(torch.float64).contiguous()
            wide[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
        holder[name], replaced[place] = wide[id(parameter)], parameter
    return replaced


def narrowed(model: nn.Module) -> dict[str, Tensor]:
    """The state of a widened model as float32, by the model's own names."""
    wide = {place for place, _, _ in _places(model)}
    return {name: t.to(torch.float32) if name in wide else t for name, t in model.state_dict().items()}


class Entry(torch.autograd.Function):
    """Passes a parameter's float32 value to the model, and its gradients, rounded to a window, back."""

    @staticmethod
    def forward(
        ctx: Any,
        parameter: Tensor,  # noqa: ARG004
        value: Tensor,
        windows: Windows,
        shards: int,
        place: str,
        here: int | None,
    ) -> Tensor:
        """The value by which the model computes; with ``here`` once for each of so many shards, (here, ...)."""
        ctx.windows, ctx.shards, ctx.place, ctx.here = windows, shards, place, here
        ctx.uses, ctx.total, ctx.stands_in = 0, None, None
        return value.detach() if here is None else value.detach().expand(here, *value.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of a shard, or the sum of those of several, on the grid of all shards' sum."""
        total, ctx.total = ctx.total, None  # autograd copies a gradient that somebody else has, too
        if total is not None:
            if not _is_same(grad, ctx.stands_in):
                ctx.windows.use_again(ctx.place)
            return total, None, None, None, None, None
        with below():
            shards = grad.unsqueeze(0) if ctx.here is None else grad
            total = ctx.windows.sum(f"{GRADIENTS_OF} {ctx.place}", shards, bits_of_sum(ctx.shards))
            return total, None, None, None, None, None


def met(weight: Tensor) -> Any:
    """Note a use of a weight of several shards; what ``sum_at_once`` takes, None if it cannot."""
    node: Any = weight.grad_fn
    has_entered = isinstance(node, Entry._backward_cls)
    if not has_entered or node.here is None or weight.device.type != "cpu":
        return None
    node.uses += 1
    return node


def sum_at_once(
    node: Any, shape: torch.Size, sum_of: Callable[[Tensor | float], tuple[Tensor, Tensor]]
) -> Tensor | None:
    """Have all shards' gradients of a weight summed by ``sum_of``, see ``Windows.sum_by``; zeros stand in for them.

    None if the weight is used elsewhere too. Where that turns out only when other gradients are added to the zeros, the
    step is run again. ``node`` keeps the zeros, so that autograd adds to no memory of theirs.
    """
    if node is None or node.uses > 1 or not node.windows.is_used_once(node.place):
        return None
    cpu, place = torch.device("cpu"), f"{GRADIENTS_OF} {node.place}"
    node.total = node.windows.sum_by(place, bits_of_sum(node.shards), cpu, sum_of)
    node.stands_in = None if node.total is None else node.total.new_zeros((), dtype=torch.float32).expand(shape)
    stands_in: Tensor | None = node.stands_in
    return stands_in


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
