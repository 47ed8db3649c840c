"""The devices and labels of a training, decided before anything starts."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import PositiveInt

from samebits.errors import HostError, UserError
from samebits.files import Part
from samebits.remarks import Fallback, FewerDevices, Label, Note, Oversubscribed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from samebits.batch_split import BatchSplit
    from samebits.section import Section

MAX_CPU_DEVICES = 2


class Placement(Part):
    """The devices of a training, by default one.

    ``devices`` are CUDA indices, by local rank for ``ddp`` and as ``device_ids`` for ``dp``; on a CPU they only number
    the single-threaded devices. ``num_devices`` were requested; ``devices_used`` get samples, at most
    ``rows_per_device`` at a time. ``devices_by_node`` is empty on one machine. On several machines ("nodes"),
    ``devices`` are those of all machines, by rank.
    """

    NOT_A_SPEEDUP: ClassVar = frozenset({"fallback", "oversubscribed", "one_device"})

    strategy: str
    device_type: Literal["cpu", "cuda"]
    num_devices: PositiveInt = 1
    devices_used: PositiveInt = 1
    rows_per_device: PositiveInt
    world_size: PositiveInt = 1
    devices: tuple[int, ...] = (0,)
    devices_by_node: tuple[int, ...] = ()
    backend: Literal["gloo", "nccl"] | None = None
    labels: tuple[Label, ...] = ()
    notes: tuple[Note, ...] = ()

    @property
    def has_ranks(self) -> bool:
        """Whether each device has its own process in a process group, even if there is only one device."""
        return self.backend is not None

    @property
    def ranks_by_node(self) -> list[range]:
        """The ranks of each machine; empty on one machine."""
        ends = list(itertools.accumulate(self.devices_by_node))
        return [range(end - count, end) for end, count in zip(ends, self.devices_by_node, strict=True)]

    @property
    def fallback(self) -> Fallback | None:
        """The label of a training that ran as ``single`` does, under another name; else None."""
        return next((label for label in self.labels if isinstance(label, Fallback)), None)

    @property
    def may_speed_up(self) -> bool:
        """Whether a ratio to ``single`` is meaningful."""
        return self.devices_used > 1 and not any(label.kind in self.NOT_A_SPEEDUP for label in self.labels)


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices of one machine, and how many of them are ``wanted``; ``machine`` identifies it.

    Several containers may run on one machine, with separate GPUs or the same: ``uuids`` show which, if they are known.
    """

    gpus: int
    cores: int
    wanted: int | Literal["auto"] = "auto"
    name: str = "this host"
    machine: str = ""
    uuids: tuple[str, ...] = ()

    @property
    def existing(self) -> int:
        """The number of GPUs if there are any, else of cores."""
        return self.gpus or self.cores

    @property
    def available(self) -> int:
        """The most devices that ``auto`` takes: all GPUs, or two CPU cores."""
        return self.gpus or min(self.cores, MAX_CPU_DEVICES)

    @property
    def device_type(self) -> Literal["cpu", "cuda"]:
        """The type of device that a training uses."""
        return "cuda" if self.gpus else "cpu"

    @property
    def kind(self) -> str:
        """The noun for what ``existing`` counts."""
        return "GPU" if self.gpus else "CPU core"


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request to place the ``whole`` batch over ``nodes``; ``settings`` are the strategy's own."""

    strategy: str
    numerics: str
    whole: BatchSplit
    nodes: Sequence[Devices]
    oversubscribe: bool = False
    settings: Section | None = None

    @property
    def here(self) -> Devices:
        """The only machine. Raises UserError: there are several."""
        if len(self.nodes) > 1:
            hint = "start it on one machine, or train with ddp"
            raise UserError(f"{self.strategy} uses one machine, and {len(self.nodes)} were started", hint=hint)
        return self.nodes[0]

    def counts(self, *, uneven: bool = False) -> tuple[list[int], tuple[Note, ...]]:
        """Devices of each machine, and notes. With ``uneven``, some devices may get fewer samples or none.

        Raises:
            HostError: more devices are requested than exist, without ``train.oversubscribe``.
            UserError: the batch cannot be divided over the requested devices.
        """
        whole, nodes = self.whole, self.nodes
        for node in nodes:
            if node.wanted != "auto" and node.wanted > node.existing and not self.oversubscribe:
                text = f"train.num_devices: got {node.wanted}, {node.name} has {node.existing} {node.kind}s"
                raise HostError(text, hint="lower it, use auto, or set train.oversubscribe: true")
        most = [node.available if node.wanted == "auto" else node.wanted for node in nodes]
        if whole.shards is None and len({*most}) > 1:
            counted = ", ".join(f"{node.name} {count}" for node, count in zip(nodes, most, strict=True))
            raise UserError(
                f"fast needs as many devices on each machine, and they have: {counted}",
                hint="set train.num_devices, or train in exact, where shards are shared out",
            )
        if all(node.wanted == "auto" for node in nodes):
            fitting = (n for n in range(max(most), 0, -1) if whole.over(ranks=sum(min(n, one) for one in most)).even)
            each = next(fitting, max(most))
            counts = [min(each, one) for one in most]
        else:
            counts = most
        self._require_parts(sum(counts), uneven=uneven)
        if counts == most:
            return counts, ()
        fewer = FewerDevices(
            devices=sum(counts), available=sum(most), units=whole.units, unit=whole.unit, nodes=len(nodes)
        )
        return counts, (fewer,)

    def _require_parts(self, count: int, *, uneven: bool) -> None:
        whole, several = self.whole, len(self.nodes) > 1
        more = "raise exact.shards" if whole.shards else "change train.global_batch_size or train.num_devices"
        if several and not whole.over(ranks=count).even:
            what = f"{len(self.nodes)} machines have {count} devices for {whole.units} {whole.unit} of a batch"
            raise UserError(what, hint=more)
        if count > whole.units:
            raise UserError(
                f"train.num_devices: got {count} devices for {whole.units} {whole.unit}, accepts at most {whole.units}",
                hint=more if whole.shards else "raise train.global_batch_size or lower train.grad_accum_steps",
            )
        if not uneven and not whole.over(ranks=count).even:
            raise UserError(
                f"train.num_devices: got {count}, accepts a divisor of the {whole.units} {whole.unit} that "
                f"{self.strategy} shares out",
                hint="change train.global_batch_size or train.num_devices",
            )


def oversubscribed(nodes: Sequence[Devices], counts: Sequence[int]) -> list[Label]:
    """A label for each machine with more workers than devices; several nodes, such as containers, may share one."""
    labels: list[Label] = []
    for machine in dict.fromkeys(node.machine for node in nodes):
        here = [(node, count) for node, count in zip(nodes, counts, strict=True) if node.machine == machine]
        node = max((node for node, _ in here), key=lambda node: node.existing)
        named = {uuid for node, _ in here for uuid in node.uuids}
        existing = len(named) if all(node.uuids for node, _ in here) else node.existing
        total = sum(count for _, count in here)
        if total > existing:
            name = node.name if len(counts) > 1 else None
            labels.append(Oversubscribed(workers=total, devices=existing, device=node.kind, node=name))
    return labels
