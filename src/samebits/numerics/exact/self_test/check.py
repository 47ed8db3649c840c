"""Refuses a device that gives other bits than a CPU, copies between devices, and sums of a strategy."""

from __future__ import annotations

import gc
import itertools
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from samebits.errors import HostError, few
from samebits.here import of_kit
from samebits.numerics.exact.grid import bits_of_sum
from samebits.numerics.exact.self_test.cases import CASES, COPIES
from samebits.numerics.exact.self_test.digests import DIGESTS
from samebits.numerics.exact.self_test.numbers import digest, integers, moved

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import Literal

    from torch import Tensor

_SIZES = (1 << 7, 1 << 14, 1 << 20)  # of parameters, float64: NCCL sends small and large ones in different ways
_COPIED = 1 << 18


class Ranks(Protocol):
    """The processes that train together."""

    @property
    def rank(self) -> int:
        """The number of this one."""

    @property
    def world_size(self) -> int:
        """How many there are."""

    def all_reduce(self, values: Tensor, *, maximum: bool = False) -> Tensor:
        """The sum or the maximum over ranks."""


class Team(Protocol):
    """The devices of a training: those of this process, the other ranks, and how the strategy joins them."""

    @property
    def devices(self) -> Sequence[torch.device]:
        """The devices of this process. One may stand there twice."""

    @property
    def ranks(self) -> Ranks:
        """This process among the others."""

    def wrap(self, module: nn.Module, *, reduction: Literal["sum"]) -> nn.Module:
        """The module under the strategy."""


def require_sound(team: Team) -> None:
    """Run all cases on all devices of this process, and what devices send to each other. Every rank must call it.

    Raises:
        HostError: something gives other bits than expected; the message names it.
    """
    devices = list(dict.fromkeys(team.devices))
    for device in devices:
        _refuse(device, {name: CASES[name].hint for name in wrong_cases(device, CASES)})
    for source, target in itertools.permutations(devices, 2):
        _refuse(target, {} if arrives(source, target) else {f"a copy from {source}": COPIES})
    if len(team.devices) * team.ranks.world_size > 1:
        _refuse(team.devices[0], dict.fromkeys(_wrong_exchanges(team), COPIES))
        gc.collect()  # wrappers are freed by it alone
    if devices[0].type == "cuda":
        torch.cuda.empty_cache()  # what the tests took is no memory of the training


def wrong_cases(device: torch.device, names: Iterable[str]) -> list[str]:
    """Those of the cases whose results on a device have other bits than on a CPU.

    Raises HostError: of a case it is not known which bits a CPU gives.
    """
    names = list(names)
    if unknown := [name for name in names if name not in DIGESTS]:
        text = f"the self-test of exact has no digest of {few(unknown)}"
        raise HostError(text, hint=of_kit("`python tests/golden/make.py self-test`"))
    return [name for name in names if not agrees(digest(CASES[name].run(device)), DIGESTS[name])]


def agrees(got: str, expected: str) -> bool:
    """Whether two digests are the same."""
    return got == expected


def _refuse(device: torch.device, wrong: Mapping[str, str]) -> None:
    """Raise HostError with the names in ``wrong`` and the first one's hint, if there is any."""
    for hint in wrong.values():
        text = f"the self-test of exact failed on {device}: {few(list(wrong))} gave other bits than expected"
        raise HostError(text, hint=hint)


# -- between devices ---------------------------------------------------------------------------------------------


def arrives(source: torch.device, target: torch.device) -> bool:
    """Whether counted numbers on one device, whole and in part, are the same after a copy to another."""
    counted = torch.arange(1, _COPIED, dtype=torch.int64)
    here = counted.to(source)
    return agrees(digest([moved(here, target), moved(here[::3], target)]), digest([counted, counted[::3]]))


def _pattern(size: int, total: int, device: torch.device) -> Tensor:
    """Integers that need all bits of a float64 once they are multiplied by ``total``."""
    bits = bits_of_sum(total)
    return integers(size, bits - 1, 0, device).add_(2.0 ** (bits - 1))


class _Share(torch.autograd.Function):
    """Gives each share back if the weights have arrived on its device; gradients are the weights times the shares."""

    @staticmethod
    def forward(ctx: Any, shares: Tensor, total: int, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(shares)
        ctx.total, ctx.sizes = total, [weight.numel() for weight in weights]
        came = [torch.eq(weight, _pattern(weight.numel(), total, shares.device)).all() for weight in weights]
        return torch.where(torch.stack(came).all(), shares, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (shares,) = ctx.saved_tensors
        share = grad.mul(shares).sum()
        return None, None, *(_pattern(size, ctx.total, shares.device).mul_(share) for size in ctx.sizes)


class _Weights(nn.Module):
    """Parameters whose gradient over all devices is known."""

    def __init__(self, total: int, device: torch.device) -> None:
        super().__init__()
        self._total = total
        for size in _SIZES:  # DataParallel leaves a ParameterList of its replicas empty
            self.register_parameter(f"weight{size}", nn.Parameter(_pattern(size, total, device)))

    @property
    def weights(self) -> list[Tensor]:
        """The parameters, or what stands in their place in a replica."""
        return [getattr(self, f"weight{size}") for size in _SIZES]

    def forward(self, shares: Tensor) -> Tensor:
        outputs: Tensor = _Share.apply(shares, self._total, *self.weights)  # type: ignore[no-untyped-call]
        return outputs


def _wrong_exchanges(team: Team) -> Iterator[str]:
    """What the strategy sends between all devices of all ranks, where it does not arrive.

    The devices have the shares 1, 3, 5, ... of a gradient, which add up to the square of their number.
    """
    ranks, here, device = team.ranks, len(team.devices), team.devices[0]
    count = here * ranks.world_size
    total, numbers = count * count, torch.arange(ranks.rank * here, (ranks.rank + 1) * here, dtype=torch.float64)
    shares = numbers.mul(2.0).add(1.0).unsqueeze(1)
    module = _Weights(total, device)
    wrapped = team.wrap(module, reduction="sum")  # it has to live until the gradients are there
    outputs = wrapped(shares.to(device))
    outputs.sum().backward()
    if not agrees(digest([outputs.detach()]), digest([shares])):
        yield f"weights sent to {count} devices"
    gradients = [weight.grad for weight in module.weights if weight.grad is not None]
    expected = [_pattern(size, total, torch.device("cpu")).mul_(float(total)) for size in _SIZES]
    if not agrees(digest(gradients), digest(expected)):
        yield f"the sum of gradients over {count} devices"
    if ranks.world_size > 1:
        places = torch.arange(1000, dtype=torch.int64)
        known = (places + ranks.rank).remainder(ranks.world_size) - _COPIED
        most = ranks.all_reduce(known.to(device), maximum=True)
        if not agrees(digest([most]), digest([torch.full_like(places, ranks.world_size - 1 - _COPIED)])):
            yield f"the maximum over {ranks.world_size} ranks"
