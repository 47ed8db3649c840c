"""Multi-layer perceptrons: ``mlp`` is small enough to be bound by overhead, ``wide_mlp`` by arithmetic."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Sequence


class MLP(nn.Module):
    """Linear layers with ReLU between them; an input of more than one axis is flattened.

    Shapes: (batch, *input_shape) to (batch, outputs).
    """

    def __init__(
        self, input_shape: Sequence[int], outputs: int, hidden: Sequence[int], *, dropout: float = 0.0
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = math.prod(input_shape)
        for units in hidden:
            layers += [nn.Linear(width, units), nn.ReLU()]
            if dropout:
                layers.append(nn.Dropout(dropout))
            width = units
        self.layers = nn.Sequential(*layers, nn.Linear(width, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, *input_shape) to logits or predictions (batch, outputs)."""
        logits: Tensor = self.layers(x.flatten(1))
        return logits
