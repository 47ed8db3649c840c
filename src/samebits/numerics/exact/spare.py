"""Memory of large gradients and weights on a CPU, for those of the next step: new pages cost more than to fill them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from samebits.numerics.exact.engine import below

if TYPE_CHECKING:
    from torch import Tensor

_LARGE = 1 << 25  # bytes from which malloc takes new pages for each tensor (mallopt(3), M_MMAP_THRESHOLD)


class SpareMemory:
    """Lends memory for gradients, and for weights. A gradient that nobody gives back is freed as ever."""

    def __init__(self) -> None:
        self._lent: set[StorageWeakRef] = set()
        self._back: list[Tensor] = []
        self._values: dict[str, Tensor] = {}

    def numbers(self, shape: torch.Size) -> Tensor:
        """Float64 numbers on a CPU, still without values. A recording of passes has memory of its own."""
        if below.watch is not None:
            return torch.empty(shape, dtype=torch.float64)
        found = next((i for i, one in enumerate(self._back) if one.shape == shape), None)
        numbers = torch.empty(shape, dtype=torch.float64) if found is None else self._back.pop(found)
        if numbers.nbytes >= _LARGE:
            self._lent = {_storage(numbers), *(one for one in self._lent if not one.expired())}  # type: ignore[no-untyped-call]
        return numbers

    def give_back(self, gradient: Tensor) -> None:
        """Take the memory of a gradient that is dropped, if it was lent."""
        if self._lent and (storage := _storage(gradient)) in self._lent:
            self._lent.remove(storage)
            self._back.append(gradient.detach())

    def values(self, place: str, parameter: Tensor) -> Tensor:
        """A parameter's float32 values, where those of an earlier pass lay if nobody holds these any more."""
        kept = self._values.get(place) if below.watch is None else None
        if kept is not None and kept.shape == parameter.shape and not _is_held(kept):
            return kept.copy_(parameter).detach()
        made = parameter.to(torch.float32)
        if below.watch is None and made.device.type == "cpu" and made.nbytes >= _LARGE:
            self._values[place] = made
        return made.detach()


def _is_held(x: Tensor) -> bool:
    """Whether any other tensor has this one's memory."""
    storage = x.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > 2  # this tensor and ``storage``


def _storage(x: Tensor) -> StorageWeakRef:
    """A gradient's memory: as long as this lives, no other has the same name."""
    return StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]
