"""One device: what every strategy is asked for, and what one without company answers."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from samebits.errors import HostError, first_line
from samebits.host import count_cores
from samebits.numerics.portable.random import derive

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from samebits.training.buckets import Tracer
    from samebits.training.notes import Notes

Reduction = Literal["mean", "sum"]
"""What becomes of the gradients of several ranks."""

T = TypeVar("T")


class SingleDeviceStrategy:
    """One device; also the base of the others."""

    compiles = True
    """Whether ``torch.compile`` can take the wrapped module, and CUDA graphs the one inside."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rank, self.world_size = 0, 1

    @property
    def cuda_devices(self) -> tuple[int, ...]:
        """CUDA devices that this worker uses, each once."""
        return (self.device.index,) if self.device.type == "cuda" else ()

    def setup(self) -> None:
        """Prepare this worker. A CPU device is one thread, so that ratios compare like with like.

        Raises:
            HostError: CUDA does not start.
        """
        if self.device.type == "cpu":
            torch.set_num_threads(1)
        else:
            try:
                torch.cuda.init()  # type: ignore[no-untyped-call]
                torch.cuda.set_device(self.device)
            except (RuntimeError, AssertionError, torch.cuda.DeferredCudaCallError) as error:  # all that CUDA may say
                text = f"CUDA does not start on {self.device}: {first_line(str(error))}"
                raise HostError(
                    text, hint="`samebits doctor` tries each GPU; make repro TORCH=cpu uses none"
                ) from error
            ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            torch.set_num_threads(max(1, count_cores() // ranks_here))  # they share the cores that feed them

    def close(self) -> None:
        """Release what ``setup`` took."""

    def seed(self, seed: int) -> None:
        """Start the random stream of this worker's devices; every rank and every GPU has its own."""
        for number, generator in enumerate(self._generators()):
            generator.manual_seed(derive(seed, "model draws", self.rank, number) % 2**63)

    def _generators(self) -> list[torch.Generator]:
        return [torch.default_generator, *(torch.cuda.default_generators[i] for i in self.cuda_devices)]

    def random_state(self) -> list[Tensor]:
        """Where this worker's random streams stand."""
        return [generator.get_state() for generator in self._generators()]

    def set_random_state(self, state: list[Tensor]) -> None:
        """Go back to a state that ``random_state`` gave."""
        for generator, value in zip(self._generators(), state, strict=True):
            generator.set_state(value)

    def wrap(self, module: nn.Module, *, reduction: Reduction = "mean") -> nn.Module:  # noqa: ARG002
        """Wrap a module that is already on ``device``; ``reduction`` is what becomes of the gradients of the ranks."""
        return module

    def no_sync(self, module: nn.Module) -> AbstractContextManager[Any]:  # noqa: ARG002
        """A block in which gradients are added up locally; the last backward pass of a step stays outside."""
        return nullcontext()

    def require_reduced(self, module: nn.Module) -> None:
        """Raise RuntimeError: the last backward pass left gradients that were not combined over the ranks."""

    def all_reduce(self, values: Tensor, *, maximum: bool = False) -> Tensor:  # noqa: ARG002
        """The sum or the maximum over ranks; every rank must call it."""
        return values.clone()

    def all_reduce_(self, values: Tensor) -> None:
        """Put the sum over ranks in place of the values; every rank must call it."""

    def max_over_ranks(self, values: Sequence[float]) -> list[float]:
        """The maximum over ranks of Python's numbers; every rank must call it."""
        numbers = torch.tensor(values, dtype=torch.float64, device=self.device)
        maxima: list[float] = self.all_reduce(numbers, maximum=True).tolist()
        return maxima

    def all_gather(self, values: Tensor) -> Tensor:
        """Values of all ranks, stacked by rank; every rank must call it."""
        return values.unsqueeze(0)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """What each rank has, by rank; every rank must call it."""
        return [data]

    def broadcast(self, values: Tensor) -> None:
        """Fill a CPU tensor of any type with what rank 0 has in it; every rank must call it."""

    def broadcast_bytes(self, data: bytes) -> bytes:
        """What rank 0 has; every rank must call it."""
        (size,) = self.max_over_ranks([len(data) if self.rank == 0 else 0])
        whole = torch.zeros(int(size), dtype=torch.uint8)
        if self.rank == 0:
            whole.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.broadcast(whole)
        return whole.numpy().tobytes()

    def barrier(self) -> None:
        """Wait for all ranks."""

    def first_alone(self, work: Callable[[], T]) -> T | None:
        """What ``work`` gives on rank 0, while the others wait for it and get None; every rank must call it."""
        return work()

    def alone(self) -> SingleDeviceStrategy:
        """This worker's device, with what it feeds and without any other: nothing is combined."""
        alone = SingleDeviceStrategy(self.device)
        alone.rank, alone.compiles = self.rank, self.compiles
        return alone

    def traced(self, tracer: Tracer) -> SingleDeviceStrategy:  # noqa: ARG002 - nothing is sent
        """The same, with the all-reduces of what it wraps noted."""
        return self

    def note_phases(self, module: nn.Module, notes: Notes) -> None:
        """Have a wrapped module say what it does beside its forward pass."""

    def within(self, groups: Sequence[Sequence[int]]) -> SingleDeviceStrategy:  # noqa: ARG002 - one rank is one group
        """The same with values combined inside each group of ranks alone; every rank must call it."""
        return self
