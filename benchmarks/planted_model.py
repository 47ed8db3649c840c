"""A perceptron whose keywords plant causes for ``explain.py``, as a user's own model would have them."""

from __future__ import annotations

import itertools
import os
from typing import Any

import torch
from torch import Tensor, nn

FEATURES, CLASSES = 64, 10  # of its data


class Net(nn.Module):
    """A perceptron with one defect. ``PLANTINGS`` names the cause of each keyword."""

    def __init__(
        self,
        hidden: int = 256,
        layers: int = 3,
        reads: int = 0,
        threads: int = 0,
        buffer_floats: int = 0,
        slow_forward: int = 0,
        slow_backward: int = 0,
    ) -> None:
        super().__init__()
        widths = [FEATURES, *[hidden] * layers]
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.head = nn.Linear(hidden, CLASSES)
        self.reads, self.threads = reads, threads
        last = os.environ.get("RANK") == "1"
        self.slow_forward, self.slow_backward = last * slow_forward, last * slow_backward
        if buffer_floats:
            self.register_buffer("averages", torch.zeros(buffer_floats))

    def forward(self, inputs: Tensor) -> Tensor:
        """Class scores, (samples, classes)."""
        if self.threads:
            torch.set_num_threads(self.threads)
        work(self.slow_forward)
        values = inputs
        for layer in self.hidden:
            values = torch.relu(layer(values))
        rows = len(values)
        for row in range(self.reads):
            values[row % rows, 0].item()
        if self.slow_backward:
            values = SlowBackward.apply(values, self.slow_backward)  # type: ignore[no-untyped-call]
        outputs: Tensor = self.head(values)
        return outputs


class SlowBackward(torch.autograd.Function):
    """The identity. Its gradient takes so many matrix products more."""

    @staticmethod
    def forward(context: Any, values: Tensor, times: int) -> Tensor:
        """The values."""
        context.times = times
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Their gradient, late."""
        work(context.times)
        return gradient, None


def work(times: int) -> None:
    """Compute so many matrix products, each some tenths of a millisecond on one core."""
    matrix = torch.ones(192, 192)
    for _ in range(times):
        matrix @ matrix
