"""Memory that a step takes on its devices, by its parts."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, NonNegativeInt

from samebits.files import Part


class DeviceMemory(Part):
    """Bytes on one device at the peak of a step.

    ``gradients`` are those that exist at that moment. ``activations`` are tensors that autograd saves, temporaries and
    the batch itself; under ``dp`` also gathered outputs, and on all devices but the first the rest of a replica.
    ``baseline`` is memory used before: on a GPU data and workspaces, on a CPU the process without the model.
    ``capacity`` is the memory of the device, or this worker's part of it.
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
        """Bytes of all parts together."""
        return sum(getattr(self, part) for part in self.PARTS)

    @property
    def tensors(self) -> int:
        """Bytes of the model and its batch."""
        return self.peak - self.baseline


class Memory(Part):
    """The parts of the peak, by device in the order of ``peak_memory_gib``, for a global batch of ``samples`` samples.

    ``source`` is the method: PyTorch's ``allocator`` on a GPU, or ``counted`` tensor by tensor on a CPU, which misses
    the workspace of a kernel.
    """

    source: Literal["allocator", "counted"]
    samples: int
    devices: tuple[DeviceMemory, ...] = Field(min_length=1)

    @property
    def fullest(self) -> int:
        """The index of the device with the smallest share of its capacity left; the first one of equals."""
        return max(range(len(self.devices)), key=lambda i: self.devices[i].peak / max(1, self.devices[i].capacity))
