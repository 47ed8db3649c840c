"""The devices that CUDA would give a process that starts now, as NVML lists them: GPUs, or one slice of a GPU (MIG).

Nothing here opens CUDA's library, so that a process that has asked may fork workers which use CUDA.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pynvml

from samebits.errors import HostError, counted
from samebits.host.software import require_driver, torch_build

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

VISIBLE = "CUDA_VISIBLE_DEVICES"
_NO_DRIVER = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)  # as on a host without a GPU
_NONE = ("", "-1", "NoDevFiles")  # values of it by which somebody wants no GPU


@dataclass(frozen=True)
class ListedGpu:
    """A GPU that this process may use, as far as it can be read.

    ``slices`` are the UUIDs of its MIG devices, with NVML's handle of each; None without MIG mode. Where there is no
    ``uuid``, ``problem`` says why.
    """

    uuid: str | None
    slices: Mapping[str, Any] | None = None
    problem: str | None = None
    handle: Any = None


@dataclass(frozen=True)
class Device:
    """A device of CUDA's: NVML's handle of the GPU, and of the slice if it is one."""

    gpu: Any
    slice: Any = None

    @property
    def handle(self) -> Any:
        """What to ask for what is the device's own."""
        return self.gpu if self.slice is None else self.slice


@contextmanager
def nvml() -> Iterator[pynvml.NVMLError | None]:
    """Give None when NVML answers, else its error."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        yield error
        return
    try:
        yield None
    finally:
        pynvml.nvmlShutdown()


def text_of(error: pynvml.NVMLError) -> str:
    """NVML's error with the name of its kind."""
    return f"{type(error).__name__}: {error}"


def visible(gpus: Sequence[ListedGpu], setting: str | None) -> list[tuple[int, int | None]]:
    """The devices that CUDA_VISIBLE_DEVICES = ``setting`` leaves of GPUs in PCI order: index, and index of the slice.

    CUDA's rules (CUDA Programming Guide, "CUDA Environment Variables"): unset means all; entries are indices or
    prefixes of a UUID; the first invalid entry ends the list; a repeated device makes it empty. With MIG (MIG User
    Guide, "CUDA Device Enumeration"): a process gets one slice, the first of those that it could have, and beside it no
    whole GPU.
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
    """The device that one entry names."""
    if entry.isdecimal():
        return (int(entry), None) if int(entry) < len(gpus) else None
    matches: list[tuple[int, int | None]] = []
    if entry:
        matches = [(i, None) for i, gpu in enumerate(gpus) if gpu.uuid and gpu.uuid.startswith(entry)]
        for i, gpu in enumerate(gpus):
            matches += [(i, k) for k, uuid in enumerate(gpu.slices or ()) if uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def listed() -> list[ListedGpu]:
    """All GPUs that this process may use, whatever CUDA_VISIBLE_DEVICES says; NVML must have been initialized.

    NVML also counts GPUs that a control group or a container keeps from this process, which CUDA does not: a handle of
    theirs is refused (NVML API Reference, ``nvmlDeviceGetCount_v2``). Raises HostError: NVML cannot count.
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
    """UUIDs and handles of the slices of a GPU that this process may use; None where MIG mode is off or not known."""
    try:
        if pynvml.nvmlDeviceGetMigMode(gpu)[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return None
        most = pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)
    except pynvml.NVMLError:
        return None
    slices = {}
    for index in range(most):
        with suppress(pynvml.NVMLError):  # there is none of that index
            handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
            slices[str(pynvml.nvmlDeviceGetUUID(handle))] = handle
    return slices


def chosen(environ: Mapping[str, str]) -> list[Device | str]:
    """The devices that CUDA_VISIBLE_DEVICES leaves, or why one cannot be read; NVML must have been initialized."""
    gpus = listed()
    devices: list[Device | str] = []
    for index, part in visible(gpus, environ.get(VISIBLE)):
        gpu = gpus[index]
        handles = list((gpu.slices or {}).values())
        devices.append(gpu.problem or Device(gpu.handle, None if part is None else handles[part]))
    return devices


def readable(environ: Mapping[str, str]) -> list[Device]:
    """As ``chosen``. Raises HostError: one of them cannot be read."""
    devices = chosen(environ)
    if problems := [device for device in devices if isinstance(device, str)]:
        # By UUID, because nobody says whether CUDA counts a GPU that is lost.
        hint = f"choose others by their UUIDs (nvidia-smi -L) with {VISIBLE}; it may need a reset"
        raise HostError(problems[0], hint=hint)
    return [device for device in devices if isinstance(device, Device)]


def allowed_gpus() -> list[str] | None:
    """The UUIDs of the GPUs that this process may use, if there are others: kept from it, or dead; None if it is all.

    A control group keeps some from it. Who has a process started elsewhere, as an engine does with a container, must
    name the rest: that one is kept from none, and would also be given those that cannot be read.
    """
    with nvml() as problem:
        gpus = [] if problem else listed()
        others = not problem and (len(gpus) < pynvml.nvmlDeviceGetCount() or any(gpu.problem for gpu in gpus))
    return [gpu.uuid for gpu in gpus if gpu.uuid] if others else None


def visible_uuids(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The UUIDs of the devices that CUDA_VISIBLE_DEVICES leaves, of GPUs or slices; empty for one without a name."""
    with nvml() as problem:
        gpus = [] if problem else listed()
    return tuple(
        (gpus[index].uuid or "") if part is None else [*(gpus[index].slices or {})][part]
        for index, part in visible(gpus, environ.get(VISIBLE))
    )


def count_present() -> int:
    """GPUs that the driver shows to this process before CUDA_VISIBLE_DEVICES is applied, readable or not."""
    with nvml() as problem:
        return 0 if problem else len(listed())


def count_visible(environ: Mapping[str, str] = os.environ) -> int:
    """Devices that some CUDA program started now would see, whatever torch was built for, readable or not."""
    with nvml() as problem:
        return 0 if problem else len(chosen(environ))


def count_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """Devices that torch would use if it were started now; 0 where there is no NVIDIA driver or torch has no CUDA.

    Raises:
        HostError: the driver does not answer, one of them cannot be read, or the driver is older than torch's CUDA.
    """
    build = torch_build()
    if build.cuda is None:
        return 0
    with nvml() as problem:
        if problem and problem.value not in _NO_DRIVER and environ.get(VISIBLE) not in _NONE:
            hint = f"see what nvidia-smi says; a restart of the host or container may help; {VISIBLE}= uses the CPU"
            raise HostError(f"the NVIDIA driver here does not answer: {text_of(problem)}", hint=hint)
        count = 0 if problem else len(readable(environ))
        if count:
            require_driver(build)
        return count


def may_share_gpus(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether each visible GPU takes several processes at once, by its compute mode."""
    with nvml() as problem, suppress(HostError, pynvml.NVMLError):
        handles = [] if problem else [one.gpu for one in chosen(environ) if isinstance(one, Device)]
        return all(pynvml.nvmlDeviceGetComputeMode(handle) == pynvml.NVML_COMPUTEMODE_DEFAULT for handle in handles)
    return True


def caution(environ: Mapping[str, str] = os.environ) -> tuple[str, str] | None:
    """What CUDA_VISIBLE_DEVICES, or MIG, takes away that a user may have counted on, with a hint; None if nothing."""
    setting = environ.get(VISIBLE)
    with nvml() as problem:
        gpus = [] if problem else listed()
    devices = visible(gpus, setting)
    if gpus and setting is None and not any(gpu.slices or gpu.slices is None for gpu in gpus):
        text = f"the {counted(len(gpus), 'GPU')} here can be used in slices alone (MIG), and there are none"
        return f"{text}: trainings run on the CPU", "make some with nvidia-smi mig -cgi ... -C, or turn MIG off"
    if gpus and not devices and setting not in (None, *_NONE):
        text = f"{VISIBLE} is {setting}, which names no GPU of the {len(gpus)} here: trainings run on the CPU"
        return text, "see nvidia-smi -L for indices and UUIDs"
    if any(part is not None for _, part in devices):
        named = setting.count(",") + 1 if setting else sum(len(gpu.slices or [gpu]) for gpu in gpus)
        if named > 1:
            text = f"a process of CUDA uses one slice of a GPU (MIG), and the first of {named} is taken"
            return text, f"name the slice in {VISIBLE} by its UUID (nvidia-smi -L), or turn MIG off to use whole GPUs"
    return None
