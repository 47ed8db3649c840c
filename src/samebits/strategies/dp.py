"""The strategy ``dp``, PyTorch's ``nn.DataParallel``: one process, and a replica of the module on each GPU per step.

Without CUDA or with one GPU, the wrapper runs the plain module, and the placement has a label that says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from samebits.remarks import Fallback, UnusedDevices
from samebits.strategies.interface import Strategy
from samebits.strategies.placement import Placement, oversubscribed

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from samebits.batch_split import BatchSplit
    from samebits.strategies.interface import Wrapping
    from samebits.strategies.placement import Request


def _place(request: Request) -> tuple[Placement, BatchSplit]:
    here, whole = request.here, request.whole
    (count,), notes = request.counts(uneven=True)
    if not here.gpus or count == 1:
        placement = Placement(
            strategy=request.strategy,
            device_type=here.device_type,
            num_devices=count,
            rows_per_device=whole.rows_per_device,
            labels=(Fallback(gpus=here.gpus),),
            notes=notes,
        )
        return placement, whole
    split, labels = whole.over(devices=count), oversubscribed([here], [count])
    if split.busy_devices < count:
        units, chunks = split.units_at_a_time, split.busy_devices
        labels.append(UnusedDevices(units=units, unit=split.unit, chunks=chunks, devices=count))
    placement = Placement(
        strategy=request.strategy,
        device_type="cuda",
        num_devices=count,
        devices_used=split.busy_devices,
        rows_per_device=split.rows_per_device,
        devices=tuple(i % here.gpus for i in range(count)),
        labels=tuple(labels),
        notes=notes,
    )
    return placement, split


def _wrap(module: nn.Module, how: Wrapping) -> nn.Module:
    from samebits.strategies.replicas import Replicas

    return Replicas(module, device_ids=list(how.devices) if how.devices[0].type == "cuda" else None)


def _note_phases(module: nn.Module, notes: Callable[[Any], None]) -> None:
    module.notes = notes  # type: ignore[assignment]


DP = Strategy(
    name="dp",
    place=_place,
    gathers=True,
    compiles=False,
    not_applied={"train.compile": "dp_is_not_compiled", "train.cuda_graphs": "graphs_under_dp"},
    wrap=_wrap,
    note_phases=_note_phases,
)
