"""What a step takes of the memory of its devices, and what of it."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, NonNegativeInt

from samebits.files import Part


class DeviceMemory(Part):
    """Bytes on one device at the moment when a step had the most there.

    ``gradients`` are those that were there at that moment. ``activations`` are what autograd saves, temporaries and the
    batch itself; under ``dp`` also gathered outputs, and on all devices but the first what else a replica makes.
    ``baseline`` is what was there before: on a GPU data and workspaces, on a CPU the process without the model.
    ``capacity`` is what the device, or this worker's part of it, has.
    """

    PARTS: ClassVar = ("weights", "buffers", "gradients", "optimizer", "activations", "baseline")

    weights: NonNegativeInt
    buffers: NonNegativeInt
    gradients: NonNegativeInt
    optimizer: NonNegativeInt
    activations: NonNegativeInt
    baseline: NonNegativeInt
    capacity: NonNegativeInt

    @property
    def peak(self) -> int:
        """Bytes of all parts together, the most that the device had at a time."""
        return sum(getattr(self, part) for part in self.PARTS)

    @property
    def tensors(self) -> int:
        """What the model and its batch take."""
        return self.peak - self.baseline


class Memory(Part):
    """The parts of the peak, by device in the order of ``peak_memory_gib``, for global batches of so many ``samples``.

    ``source`` says how they were found: by PyTorch's ``allocator`` on a GPU, or ``counted`` tensor by tensor on a CPU,
    where what a kernel takes for itself alone is not seen.
    """

    source: Literal["allocator", "counted"]
    samples: int
    devices: tuple[DeviceMemory, ...] = Field(min_length=1)

    @property
    def fullest(self) -> int:
        """The number of the device with the least left of its capacity, in proportion; the first of equals."""
        return max(range(len(self.devices)), key=lambda i: self.devices[i].peak / max(1, self.devices[i].capacity))
