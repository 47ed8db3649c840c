"""Decide, before anything starts, which devices a strategy gets and what its figures may be called."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from samebits.errors import HostError, UserError

if TYPE_CHECKING:
    from samebits.params.schema import NumericsName, StrategyName, Train

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


def place(strategy: StrategyName, train: Train, *, gpus: int, cores: int, shards: int | None = None) -> Placement:
    """Choose the devices for ``strategy`` on a host with so many visible GPUs and usable cores.

    With ``shards``, as in the exact numerics, a batch is shared out by whole shards, of which devices may have
    different numbers; without, by samples.

    Raises:
        HostError: more devices are asked for than exist, without ``train.oversubscribe``.
        UserError: the batch cannot be split over the devices that are asked for.
    """
    device_type: Literal["cpu", "cuda"] = "cuda" if gpus else "cpu"
    existing = gpus or cores
    split = Split(train, shards)
    if strategy == "single":
        return Placement("single", device_type, 1, 1, split.rows(1, "single"), 1, (0,), None, (), ())
    asked, notes = train.num_devices, []
    if asked == "auto":
        available = gpus or min(cores, MAX_CPU_DEVICES)
        count = max(n for n in range(1, available + 1) if split.fits(n, "ddp"))
        if count < available:
            notes.append(f"{strategy}: {count} of {available} devices, the most that divide {split} equally")
    else:
        count = asked
        if count > existing and not train.oversubscribe:
            kind = "GPUs" if gpus else "CPU cores"
            raise HostError(
                f"train.num_devices: got {count}, this host has {existing} {kind}",
                hint="lower it, use auto, or set train.oversubscribe: true",
            )
        if count > split.units:
            raise UserError(
                f"train.num_devices: got {count} devices for {split}, accepts at most {split.units}",
                hint="raise exact.shards"
                if shards
                else "raise train.global_batch_size or lower train.grad_accum_steps",
            )
        if not split.fits(count, strategy):
            raise UserError(
                f"train.num_devices: got {count}, accepts a divisor of the {split} that ddp shares out",
                hint="change train.global_batch_size or train.num_devices",
            )
    devices = tuple(i % gpus for i in range(count)) if gpus else tuple(range(count))
    if strategy == "dp":
        return _place_dp(device_type, count, devices, existing, split, notes)
    labels = _sharing(count, existing, device_type)
    if count == 1:
        labels.append(Label("one_device", "ddp ran with a world size of 1: one process, nothing to reduce"))
    nccl = device_type == "cuda" and count <= gpus
    return Placement(
        "ddp",
        device_type,
        count,
        count,
        split.rows(count, "ddp"),
        count,
        devices,
        "nccl" if nccl else "gloo",
        tuple(labels),
        tuple(notes),
    )


class Split:
    """What a batch is shared out by: samples of a micro-batch, or logical shards of the whole batch."""

    def __init__(self, train: Train, shards: int | None) -> None:
        self._accum, self._shards = train.grad_accum_steps, shards
        self.units = shards or train.global_batch_size // self._accum
        self._size = train.global_batch_size // shards if shards else 1

    def __str__(self) -> str:
        return f"{self.units} {'shards' if self._shards else 'samples'}"

    def fits(self, count: int, strategy: StrategyName) -> bool:
        """Whether so many devices can share the batch."""
        return count <= self.units and (strategy == "dp" or self._shards is not None or self.units % count == 0)

    def at_a_time(self, strategy: StrategyName, count: int) -> int:
        """Units that one device, or all of ``dp``, are fed in one micro-batch."""
        if self._shards is None:
            return self.units // count if strategy == "ddp" else self.units
        own = -(-self._shards // count) if strategy == "ddp" else self._shards
        return -(-own // min(self._accum, own))

    def rows(self, count: int, strategy: StrategyName) -> int:
        """Samples that one device gets at most at a time."""
        units = self.at_a_time(strategy, count)
        return self._size * (-(-units // count) if strategy == "dp" else units)


def _place_dp(
    device_type: Literal["cpu", "cuda"],
    count: int,
    devices: tuple[int, ...],
    existing: int,
    split: Split,
    notes: list[str],
) -> Placement:
    if device_type == "cpu" or count == 1:
        why = "no CUDA device is visible" if device_type == "cpu" else "one GPU is used"
        label = Label("fallback", f"{why}, so DataParallel ran the plain module on one device")
        rows = split.rows(1, "dp")
        return Placement("dp", device_type, count, 1, rows, 1, devices[:1], None, (label,), tuple(notes))
    units = split.at_a_time("dp", count)
    labels, used = _sharing(count, existing, device_type), chunks(units, count)
    if used < count:
        what = str(split).replace(str(split.units), str(units), 1)
        text = f"DataParallel cuts {what} into {used} chunks, so {count - used} of {count} devices get none"
        labels.append(Label("unused_devices", text))
    rows = split.rows(count, "dp")
    return Placement("dp", device_type, count, used, rows, 1, devices, None, tuple(labels), tuple(notes))


def _sharing(count: int, existing: int, device_type: str) -> list[Label]:
    if count <= existing:
        return []
    kind = "GPU" if device_type == "cuda" else "CPU core"
    return [Label("oversubscribed", f"{count} workers share {existing} {kind}{'s' if existing > 1 else ''}")]


def not_applied(train: Train, placement: Placement, numerics: NumericsName, *, tf32: bool) -> dict[str, str]:
    """Settings that are right but do nothing in this training, each with the reason; ``tf32``: the GPU has it."""
    found = _not_exact(train) if numerics == "exact" else _not_fast(train, placement, tf32=tf32)
    if train.ddp.static_graph and train.grad_accum_steps > 1 and placement.strategy == "ddp":
        found["train.ddp.static_graph"] = "PyTorch cannot combine it with gradient accumulation"
    if train.optimizer.name == "adamw" and train.optimizer.momentum:
        found["train.optimizer.momentum"] = "AdamW has no momentum setting"
    if train.num_devices != "auto" and train.num_devices > placement.num_devices:
        found["train.num_devices"] = "single always uses one device"
    return found


def _not_fast(train: Train, placement: Placement, *, tf32: bool) -> dict[str, str]:
    found: dict[str, str] = {}
    if train.compile and placement.strategy == "dp":
        found["train.compile"] = "torch.compile is not combined with DataParallel"
    if train.precision == "tf32" and placement.device_type == "cpu":
        found["train.precision"] = "tf32 is a mode of NVIDIA GPUs; float32 was used"
    elif train.precision == "tf32" and not tf32:
        found["train.precision"] = "this GPU is older than tf32 (compute capability 8.0); float32 was used"
    return found


def _not_exact(train: Train) -> dict[str, str]:
    found: dict[str, str] = {}
    if train.compile:
        found["train.compile"] = "a compiler may fuse what the exact numerics round apart"
    if train.precision != "fp32":
        found["train.precision"] = "the exact numerics compute in float32 precision"
    return found
