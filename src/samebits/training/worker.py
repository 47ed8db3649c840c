"""One worker of a training: its devices, their random streams, and its strategy."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any

import torch

from samebits.errors import HostError, first_line
from samebits.here import torch_command
from samebits.host import count_cores
from samebits.portable.random import derive
from samebits.strategies import STRATEGIES
from samebits.strategies.interface import Wrapping
from samebits.strategies.single import SINGLE
from samebits.training.collectives import Collectives, GroupCollectives

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

    from samebits.params.schema import Train
    from samebits.strategies.interface import Reduction, Strategy
    from samebits.strategies.placement import Placement
    from samebits.training.meters import Notes

    HookOfGroup = Callable[[ProcessGroup | None], Callable[..., Any]]


class Worker:
    """One process of a training, by default the only one, on one device.

    ``device`` is the first of ``devices`` and holds the module. ``ranks`` connects the processes that train together.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        strategy: Strategy = SINGLE,
        *,
        ranks: Collectives | None = None,
        train: Train | None = None,
        placement: Placement | None = None,
    ) -> None:
        self.device, self.devices = devices[0], devices
        self.ranks = ranks or Collectives(self.device)
        self.compiles = strategy.compiles
        """Whether ``torch.compile`` can take the wrapped module, and CUDA graphs the one inside."""
        self._strategy, self._train, self._placement = strategy, train, placement
        self._hook: HookOfGroup | None = None

    @property
    def rank(self) -> int:
        """The rank of this worker."""
        return self.ranks.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.ranks.world_size

    @property
    def cuda_devices(self) -> tuple[int, ...]:
        """Indices of the CUDA devices that this worker uses, each once."""
        return tuple(dict.fromkeys(device.index for device in self.devices)) if self.device.type == "cuda" else ()

    def setup(self) -> None:
        """Prepare this process and join the other ranks. A CPU device is one thread, so that ratios are fair.

        Raises:
            HostError: CUDA does not start.
        """
        if self.device.type == "cpu":
            torch.set_num_threads(1)
        else:
            try:
                torch.cuda.init()  # type: ignore[no-untyped-call]
                torch.cuda.set_device(self.device)
            except (RuntimeError, AssertionError, torch.cuda.DeferredCudaCallError) as error:  # CUDA's
                text = f"CUDA does not start on {self.device}: {first_line(str(error))}"
                raise HostError(
                    text, hint=f"`samebits doctor` tries each GPU; {torch_command('cpu')} uses none"
                ) from error
            ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            torch.set_num_threads(max(1, count_cores() // ranks_here))  # the ranks share the cores that feed them
        if self._placement is not None:
            self._strategy.prepare(self._placement, os.environ)
        self.ranks.join()

    def close(self) -> None:
        """Leave the other ranks."""
        self.ranks.close()

    def seed(self, seed: int) -> None:
        """Seed the random streams of this worker; every rank and every GPU has its own."""
        for number, generator in enumerate(self._generators()):
            generator.manual_seed(derive(seed, "model draws", self.rank, number) % 2**63)

    def _generators(self) -> list[torch.Generator]:
        return [torch.default_generator, *(torch.cuda.default_generators[i] for i in self.cuda_devices)]

    def random_state(self) -> list[Tensor]:
        """The states of this worker's random streams."""
        return [generator.get_state() for generator in self._generators()]

    def set_random_state(self, state: list[Tensor]) -> None:
        """Restore states that ``random_state`` returned."""
        for generator, value in zip(self._generators(), state, strict=True):
            generator.set_state(value)

    def wrap(self, module: nn.Module, *, reduction: Reduction = "mean") -> nn.Module:
        """Wrap a module that is already on ``device``; ``reduction`` combines the gradients of the ranks."""
        how = Wrapping(
            devices=self.devices,
            settings=self._train and self._strategy.settings_of(self._train),
            accumulates=self._train is not None and self._train.grad_accum_steps > 1,
            reduction=reduction,
            group=self.ranks.group,
            hook=self._hook(self.ranks.group) if self._hook else None,
        )
        return self._strategy.wrap(module, how)

    def no_sync(self, module: nn.Module) -> AbstractContextManager[Any]:
        """A block in which gradients add up locally; the last backward pass of a step stays outside."""
        return self._strategy.no_sync(module)

    def require_reduced(self, module: nn.Module) -> None:
        """Raise RuntimeError: the last backward pass left gradients that are not combined over the ranks."""
        self._strategy.require_reduced(module)

    def note_phases(self, module: nn.Module, notes: Notes) -> None:
        """Have a wrapped module call ``notes`` with its phases beside the forward pass."""
        self._strategy.note_phases(module, notes)

    def alone(self) -> Worker:
        """A worker of the same rank and device that trains alone: nothing is combined."""
        alone = Worker([self.device], ranks=Collectives(self.device, self.rank))
        alone.compiles = self.compiles
        return alone

    def hooked(self, hook: HookOfGroup) -> Worker:
        """The same worker, whose wrapped modules use this communication hook instead of their own."""
        if not self._strategy.has_ranks:
            return self
        hooked = copy.copy(self)
        hooked._hook = hook
        return hooked

    def within(self, groups: Sequence[Sequence[int]]) -> Worker:
        """The same worker, with gradients, sums and maxima over one of these groups; every rank must call it."""
        within = copy.copy(self)
        within.ranks = self.ranks.within(groups)
        return within


def make_worker(placement: Placement, train: Train) -> Worker:
    """The worker of this process; with several ranks, environment variables of the launcher say which."""
    strategy, cuda = STRATEGIES[placement.strategy], placement.device_type == "cuda"
    devices = [torch.device("cuda", index) if cuda else torch.device("cpu") for index in placement.devices]
    ranks = None
    if strategy.has_ranks:
        devices = [devices[int(os.environ["RANK"])]]
        ranks = GroupCollectives(devices[0], placement.backend, timeout_s=train.timeout_s)
    return Worker(devices, strategy, ranks=ranks, train=train, placement=placement)
