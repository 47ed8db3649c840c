"""Decide, before anything starts, which devices a strategy gets and what its figures may be called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from samebits.errors import HostError, UserError
from samebits.params.split import BatchSplit
from samebits.records.remarks import AnyOrder, Fallback, FewerDevices, OneDevice, Oversubscribed, Ring, UnusedDevices
from samebits.records.run import Placement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from samebits.params import Params
    from samebits.params.schema import NumericsName, StrategyName, Train
    from samebits.records.remarks import Label, NotAppliedKind, Note

MAX_CPU_DEVICES = 2
_TOO_MANY = "lower it, use auto, or set train.oversubscribe: true"


@dataclass(frozen=True, kw_only=True)
class Devices:
    """What one machine has, and how many of its devices are asked for; ``machine`` tells it from others.

    Several containers may be of one, each with GPUs of its own, or with the same: ``uuids`` tell, where they are known.
    """

    gpus: int
    cores: int
    wanted: int | Literal["auto"] = "auto"
    name: str = ""
    machine: str = ""
    uuids: tuple[str, ...] = ()

    @property
    def existing(self) -> int:
        """GPUs where there are any, else cores."""
        return self.gpus or self.cores

    @property
    def kind(self) -> str:
        """What ``existing`` counts."""
        return "GPU" if self.gpus else "CPU core"


def place(
    strategy: StrategyName, params: Params, numerics: NumericsName, *, gpus: int, cores: int
) -> tuple[Placement, BatchSplit]:
    """Choose the devices for ``strategy`` on a host with so many visible GPUs and usable cores, and split the batch.

    Raises:
        HostError: more devices are asked for than exist, without ``train.oversubscribe``.
        UserError: the batch cannot be split over the devices that are asked for.
    """
    here = Devices(gpus=gpus, cores=cores, wanted=params.train.num_devices)
    whole = BatchSplit.of(params, numerics)
    if strategy == "single":
        device_type: Literal["cpu", "cuda"] = "cuda" if gpus else "cpu"
        return Placement(strategy=strategy, device_type=device_type, rows_per_device=whole.rows_per_device), whole
    count, notes = _count(strategy, params.train, whole, here)
    if strategy == "dp":
        return _place_dp(whole, here, count, notes)
    return _place_ranks(strategy, params.train, numerics, whole=whole, nodes=[here], counts=[count], notes=notes)


def place_over_nodes(
    strategy: StrategyName, params: Params, numerics: NumericsName, nodes: Sequence[Devices]
) -> tuple[Placement, BatchSplit]:
    """Choose the devices of each of several machines, all of which have GPUs or none has.

    In ``exact`` they may differ in number, since shards stay whole.

    Raises:
        HostError: see ``place``.
        UserError: see ``place``; or the strategy has no ranks, or machines would get unequal parts in ``fast``.
    """
    if strategy in ("single", "dp"):
        hint = "start it on one machine, or train with ddp"
        raise UserError(f"{strategy} uses one machine, and {len(nodes)} were started", hint=hint)
    train, whole = params.train, BatchSplit.of(params, numerics)
    for node in nodes:
        if node.wanted != "auto" and node.wanted > node.existing and not train.oversubscribe:
            text = f"train.num_devices: got {node.wanted}, {node.name} has {node.existing} {node.kind}s"
            raise HostError(text, hint=_TOO_MANY)
    most = [_available(node) if node.wanted == "auto" else node.wanted for node in nodes]
    if whole.shards is None and len({*most}) > 1:
        counted = ", ".join(f"{node.name} {count}" for node, count in zip(nodes, most, strict=True))
        raise UserError(
            f"fast needs as many devices on each machine, and they have: {counted}",
            hint="set train.num_devices, or train in exact, where shards are shared out",
        )
    counts = most
    notes: tuple[Note, ...] = ()
    if all(node.wanted == "auto" for node in nodes):
        fitting = (n for n in range(max(most), 0, -1) if whole.over(ranks=sum(min(n, one) for one in most)).even)
        each = next(fitting, max(most))
        counts = [min(each, one) for one in most]
        if counts != most:
            notes = (_fewer_devices(sum(counts), sum(most), whole, nodes=len(nodes)),)
    if not whole.over(ranks=sum(counts)).even:
        raise UserError(
            f"{len(nodes)} machines have {sum(counts)} devices for {whole.units} {whole.unit} of a batch",
            hint="raise exact.shards" if whole.shards else "change train.global_batch_size or train.num_devices",
        )
    return _place_ranks(strategy, train, numerics, whole=whole, nodes=nodes, counts=counts, notes=notes)


def _place_dp(whole: BatchSplit, here: Devices, count: int, notes: tuple[Note, ...]) -> tuple[Placement, BatchSplit]:
    labels = _oversubscribed([here], [count])
    if not here.gpus or count == 1:
        placement = Placement(
            strategy="dp",
            device_type="cuda" if here.gpus else "cpu",
            num_devices=count,
            rows_per_device=whole.rows_per_device,
            labels=(Fallback(gpus=here.gpus),),
            notes=notes,
        )
        return placement, whole
    split = whole.over(devices=count)
    if split.busy_devices < count:
        units, chunks = split.units_at_a_time, split.busy_devices
        labels.append(UnusedDevices(units=units, unit=split.unit, chunks=chunks, devices=count))
    placement = Placement(
        strategy="dp",
        device_type="cuda",
        num_devices=count,
        devices_used=split.busy_devices,
        rows_per_device=split.rows_per_device,
        devices=tuple(i % here.gpus for i in range(count)),
        labels=tuple(labels),
        notes=notes,
    )
    return placement, split


def _place_ranks(
    strategy: StrategyName,
    train: Train,
    numerics: NumericsName,
    *,
    whole: BatchSplit,
    nodes: Sequence[Devices],
    counts: Sequence[int],
    notes: tuple[Note, ...],
) -> tuple[Placement, BatchSplit]:
    """One rank for each device; ranks are numbered by machine."""
    count = sum(counts)
    split = whole.over(ranks=count)
    labels = _oversubscribed(nodes, counts)
    if count == 1:
        labels.append(OneDevice(strategy=strategy))
    devices = [i % (node.gpus or one) for node, one in zip(nodes, counts, strict=True) for i in range(one)]
    own_gpus = all(0 < one <= node.gpus for node, one in zip(nodes, counts, strict=True))
    used = [uuid for node, one in zip(nodes, counts, strict=True) for uuid in node.uuids[:one]]
    own_gpus = own_gpus and len({*used}) == len(used)  # NCCL takes no GPU twice
    backend: Literal["gloo", "nccl"] = "nccl" if own_gpus else "gloo"
    if backend == "nccl" and count > 1 and numerics == "fast":  # sums in exact are the same in any order
        if train.ddp.deterministic:
            notes += (Ring(),)
        else:
            labels.append(AnyOrder())
    placement = Placement(
        strategy=strategy,
        device_type="cuda" if nodes[0].gpus else "cpu",
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


def _oversubscribed(nodes: Sequence[Devices], counts: Sequence[int]) -> list[Label]:
    """A label for each machine with more workers than devices; containers and the like may share one."""
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


def _fewer_devices(used: int, available: int, whole: BatchSplit, *, nodes: int = 1) -> Note:
    return FewerDevices(devices=used, available=available, units=whole.units, unit=whole.unit, nodes=nodes)


def _available(node: Devices) -> int:
    return node.gpus or min(node.cores, MAX_CPU_DEVICES)


def _count(strategy: StrategyName, train: Train, whole: BatchSplit, here: Devices) -> tuple[int, tuple[Note, ...]]:
    """How many devices ``dp`` or ``ddp`` gets."""
    if train.num_devices == "auto":
        available = _available(here)
        count = max(n for n in range(1, available + 1) if whole.over(ranks=n).even)
        if count == available:
            return count, ()
        return count, (_fewer_devices(count, available, whole),)
    count = train.num_devices
    if count > here.existing and not train.oversubscribe:
        text = f"train.num_devices: got {count}, this host has {here.existing} {here.kind}s"
        raise HostError(text, hint=_TOO_MANY)
    if count > whole.units:
        raise UserError(
            f"train.num_devices: got {count} devices for {whole.units} {whole.unit}, accepts at most {whole.units}",
            hint="raise exact.shards"
            if whole.shards
            else "raise train.global_batch_size or lower train.grad_accum_steps",
        )
    if strategy != "dp" and not whole.over(ranks=count).even:
        raise UserError(
            f"train.num_devices: got {count}, accepts a divisor of the {whole.units} {whole.unit} that {strategy} "
            "shares out",
            hint="change train.global_batch_size or train.num_devices",
        )
    return count, ()


def not_applied(train: Train, placement: Placement, numerics: NumericsName, *, tf32: bool) -> dict[str, NotAppliedKind]:
    """Settings that are right but do nothing in this training, each with the reason; ``tf32``: the GPU has it."""
    reasons: dict[str, NotAppliedKind] = {}
    if numerics == "exact":
        if train.compile:
            reasons["train.compile"] = "exact_is_not_compiled"
        if train.precision != "fp32":
            reasons["train.precision"] = "exact_is_fp32"
    else:
        if train.compile and placement.strategy == "dp":
            reasons["train.compile"] = "dp_is_not_compiled"
        if train.precision == "tf32" and placement.device_type == "cpu":
            reasons["train.precision"] = "no_tf32_on_cpu"
        elif train.precision == "tf32" and not tf32:
            reasons["train.precision"] = "gpu_before_tf32"
    if train.cuda_graphs and (why := _no_graphs(train, placement, numerics)):
        reasons["train.cuda_graphs"] = why
    if train.ddp.static_graph and train.grad_accum_steps > 1 and placement.has_ranks:
        reasons["train.ddp.static_graph"] = "static_graph_with_accumulation"
    usual = type(train.optimizer).model_fields["momentum"].default  # which nobody need have written
    if train.optimizer.name == "adamw" and train.optimizer.momentum not in (0.0, usual):
        reasons["train.optimizer.momentum"] = "adamw_has_no_momentum"
    if train.num_devices != "auto" and train.num_devices > placement.num_devices:
        reasons["train.num_devices"] = "single_has_one_device"
    return reasons


def _no_graphs(train: Train, placement: Placement, numerics: NumericsName) -> NotAppliedKind | None:
    if numerics == "exact":
        return "graphs_in_exact"
    if placement.strategy == "dp":
        return "graphs_under_dp"
    return train.why_no_graphs(placement.device_type)
