"""Counts reads by which a forward pass makes Python wait for the device: ``.item()``, ``.tolist()``, ``if tensor:``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from samebits.numerics.dispatch import EagerDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable

    from samebits.records.breakdown import PhaseName

_SCALARS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default}
_COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}
_OF_ONE = 200  # timed reads


class ReadCounter(EagerDispatchMode):
    """Counts reads while ``phase()`` is ``forward``."""

    def __init__(self, phase: Callable[[], PhaseName]) -> None:
        super().__init__()
        self._phase = phase
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; count it if it reads a value."""
        outputs = func(*args, **(kwargs or {}))
        if self._phase() == "forward":
            self.count += func in _SCALARS or (func in _COPIES and _to_host(args, outputs))
        return outputs


def _to_host(args: Any, outputs: Any) -> bool:
    sources = [value for value in args if isinstance(value, torch.Tensor)]
    return outputs.device.type == "cpu" and any(source.device.type != "cpu" for source in sources)


def read_seconds(device: torch.device) -> float:
    """Seconds to select and read a value of a matrix, on an idle device.

    The matrix requires a gradient, like the outputs of a model.
    """
    values = 1.0 * torch.ones(2, 2, device=device, requires_grad=True)
    values[0, 0].item()
    started = time.perf_counter()
    for row in range(_OF_ONE):
        values[row % 2, 0].item()
    return (time.perf_counter() - started) / _OF_ONE
