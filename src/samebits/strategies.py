"""The strategies behind one interface: ``single``, ``dp`` and ``ddp``.

This is the one module that names PyTorch's parallel wrappers. A strategy says which device a worker uses,
wraps the module, tells which part of a global batch this worker feeds, and combines values over workers.
"""

from __future__ import annotations

import datetime
import os
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from samebits.errors import WorkerError
from samebits.host import count_cores
from samebits.numerics.random import derive

if TYPE_CHECKING:
    from collections.abc import Sequence

    from samebits.params.schema import Train
    from samebits.placement import Placement

INIT_METHOD = "SAMEBITS_INIT_METHOD"
"""Variable with the process group's ``init_method``; unset, as under plain torchrun, it is ``env://``."""


class SingleDeviceStrategy:
    """One device; also the base of the others."""

    compiles = True
    """Whether ``torch.compile`` can take the wrapped module."""

    def __init__(self, placement: Placement, train: Train) -> None:
        self.placement, self._train = placement, train
        self.rank, self.world_size = 0, 1
        self.device = self._device(placement.devices[0])

    def _device(self, index: int) -> torch.device:
        return torch.device("cuda", index) if self.placement.device_type == "cuda" else torch.device("cpu")

    @property
    def cuda_devices(self) -> tuple[int, ...]:
        """CUDA devices that this worker uses, each once."""
        return (self.device.index,) if self.device.type == "cuda" else ()

    def setup(self) -> None:
        """Prepare this worker. A CPU device is one thread, so that ratios compare like with like."""
        if self.device.type == "cpu":
            torch.set_num_threads(1)
        else:
            torch.cuda.set_device(self.device)
            torch.set_num_threads(max(1, count_cores() // self.world_size))  # ranks share the cores that feed them

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

    def parallelise(self, module: nn.Module, *, sums: bool = False) -> nn.Module:  # noqa: ARG002
        """Wrap a module that is already on ``device``; ``sums``: gradients of ranks are summed, not averaged."""
        return module

    def accumulate(self, module: nn.Module) -> AbstractContextManager[Any]:  # noqa: ARG002
        """A block in which gradients are added up locally; the last backward pass of a step stays outside."""
        return nullcontext()

    def total(self, values: Tensor) -> Tensor:
        """The sum over ranks; every rank must call it."""
        return values.clone()

    def largest(self, values: Tensor) -> Tensor:
        """The maximum over ranks; every rank must call it."""
        return values.clone()

    def maximum(self, values: Sequence[float]) -> list[float]:
        """As ``largest``, of Python's numbers."""
        found: list[float] = self.largest(torch.tensor(values, dtype=torch.float64, device=self.device)).tolist()
        return found

    def gather(self, values: Tensor) -> Tensor:
        """Values of all ranks, stacked by rank; every rank must call it."""
        return values.unsqueeze(0)

    def barrier(self) -> None:
        """Wait for all ranks."""


class DataParallelStrategy(SingleDeviceStrategy):
    """``nn.DataParallel``: one process, one replica of the module on each GPU at every step.

    Without CUDA, or with one GPU, the wrapper runs the plain module; the placement carries the label.
    """

    compiles = False

    @property
    def cuda_devices(self) -> tuple[int, ...]:
        """Every GPU of the placement, each once."""
        return tuple(dict.fromkeys(self.placement.devices)) if self.device.type == "cuda" else ()

    def parallelise(self, module: nn.Module, *, sums: bool = False) -> nn.Module:  # noqa: ARG002 - it always sums
        """Wrap; the model stands on the first device, as the wrapper requires."""
        return DataParallel(module, device_ids=list(self.placement.devices) if self.cuda_devices else None)


class DDPStrategy(SingleDeviceStrategy):
    """``DistributedDataParallel``: this worker is one rank with one device."""

    def __init__(self, placement: Placement, train: Train) -> None:
        super().__init__(placement, train)
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = self._device(placement.devices[int(os.environ["LOCAL_RANK"])])

    def setup(self) -> None:
        """Join the process group; a rank that waits longer than ``train.timeout_s`` fails."""
        super().setup()
        dist.init_process_group(
            self.placement.backend,
            init_method=os.environ.get(INIT_METHOD),
            rank=self.rank,
            world_size=self.world_size,
            timeout=datetime.timedelta(seconds=self._train.timeout_s),
            device_id=self.device if self.placement.backend == "nccl" else None,
        )
        if dist.get_world_size() != self.world_size:
            raise WorkerError("the process group is not whole", hint="see the launcher's messages")

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def parallelise(self, module: nn.Module, *, sums: bool = False) -> nn.Module:
        """Wrap with the flags of ``train.ddp``."""
        options = self._train.ddp
        wrapped = DistributedDataParallel(
            module,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            static_graph=options.static_graph and self._train.grad_accum_steps == 1,
            bucket_cap_mb=options.bucket_cap_mb,
        )
        if sums:
            wrapped.register_comm_hook(None, _sum_of_ranks)
        return wrapped

    def accumulate(self, module: nn.Module) -> AbstractContextManager[Any]:
        """No all-reduce within the block; a compiled wrapper passes the attribute on."""
        context: AbstractContextManager[Any] = module.no_sync()  # type: ignore[operator]
        return context

    def total(self, values: Tensor) -> Tensor:
        """An all-reduce."""
        total = values.clone()
        dist.all_reduce(total)
        return total

    def largest(self, values: Tensor) -> Tensor:
        """An all-reduce."""
        largest = values.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return largest

    def gather(self, values: Tensor) -> Tensor:
        """Gather to every rank; ranks must hold the same shape."""
        parts = [torch.empty_like(values) for _ in range(self.world_size)]
        dist.all_gather(parts, values.contiguous())
        return torch.stack(parts)

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()


def _sum_of_ranks(state, bucket):  # type: ignore[no-untyped-def]  # noqa: ARG001 - DDP reads types
    """Communication hook: DDP's own all-reduce without its division by the number of ranks."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


Strategy = SingleDeviceStrategy
_CLASSES = {"single": SingleDeviceStrategy, "dp": DataParallelStrategy, "ddp": DDPStrategy}


def make_strategy(placement: Placement, train: Train) -> Strategy:
    """The strategy object of this worker; for ``ddp`` its rank comes from the launcher's environment."""
    return _CLASSES[placement.strategy](placement, train)
