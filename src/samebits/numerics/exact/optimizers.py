"""Optimizers: SGD and AdamW with a kernel of its own for every product and sum, and any other of ``torch.optim``.

Parameters are float64 tensors that hold float32 numbers; gradients are exact sums over the samples of a global batch,
in float64. All updates are those of ``torch.optim``, in float32.
"""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from samebits.errors import RefusedError
from samebits.models import experiment
from samebits.numerics.exact import elementary
from samebits.numerics.exact.compiled.library import compiled, gathered, threads
from samebits.numerics.exact.engine import Engine
from samebits.numerics.exact.grid import blocks
from samebits.numerics.exact.sums import fixed_order_sum
from samebits.numerics.optimizers import grouped, optimizer_for
from samebits.portable.floats import PortableFloat, portable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from samebits.numerics.exact.compiled.library import Kernels
    from samebits.numerics.exact.spare import SpareMemory
    from samebits.params.schema import Train

_BETAS = (0.9, 0.999)
_EPS = 1e-8


def _sum_of(p: nn.Parameter) -> Tensor:
    """A parameter's gradient. One that is missing counts as zeros, as under DataParallel."""
    return torch.zeros_like(p) if p.grad is None else p.grad


class ExactOptimizer:
    """Parameters with their mean gradients, clipped to the norm ``clip``; summed gradients are divided by ``terms``."""

    spare: SpareMemory | None = None
    """Gets the memory of gradients that are dropped."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, lr: float, terms: int, clip: float | None, **settings: Any
    ) -> None:
        self._trained = [p for p in parameters if p.requires_grad]
        self.terms, self._clip = terms, clip
        self.param_groups = [{"params": self._trained, "lr": lr, **settings}]
        self.state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        assert set_to_none
        for p in (p for group in self.param_groups for p in group["params"]):
            if self.spare and p.grad is not None:
                self.spare.give_back(p.grad)
            p.grad = None

    def step(self) -> None:
        """Update every parameter by its mean gradient."""
        raise NotImplementedError

    def reset(self) -> None:
        """Return to the state before the first step."""
        self.state.clear()

    def _gradient(self, total: Tensor, scale: Tensor | None) -> Tensor:
        """The mean gradient, rounded to float32."""
        total = total.clone()
        if self.terms & (self.terms - 1) == 0:
            total.mul_(1.0 / self.terms)
        else:
            total.div_(elementary.divisor(total, self.terms))
        gradient = total.to(torch.float32)
        return gradient if scale is None else gradient.mul_(scale)

    def _clipping(self) -> Tensor | None:
        """The factor that limits the norm of all gradients; None without clipping."""
        if self._clip is None:
            return None
        squares = []
        for p in self._trained:
            g = self._gradient(_sum_of(p).reshape(-1), None).to(torch.float64)
            squares.append(fixed_order_sum(g.mul_(g), (0,)))
        norm = elementary.sqrt(fixed_order_sum(torch.cat(squares), (0,))).to(torch.float32)
        return torch.full_like(norm, self._clip).div_(norm.add_(1e-6)).clamp_(max=1.0)


def _moved(
    library: Kernels,
    optimizer: _Blockwise,
    p: Tensor,
    states: list[Tensor],
    total: Tensor,
    scale: Tensor | None,
    numbers: tuple[float, ...],
) -> bool | None:
    """Whether the kernel of the optimizer's name has updated a parameter and its states."""
    if not (library.takes(p, total, dtype=torch.float64) and library.takes(*states)):
        return None
    first, second = [*states, None][:2]
    clipping: Any = scale  # which on a GPU only the GPU knows
    if library.is_host:
        clipping = 1.0 if scale is None else float(scale)
    name = type(optimizer).__name__.lower()
    library.call(
        name, p, total, first, second, p.numel(), float(optimizer.terms), clipping, *map(float, numbers), threads()
    )
    return True


class _Blockwise(ExactOptimizer):
    """What SGD and AdamW share."""

    _names: tuple[str, ...] = ()

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter by its mean gradient, block by block."""
        settings = self.param_groups[0]
        torch.set_flush_denormal(False)  # AdamW's squares are often subnormal
        scale = self._clipping()
        with gathered(self._trained[0]) if self._trained else nullcontext():
            for p in self._trained:
                state = self.state[p]
                if not state:
                    for name in self._names:
                        state[name] = torch.zeros(p.shape, dtype=torch.float32, device=p.device)
                states = [state[name] for name in self._names]
                self._move(p, states, _sum_of(p), scale, self._numbers(state, settings))

    @compiled(_moved)
    def _move(
        self, p: Tensor, states: list[Tensor], total: Tensor, scale: Tensor | None, numbers: tuple[float, ...]
    ) -> None:
        """Update a parameter and its states by the sum of its gradients; ``numbers`` are those of ``_update``."""
        flat = [total.reshape(-1), *(t.view(-1) for t in (p, *states))]
        for part in blocks(p.numel(), 1, p.device):
            some, weights, *here = (t[part] for t in flat)
            weights.copy_(self._update(weights.to(torch.float32), self._gradient(some, scale), here, numbers))

    def _numbers(self, state: dict[str, Any], settings: dict[str, Any]) -> tuple[float, ...]:
        """The numbers that the update of one parameter needs."""
        raise NotImplementedError

    def _update(self, p: Tensor, g: Tensor, states: list[Tensor], numbers: tuple[float, ...]) -> Tensor:
        """The new values of some elements; ``states`` are changed in place."""
        raise NotImplementedError


class SGD(_Blockwise):
    """Momentum and an L2 penalty, as ``torch.optim.SGD``."""

    _names = ("momentum_buffer",)

    def _numbers(self, state: dict[str, Any], settings: dict[str, Any]) -> tuple[float, ...]:  # noqa: ARG002
        return settings["lr"], settings["momentum"], settings["weight_decay"]

    def _update(self, p: Tensor, g: Tensor, states: list[Tensor], numbers: tuple[float, ...]) -> Tensor:
        lr, momentum, decay = numbers
        if decay:
            g.add_(p.mul(decay))
        if momentum:
            g = states[0].mul_(momentum).add_(g)
        return p.sub_(g.mul(lr))


class AdamW(_Blockwise):
    """Adam with decoupled weight decay, as ``torch.optim.AdamW``."""

    _names = ("exp_avg", "exp_avg_sq")

    def _numbers(self, state: dict[str, Any], settings: dict[str, Any]) -> tuple[float, ...]:
        # The C library's pow differs between hosts, so powers are products.
        for name, beta in zip(("beta1_power", "beta2_power"), _BETAS, strict=True):
            state[name] = state.get(name, 1.0) * beta
        lr = settings["lr"]
        return (
            1.0 - lr * settings["weight_decay"],
            lr / (1.0 - state["beta1_power"]),
            math.sqrt(1.0 - state["beta2_power"]),
        )

    def _update(self, p: Tensor, g: Tensor, states: list[Tensor], numbers: tuple[float, ...]) -> Tensor:
        decay, rate, correction = numbers
        mean, square = states
        if decay != 1.0:
            p.mul_(decay)
        mean.add_(g.sub(mean).mul_(1.0 - _BETAS[0]))
        square.mul_(_BETAS[1]).add_(g.mul(g).mul_(1.0 - _BETAS[1]))
        root = torch.sqrt(square.to(torch.float64)).to(torch.float32)  # correctly rounded: see elementary.sqrt
        root.div_(elementary.divisor(root, correction)).add_(_EPS)
        return p.sub_(mean.div(root).mul_(rate))


class TorchOptimizer(ExactOptimizer):
    """Any optimizer of ``torch.optim``, by its own loop over float32 parameters, with each operation under the guard.

    ``make`` gets ``param_groups`` with these parameters and returns the optimizer. Raises RefusedError in ``step``: an
    operation has no exact version.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        param_groups: Sequence[dict[str, Any]],
        *,
        lr: float,
        terms: int,
        clip: float | None,
    ) -> None:
        super().__init__(parameters, lr=lr, terms=terms, clip=clip)
        self._narrow = [nn.Parameter(p.detach().to(torch.float32)) for p in self._trained]
        narrow = {id(p): n for p, n in zip(self._trained, self._narrow, strict=True)}
        self.param_groups = [{"lr": lr, **one} for one in param_groups]
        inner = [{**one, "params": [narrow[id(p)] for p in one["params"]]} for one in param_groups]
        self._make = partial(make, inner)
        self.reset()
        for outer, own in zip(self.param_groups, self._inner.param_groups, strict=True):
            outer["lr"] = float(own["lr"])

    def reset(self) -> None:
        """Return to the state before the first step, which some optimizers make with the object."""
        self._inner = self._make()
        for group in self._inner.param_groups:
            group |= {key: portable(value) for key, value in group.items() if key != "params"}
        self.state.clear()
        for p, narrow in zip(self._trained, self._narrow, strict=True):
            self.state[p] = self._inner.state[narrow]  # one dictionary, also where it is still empty

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter by its mean gradient."""
        torch.set_flush_denormal(False)
        scale = self._clipping()
        for p, narrow in zip(self._trained, self._narrow, strict=True):
            narrow.copy_(p)
            narrow.grad = self._gradient(_sum_of(p), scale).view(narrow.shape)
        for group, outer in zip(self._inner.param_groups, self.param_groups, strict=True):
            group["lr"] = PortableFloat(outer["lr"])
        try:
            with Engine(), _PortableItems():
                self._inner.step()
        except RefusedError as error:
            hint = "choose another optimizer, or set train.numerics: [fast]"
            raise RefusedError(error.why, hint=hint, at="train.optimizer", kind=type(self._inner).__name__) from None
        for p, narrow in zip(self._trained, self._narrow, strict=True):
            narrow.grad = None
            p.copy_(narrow)


class _PortableItems(TorchFunctionMode):
    """Context in which numbers read from tensors are portable, as an optimizer computes powers of its step."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return PortableFloat(result) if type(result) is float else result


def optimizer_of(train: Train, model: nn.Module, terms: int) -> ExactOptimizer:
    """The optimizer that ``train.optimizer`` names, over a model's parameters; losses are means of ``terms``."""
    chosen = train.optimizer
    common: dict[str, Any] = {"lr": chosen.lr, "terms": terms, "clip": train.clip_grad_norm}
    plain = not (chosen.kwargs or experiment.parameter_groups_of(model) or experiment.optimizer_of(model))
    if chosen.name == "sgd" and plain:
        return SGD(model.parameters(), momentum=chosen.momentum, weight_decay=chosen.weight_decay, **common)
    if chosen.name == "adamw" and plain:
        return AdamW(model.parameters(), weight_decay=chosen.weight_decay, **common)

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return optimizer_for(model, chosen, groups, foreach=False, fused=False)

    return TorchOptimizer(model.parameters(), make, grouped(model), **common)
