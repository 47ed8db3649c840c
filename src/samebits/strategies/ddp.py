"""The strategy ``ddp``, PyTorch's ``DistributedDataParallel``: one process per device, also on several machines."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from samebits.errors import UserError
from samebits.remarks import AnyOrder, OneDevice, Ring
from samebits.section import Section
from samebits.strategies.interface import Strategy
from samebits.strategies.placement import Placement, oversubscribed

if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from contextlib import AbstractContextManager

    from torch import nn

    from samebits.batch_split import BatchSplit
    from samebits.strategies.interface import Wrapping
    from samebits.strategies.placement import Request


class DDPOptions(Section):
    """Flags handed to ``DistributedDataParallel``."""

    gradient_as_bucket_view: bool = True
    """Let gradients share memory with the communication buckets."""
    static_graph: bool = False
    """Promise that every step uses the same parameters."""
    bucket_cap_mb: int = Field(25, ge=1, le=1024)
    """Size of a communication bucket in MiB."""
    forward_sync_buffers: bool = True
    """Give every rank rank 0's buffers before each forward pass; else each keeps its own, and rank 0's are saved."""
    sync_batchnorm: bool = False
    """Normalise by the batch of all ranks, by PyTorch's SyncBatchNorm in the place of BatchNorm; of fast on GPUs."""
    deterministic: bool = True
    """Hold NCCL to its ring algorithm, so that runs repeat bit by bit; false lets it choose, which may be faster."""

    def synchronizes(self, device_type: str) -> bool:
        """Whether BatchNorm becomes PyTorch's SyncBatchNorm, which is of GPUs alone."""
        return self.sync_batchnorm and device_type == "cuda"


def _place(request: Request) -> tuple[Placement, BatchSplit]:
    """Give each device a rank; ranks are numbered machine by machine."""
    nodes = request.nodes
    counts, notes = request.counts()
    count = sum(counts)
    split, labels = request.whole.over(ranks=count), oversubscribed(nodes, counts)
    if count == 1:
        labels.append(OneDevice(strategy=request.strategy))
    devices = [i % (node.gpus or one) for node, one in zip(nodes, counts, strict=True) for i in range(one)]
    own_gpus = all(0 < one <= node.gpus for node, one in zip(nodes, counts, strict=True))
    used = [uuid for node, one in zip(nodes, counts, strict=True) for uuid in node.uuids[:one]]
    own_gpus = own_gpus and len({*used}) == len(used)  # NCCL refuses two ranks on one GPU
    backend: Literal["gloo", "nccl"] = "nccl" if own_gpus else "gloo"
    if backend == "nccl" and count > 1 and request.numerics == "fast":  # in exact, sums are the same in any order
        assert isinstance(request.settings, DDPOptions)
        if request.settings.deterministic:
            notes += (Ring(),)
        else:
            labels.append(AnyOrder())
    placement = Placement(
        strategy=request.strategy,
        device_type=nodes[0].device_type,
        num_devices=count,
        devices_used=count,
        rows_per_device=split.rows_per_device,
        world_size=count,
        devices=tuple(devices),
        devices_by_node=tuple(counts) if len(counts) > 1 else (),
        backend=backend,
        labels=tuple(labels),
        notes=notes,
    )
    return placement, split


def _prepare(placement: Placement, environ: MutableMapping[str, str]) -> None:
    """Select NCCL's ring algorithm: trees and NVLS may change the order of additions between calls."""
    if not any(isinstance(note, Ring) for note in placement.notes):
        return
    chosen = environ["NCCL_ALGO"] = environ.get("NCCL_ALGO") or "Ring"
    if chosen.lower() != "ring":
        raise UserError(
            f"NCCL_ALGO is {chosen}, and train.ddp.deterministic holds NCCL to Ring",
            hint="unset NCCL_ALGO, or set train.ddp.deterministic: false",
        )


def _wrap(module: nn.Module, how: Wrapping) -> nn.Module:
    from torch.nn import SyncBatchNorm
    from torch.nn.parallel import DistributedDataParallel

    options = how.settings
    assert isinstance(options, DDPOptions)
    if options.synchronizes(how.devices[0].type):
        module = SyncBatchNorm.convert_sync_batchnorm(module, how.group)  # type: ignore[no-untyped-call]
    # Before 2.12, PyTorch had a single flag for the first and all later forward passes.
    flags = inspect.signature(DistributedDataParallel).parameters
    sync = "forward_sync_buffers" if "forward_sync_buffers" in flags else "broadcast_buffers"
    wrapped = DistributedDataParallel(
        module,
        process_group=how.group,
        device_ids=list(how.devices) if how.devices[0].type == "cuda" else None,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        static_graph=options.static_graph and not how.accumulates,
        bucket_cap_mb=options.bucket_cap_mb,
        **{sync: options.forward_sync_buffers},  # type: ignore[arg-type]
    )
    if how.reduction == "sum":
        wrapped.register_comm_hook(how.group, _sum_of_ranks)
    elif how.hook:
        wrapped.register_comm_hook(None, how.hook)
    return wrapped


def _sum_of_ranks(group, bucket):  # type: ignore[no-untyped-def]  # DDP reads types
    """Communication hook: DDP's own all-reduce, without the division by the number of ranks."""
    import torch.distributed as dist

    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def _no_sync(module: nn.Module) -> AbstractContextManager[Any]:
    """A block without all-reduces; a compiled wrapper forwards the attribute."""
    context: AbstractContextManager[Any] = module.no_sync()  # type: ignore[operator]
    return context


def _require_reduced(module: nn.Module) -> None:
    """Run the wrapper's check for unreduced gradients, which would otherwise run at the next forward pass."""
    module.reducer._rebuild_buckets()  # type: ignore[operator,union-attr]  # it begins with the check


DDP = Strategy(
    name="ddp",
    settings="ddp",
    place=_place,
    has_ranks=True,
    prepare=_prepare,
    wrap=_wrap,
    no_sync=_no_sync,
    require_reduced=_require_reduced,
)
