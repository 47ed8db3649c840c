"""Decide, before anything starts, which devices a strategy gets and what its figures may be called."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from samebits.errors import HostError, UserError

if TYPE_CHECKING:
    from samebits.params.schema import StrategyName, Train

LabelKind = Literal["fallback", "oversubscribed", "one_device", "unused_devices"]
NOT_A_SPEEDUP = frozenset({"fallback", "oversubscribed", "one_device"})
MAX_CPU_DEVICES = 2


@dataclass(frozen=True)
class Label:
    """Something that a reader must know of a result; ``text`` is a sentence for people."""

    kind: LabelKind
    text: str


@dataclass(frozen=True)
class Placement:
    """The devices of one training.

    ``devices`` are CUDA indices, by local rank for ``ddp`` and as ``device_ids`` for ``dp``; on a CPU they only
    number the single-threaded devices. ``num_devices`` was asked for, ``devices_used`` really get samples, at most
    ``rows_per_device`` of them at a time.
    """

    strategy: StrategyName
    device_type: Literal["cpu", "cuda"]
    num_devices: int
    devices_used: int
    rows_per_device: int
    world_size: int
    devices: tuple[int, ...]
    backend: Literal["gloo", "nccl"] | None
    labels: tuple[Label, ...]
    notes: tuple[str, ...]

    @property
    def may_speed_up(self) -> bool:
        """Whether a ratio to ``single`` means anything."""
        return self.devices_used > 1 and not any(label.kind in NOT_A_SPEEDUP for label in self.labels)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for run.json."""
        return asdict(self)


def chunks(rows: int, devices: int) -> int:
    """Parts that ``Tensor.chunk`` really makes of ``rows``, which is how ``DataParallel`` splits."""
    size = -(-rows // devices)
    return -(-rows // size)


def place(strategy: StrategyName, train: Train, *, gpus: int, cores: int) -> Placement:
    """Choose the devices for ``strategy`` on a host with so many visible GPUs and usable cores.

    Raises:
        HostError: more devices are asked for than exist, without ``train.oversubscribe``.
        UserError: the batch cannot be split over the devices that are asked for.
    """
    device_type: Literal["cpu", "cuda"] = "cuda" if gpus else "cpu"
    existing = gpus or cores
    rows = train.global_batch_size // train.grad_accum_steps
    if strategy == "single":
        return Placement("single", device_type, 1, 1, rows, 1, (0,), None, (), ())
    asked, notes = train.num_devices, []
    if asked == "auto":
        available = gpus or min(cores, MAX_CPU_DEVICES)
        count = max(n for n in range(1, available + 1) if rows % n == 0)
        if count < available:
            notes.append(f"{strategy}: {count} of {available} devices, the most that divide {rows} samples equally")
    else:
        count = asked
        if count > existing and not train.oversubscribe:
            kind = "GPUs" if gpus else "CPU cores"
            raise HostError(
                f"train.num_devices: got {count}, this host has {existing} {kind}",
                hint="lower it, use auto, or set train.oversubscribe: true",
            )
        if count > rows:
            raise UserError(
                f"train.num_devices: got {count} devices for {rows} samples at a time, accepts at most {rows}",
                hint="raise train.global_batch_size or lower train.grad_accum_steps",
            )
        if strategy == "ddp" and rows % count:
            raise UserError(
                f"train.num_devices: got {count}, accepts a divisor of the {rows} samples that ddp splits at a time",
                hint="change train.global_batch_size or train.num_devices",
            )
    devices = tuple(i % gpus for i in range(count)) if gpus else tuple(range(count))
    if strategy == "dp":
        return _place_dp(device_type, count, devices, existing, rows, notes)
    labels = _sharing(count, existing, device_type)
    if count == 1:
        labels.append(Label("one_device", "ddp ran with a world size of 1: one process, nothing to reduce"))
    nccl = device_type == "cuda" and count <= gpus
    return Placement(
        "ddp",
        device_type,
        count,
        count,
        rows // count,
        count,
        devices,
        "nccl" if nccl else "gloo",
        tuple(labels),
        tuple(notes),
    )


def _place_dp(
    device_type: Literal["cpu", "cuda"],
    count: int,
    devices: tuple[int, ...],
    existing: int,
    rows: int,
    notes: list[str],
) -> Placement:
    if device_type == "cpu" or count == 1:
        why = "no CUDA device is visible" if device_type == "cpu" else "one GPU is used"
        label = Label("fallback", f"{why}, so DataParallel ran the plain module on one device")
        return Placement("dp", device_type, count, 1, rows, 1, devices[:1], None, (label,), tuple(notes))
    labels, used = _sharing(count, existing, device_type), chunks(rows, count)
    if used < count:
        text = f"DataParallel cuts {rows} samples into {used} chunks, so {count - used} of {count} devices get none"
        labels.append(Label("unused_devices", text))
    return Placement("dp", device_type, count, used, -(-rows // count), 1, devices, None, tuple(labels), tuple(notes))


def _sharing(count: int, existing: int, device_type: str) -> list[Label]:
    if count <= existing:
        return []
    kind = "GPU" if device_type == "cuda" else "CPU core"
    return [Label("oversubscribed", f"{count} workers share {existing} {kind}{'s' if existing > 1 else ''}")]


def not_applied(train: Train, placement: Placement, *, tf32: bool) -> dict[str, str]:
    """Settings that are right but do nothing in this training, each with the reason; ``tf32``: the GPU has it."""
    found = {}
    if train.compile and placement.strategy == "dp":
        found["train.compile"] = "torch.compile is not combined with DataParallel"
    if train.precision == "tf32" and placement.device_type == "cpu":
        found["train.precision"] = "tf32 is a mode of NVIDIA GPUs; float32 was used"
    elif train.precision == "tf32" and not tf32:
        found["train.precision"] = "this GPU is older than tf32 (compute capability 8.0); float32 was used"
    if train.ddp.static_graph and train.grad_accum_steps > 1 and placement.strategy == "ddp":
        found["train.ddp.static_graph"] = "PyTorch cannot combine it with gradient accumulation"
    if train.optimizer.name == "adamw" and train.optimizer.momentum:
        found["train.optimizer.momentum"] = "AdamW has no momentum setting"
    if train.num_devices != "auto" and train.num_devices > placement.num_devices:
        found["train.num_devices"] = "single always uses one device"
    return found
