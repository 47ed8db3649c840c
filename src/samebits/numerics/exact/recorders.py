"""What records passes, so that they can be done again: on a GPU CUDA graphs. ``traces`` has a CPU's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from samebits.numerics.exact.compiled.library import chosen

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Made = list[Tensor | None]


class StoppedError(Exception):
    """A pass cannot be replayed as it was recorded, and has to be run by the model itself."""


class Recorder(Protocol):
    """Records what a function does on a device, so that it can be done again."""

    def record(self, run: Callable[[], Made]) -> tuple[Made, Callable[[], object]]:
        """What ``run`` returned, and a function that gives these tensors the values of another run.

        That function may raise StoppedError, and what it was to fill is then undefined.
        """


class CudaGraphs:
    """Recordings of both passes, which share a pool of memory, and the stream on which a backward pass follows."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, run: Callable[[], Made]) -> tuple[Made, Callable[[], object]]:
        """See ``Recorder``. Nothing is computed before the first replay."""
        graph = torch.cuda.CUDAGraph()
        library = chosen(self._device.type)
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                if library:
                    library.forget_places()  # a replay has to fill its own with zeros
                made = run()
        finally:
            if library:
                library.forget_places()
        return made, graph.replay
