"""The strategies behind one interface, that of ``single``: ``dp`` and ``ddp``.

This and ``replicas`` are the modules that name PyTorch's parallel wrappers. A strategy says which device a worker uses,
wraps the module, tells which part of a global batch this worker feeds, and combines values over workers.
"""

from __future__ import annotations

import copy
import datetime
import inspect
import itertools
import os
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from samebits.errors import UserError, WorkerError
from samebits.training.replicas import Replicas
from samebits.training.single import SingleDeviceStrategy

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping, Sequence
    from contextlib import AbstractContextManager

    from samebits.params.schema import Train
    from samebits.records.run import Placement
    from samebits.training.buckets import Tracer
    from samebits.training.notes import Notes
    from samebits.training.single import Reduction, T

_POLL_SECONDS = 0.05
_PIECE_BYTES = 2**26
# Before 2.12, PyTorch had one flag for the first and for all later forward passes.
_SYNC_BUFFERS = "forward_sync_buffers"
if _SYNC_BUFFERS not in inspect.signature(DistributedDataParallel).parameters:
    _SYNC_BUFFERS = "broadcast_buffers"

INIT_METHOD = "SAMEBITS_INIT_METHOD"
"""Variable with the process group's ``init_method``; unset, as under plain torchrun, it is ``env://``."""


class DataParallelStrategy(SingleDeviceStrategy):
    """``nn.DataParallel``: one process, one replica of the module on each GPU at every step.

    Without CUDA, or with one GPU, the wrapper runs the plain module; the placement carries the label.
    """

    compiles = False

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__(devices[0])
        self._devices = devices

    @property
    def cuda_devices(self) -> tuple[int, ...]:
        """Every GPU, each once."""
        return tuple(dict.fromkeys(device.index for device in self._devices)) if self.device.type == "cuda" else ()

    def wrap(self, module: nn.Module, *, reduction: Reduction = "mean") -> nn.Module:  # noqa: ARG002 - one rank
        """Wrap; the model stands on the first device, as the wrapper requires."""
        return Replicas(module, device_ids=list(self._devices) if self.cuda_devices else None)

    def note_phases(self, module: nn.Module, notes: Notes) -> None:
        """It scatters, replicates and gathers."""
        assert isinstance(module, Replicas)
        module.notes = notes


class DDPStrategy(SingleDeviceStrategy):
    """``DistributedDataParallel``: this worker is one rank with one device."""

    def __init__(self, device: torch.device, backend: str | None, train: Train, *, ring: bool = False) -> None:
        super().__init__(device)
        self._backend, self._train, self._ring = backend, train, ring
        self._limit = datetime.timedelta(seconds=train.timeout_s)
        self._numbers = itertools.count()  # of exchanges over the store; copies of this strategy go on in them
        self._group: dist.ProcessGroup | None = None  # of all ranks
        self._tracer: Tracer | None = None
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def setup(self) -> None:
        """Join the process group; a rank that waits longer than ``train.timeout_s`` fails."""
        super().setup()
        if self._ring:
            _hold_to_ring(os.environ)
        url = os.environ.get(INIT_METHOD, "env://")
        store, *_ = next(rendezvous(url, self.rank, self.world_size))
        # torchrun keeps its store when it starts workers again, and with it what those before have left there.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store: Any = PrefixStore(f"attempt{attempt}", store)  # Any: its set takes bytes, too
        dist.init_process_group(
            self._backend,
            store=self._store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=self._limit,
            device_id=self.device if self._backend == "nccl" else None,
        )
        if dist.get_world_size() != self.world_size:
            raise WorkerError("the process group is not whole", hint="see the launcher's messages")

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def wrap(self, module: nn.Module, *, reduction: Reduction = "mean") -> nn.Module:
        """Wrap with the flags of ``train.ddp``."""
        options = self._train.ddp
        sync: dict[str, Any] = {_SYNC_BUFFERS: options.forward_sync_buffers}
        wrapped = DistributedDataParallel(
            module,
            process_group=self._group,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            static_graph=options.static_graph and self._train.grad_accum_steps == 1,
            bucket_cap_mb=options.bucket_cap_mb,
            **sync,
        )
        if reduction == "sum":
            wrapped.register_comm_hook(self._group, _sum_of_ranks)
        elif self._tracer:
            wrapped.register_comm_hook(None, self._tracer.hook(self._group))
        return wrapped

    def no_sync(self, module: nn.Module) -> AbstractContextManager[Any]:
        """No all-reduce within the block; a compiled wrapper passes the attribute on."""
        context: AbstractContextManager[Any] = module.no_sync()  # type: ignore[operator]
        return context

    def require_reduced(self, module: nn.Module) -> None:
        """Have the wrapper say now what it would say at the next forward pass, where none follows."""
        module.reducer._rebuild_buckets()  # type: ignore[operator,union-attr]  # which begins with that check

    def all_reduce(self, values: Tensor, *, maximum: bool = False) -> Tensor:
        """The sum or the maximum over the process group."""
        reduced = values.clone()
        dist.all_reduce(reduced, op=dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, group=self._group)
        return reduced

    def all_reduce_(self, values: Tensor) -> None:
        """The sum over the process group, in place."""
        dist.all_reduce(values, group=self._group)

    def all_gather(self, values: Tensor) -> Tensor:
        """Values of the whole process group; ranks must hold the same shape."""
        parts = [torch.empty_like(values) for _ in range(self.world_size)]
        dist.all_gather(parts, values.contiguous())
        return torch.stack(parts)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """What each rank has, over the store, which needs no room on a device."""
        key = f"samebits/bytes{next(self._numbers)}"
        self._store.set(f"{key}/{self.rank}", data)
        keys = [f"{key}/{rank}" for rank in range(self.world_size)]
        self._store.wait(keys, self._limit)
        return [self._store.get(one) for one in keys]

    def broadcast(self, values: Tensor) -> None:
        """What rank 0 has, over the process group, in pieces for which every device has room."""
        if not values.numel():
            return
        for piece in torch.split(values.flatten().view(torch.uint8), _PIECE_BYTES):
            moved = piece.to(self.device)
            dist.broadcast(moved, src=0)
            piece.copy_(moved)

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()

    def first_alone(self, work: Callable[[], T]) -> T | None:
        """What ``work`` gives on rank 0; the others wait on the store, where no time limit of a collective ends it."""
        key = f"samebits/work{next(self._numbers)}"
        if self.rank == 0:
            result = work()
            self._store.set(key, "done")
            return result
        while not self._store.check([key]):
            time.sleep(_POLL_SECONDS)
        return None

    def traced(self, tracer: Tracer) -> DDPStrategy:
        """The same, with a communication hook that notes."""
        traced = copy.copy(self)
        traced._tracer = tracer
        return traced

    def within(self, groups: Sequence[Sequence[int]]) -> DDPStrategy:
        """The same, whose gradients, sums and maxima are those of a group; all else is still of all ranks."""
        within = copy.copy(self)
        within._group, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
            [list(ranks) for ranks in groups], timeout=self._limit
        )
        return within


def _hold_to_ring(environ: MutableMapping[str, str]) -> None:
    """Choose the algorithm whose order of additions does not change between calls, as that of trees and NVLS does."""
    chosen = environ.setdefault("NCCL_ALGO", "Ring")
    if chosen.lower() != "ring":
        raise UserError(
            f"NCCL_ALGO is {chosen}, and train.ddp.deterministic holds NCCL to Ring",
            hint="unset NCCL_ALGO, or set train.ddp.deterministic: false",
        )


def _sum_of_ranks(group, bucket):  # type: ignore[no-untyped-def]  # DDP reads types
    """Communication hook: DDP's own all-reduce without its division by the number of ranks."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


Strategy = SingleDeviceStrategy


def make_strategy(placement: Placement, train: Train) -> Strategy:
    """The strategy object of this worker; for ``ddp`` its rank comes from the launcher's environment."""
    cuda = placement.device_type == "cuda"
    devices = [torch.device("cuda", index) if cuda else torch.device("cpu") for index in placement.devices]
    match placement.strategy:
        case "single":
            return SingleDeviceStrategy(devices[0])
        case "dp":
            return DataParallelStrategy(devices)
        case "ddp":
            ring = any(note.kind == "ring" for note in placement.notes)
            return DDPStrategy(devices[int(os.environ["RANK"])], placement.backend, train, ring=ring)
