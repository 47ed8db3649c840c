"""The devices that CUDA would give to a new process, as NVML lists them: GPUs, or one slice of a GPU (MIG).

Nothing here opens CUDA's library, so that the calling process can still fork workers that use CUDA.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import pynvml

from samebits.errors import HostError, counted
from samebits.host.software import require_driver, torch_build

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

VISIBLE = "CUDA_VISIBLE_DEVICES"
# HIP reads an empty list as none, so it gets an index that no GPU has.
_HIDDEN = {VISIBLE: "", "HIP_VISIBLE_DEVICES": "-1", "ROCR_VISIBLE_DEVICES": "-1"}
_NO_DRIVER = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)  # as on a host without a GPU
_HIDES_ALL = ("", "-1", "NoDevFiles")  # values of the variable that hide all GPUs


@dataclass(frozen=True)
class ListedGpu:
    """A GPU that this process may use.

    ``slices`` are NVML's handles of its MIG devices by UUID; None without MIG mode. A GPU that cannot be read has no
    ``uuid``, and ``problem`` says why.
    """

    uuid: str | None
    slices: Mapping[str, Any] | None = None
    problem: str | None = None
    handle: Any = None


@dataclass(frozen=True)
class Device:
    """A CUDA device: NVML's handle of the GPU, and of the slice if the device is a slice."""

    gpu: Any
    slice: Any = None

    @property
    def handle(self) -> Any:
        """The handle of the device itself."""
        return self.gpu if self.slice is None else self.slice


@contextmanager
def nvml() -> Iterator[pynvml.NVMLError | None]:
    """Initialize NVML for the block. Gives None, or NVML's error if it does not answer.

    NVML counts its users, and this process stays one of them until it forks: without persistence mode, the driver
    starts a GPU anew, for seconds, whenever the last one has left.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        yield error
        return
    _stay()
    try:
        yield None
    finally:
        pynvml.nvmlShutdown()


_stays = False


def _stay() -> None:
    global _stays
    _leave_before_forks()
    if not _stays:
        pynvml.nvmlInit()
        _stays = True


@cache
def _leave_before_forks() -> None:
    os.register_at_fork(before=_leave)


def _leave() -> None:
    """Leave NVML, whose connection to the driver is of one process."""
    global _stays
    if _stays:
        _stays = False
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


SILENT_HINT = f"see what nvidia-smi says; a restart of the host or container may help; {VISIBLE}= uses the CPU"
"""What to do about a driver that does not answer, most often because it was updated and not started again."""


def is_silent(error: pynvml.NVMLError, environ: Mapping[str, str]) -> bool:
    """Whether NVML's error is that of a driver that is here and does not answer, and GPUs may be used."""
    return error.value not in _NO_DRIVER and environ.get(VISIBLE) not in _HIDES_ALL


def text_of(error: pynvml.NVMLError) -> str:
    """NVML's error, with the name of its class."""
    return f"{type(error).__name__}: {error}"


def visible(gpus: Sequence[ListedGpu], setting: str | None) -> list[tuple[int, int | None]]:
    """The GPUs, in PCI order, that CUDA_VISIBLE_DEVICES = ``setting`` leaves: index, and index of the slice or None.

    CUDA's rules (CUDA Programming Guide, "CUDA Environment Variables"): unset means all; entries are indices or
    prefixes of a UUID; the first invalid entry ends the list; a repeated device makes it empty. With MIG (MIG User
    Guide, "CUDA Device Enumeration"): a process gets the first slice that it could have, and no whole GPU beside it.
    """
    if setting is None:
        chosen: list[tuple[int, int | None]] = [(index, None) for index in range(len(gpus))]
    else:
        chosen = []
        for entry in (part.strip() for part in setting.split(",")):
            position = _find(gpus, entry)
            if position is None:
                break
            if position in chosen:
                return []
            chosen.append(position)
    for index, part in chosen:
        if gpus[index].slices:
            return [(index, part or 0)]
    return [(index, part) for index, part in chosen if gpus[index].slices is None]


def _find(gpus: Sequence[ListedGpu], entry: str) -> tuple[int, int | None] | None:
    if entry.isdecimal():
        return (int(entry), None) if int(entry) < len(gpus) else None
    matches: list[tuple[int, int | None]] = []
    if entry:
        matches = [(i, None) for i, gpu in enumerate(gpus) if gpu.uuid and gpu.uuid.startswith(entry)]
        for i, gpu in enumerate(gpus):
            matches += [(i, k) for k, uuid in enumerate(gpu.slices or ()) if uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def listed() -> list[ListedGpu]:
    """All GPUs that this process may use, regardless of CUDA_VISIBLE_DEVICES; NVML must be initialized.

    NVML also counts GPUs that a control group or a container hides from this process, and refuses their handles (NVML
    API Reference, ``nvmlDeviceGetCount_v2``). CUDA does not count them. Raises HostError: NVML cannot count.
    """
    gpus = []
    try:
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        raise HostError(f"GPUs cannot be counted: {error}", hint="see what nvidia-smi says") from None
    for index in range(count):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid = str(pynvml.nvmlDeviceGetUUID(handle))
        except pynvml.NVMLError as error:
            if error.value != pynvml.NVML_ERROR_NO_PERMISSION:
                gpus.append(ListedGpu(None, problem=f"GPU {index} cannot be read: {error}"))
            continue
        gpus.append(ListedGpu(uuid, _slices(handle), handle=handle))
    return gpus


def _slices(gpu: Any) -> dict[str, Any] | None:
    """Handles of a GPU's slices by UUID; None if MIG mode is off or unknown."""
    try:
        if pynvml.nvmlDeviceGetMigMode(gpu)[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return None
        most = pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)
    except pynvml.NVMLError:
        return None
    slices = {}
    for index in range(most):
        with suppress(pynvml.NVMLError):  # no slice has that index
            handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
            slices[str(pynvml.nvmlDeviceGetUUID(handle))] = handle
    return slices


def chosen(environ: Mapping[str, str]) -> list[Device | str]:
    """The visible devices; for an unreadable one, the reason. NVML must be initialized."""
    gpus = listed()
    devices: list[Device | str] = []
    for index, part in visible(gpus, environ.get(VISIBLE)):
        gpu = gpus[index]
        handles = list((gpu.slices or {}).values())
        devices.append(gpu.problem or Device(gpu.handle, None if part is None else handles[part]))
    return devices


def readable(environ: Mapping[str, str]) -> list[Device]:
    """The visible devices. Raises HostError: one of them cannot be read."""
    devices = chosen(environ)
    if problems := [device for device in devices if isinstance(device, str)]:
        # By UUID, because it is not documented whether CUDA counts a lost GPU.
        hint = f"choose others by their UUIDs (nvidia-smi -L) with {VISIBLE}; it may need a reset"
        raise HostError(problems[0], hint=hint)
    return [device for device in devices if isinstance(device, Device)]


def allowed_gpus() -> list[str] | None:
    """The UUIDs of the GPUs that this process may use; None if it may use all, and all can be read.

    A control group may hide some from it. A process outside of that group, as a container that an engine starts, must
    be given the others by name: it would get all GPUs, also those that cannot be read.
    """
    with nvml() as problem:
        gpus = [] if problem else listed()
        others = not problem and (len(gpus) < pynvml.nvmlDeviceGetCount() or any(gpu.problem for gpu in gpus))
    return [gpu.uuid for gpu in gpus if gpu.uuid] if others else None


def visible_uuids(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The UUIDs of the visible devices, which are GPUs or slices; an empty text for an unreadable one."""
    with nvml() as problem:
        gpus = [] if problem else listed()
    return tuple(
        (gpus[index].uuid or "") if part is None else [*(gpus[index].slices or {})][part]
        for index, part in visible(gpus, environ.get(VISIBLE))
    )


def count_present() -> int:
    """Number of GPUs, before CUDA_VISIBLE_DEVICES is applied, readable or not."""
    with nvml() as problem:
        return 0 if problem else len(listed())


def count_visible(environ: Mapping[str, str] = os.environ) -> int:
    """Number of devices that a CUDA program would see now, whatever torch is built for, readable or not."""
    with nvml() as problem:
        return 0 if problem else len(chosen(environ))


def count_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """Number of devices that torch would use now; 0 without an NVIDIA driver, or if torch has no CUDA.

    Raises:
        HostError: the driver does not answer, a device cannot be read, or the driver is too old for torch's CUDA.
    """
    build = torch_build()
    if build.cuda is None:
        return 0
    with nvml() as problem:
        if problem and is_silent(problem, environ):
            raise HostError(f"the NVIDIA driver here does not answer: {text_of(problem)}", hint=SILENT_HINT)
        count = 0 if problem else len(readable(environ))
        if count:
            require_driver(build)
        return count


def hide_gpus() -> None:
    """Let torch in this process, and in those that it starts, find no GPU that NVML does not show."""
    os.environ.update(_HIDDEN)


def may_share_gpus(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the compute mode of every visible GPU allows several processes at once."""
    with nvml() as problem, suppress(HostError, pynvml.NVMLError):
        handles = [] if problem else [one.gpu for one in chosen(environ) if isinstance(one, Device)]
        return all(pynvml.nvmlDeviceGetComputeMode(handle) == pynvml.NVML_COMPUTEMODE_DEFAULT for handle in handles)
    return True


_ENTRIES_HINT = "see nvidia-smi -L for indices and UUIDs"


def numbers_of_driver(environ: Mapping[str, str] = os.environ) -> list[int]:
    """The number by which nvidia-smi knows each visible GPU, in the order of CUDA's own numbers."""
    with nvml() as problem, suppress(HostError):
        return [] if problem else [index for index, _ in visible(listed(), environ.get(VISIBLE))]
    return []


def caution(environ: Mapping[str, str] = os.environ) -> tuple[str, str] | None:
    """Text and hint on GPUs that CUDA_VISIBLE_DEVICES or MIG hides, perhaps unintentionally; None if there are none."""
    setting = environ.get(VISIBLE)
    with nvml() as problem:
        gpus = [] if problem else listed()
    devices = visible(gpus, setting)
    if gpus and setting is None and not any(gpu.slices or gpu.slices is None for gpu in gpus):
        text = f"the {counted(len(gpus), 'GPU')} here can be used in slices alone (MIG), and there are none"
        return f"{text}: trainings run on the CPU", "make some with nvidia-smi mig -cgi ... -C, or turn MIG off"
    if gpus and not devices and setting not in (None, *_HIDES_ALL):
        entries = [entry.strip() for entry in setting.split(",")]
        text = f"{VISIBLE} is {setting}, which names no GPU of the {len(gpus)} here: trainings run on the CPU"
        if len({*entries}) < len(entries):
            text = f"{VISIBLE} is {setting}, which names a GPU twice: trainings run on the CPU"
        return text, _ENTRIES_HINT
    if setting and devices and len(devices) < setting.count(",") + 1 and all(part is None for _, part in devices):
        entry = setting.split(",")[len(devices)].strip()
        text = f"{VISIBLE} is {setting}: CUDA takes what stands before {entry!r}, which names no GPU here"
        return text, _ENTRIES_HINT
    if any(part is not None for _, part in devices):
        named = setting.count(",") + 1 if setting else sum(len(gpu.slices or [gpu]) for gpu in gpus)
        if named > 1:
            text = f"a process of CUDA uses one slice of a GPU (MIG), and the first of {named} is taken"
            return text, f"name the slice in {VISIBLE} by its UUID (nvidia-smi -L), or turn MIG off to use whole GPUs"
    return None
