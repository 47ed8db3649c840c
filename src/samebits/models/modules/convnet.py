"""``convnet``: a small residual net.

GroupNorm and not BatchNorm: batch statistics depend on how a batch is split over devices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Sequence


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions, and a 1x1 one beside them where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(4, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(4, outputs)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs, h, w) to (batch, outputs, h / stride, w / stride)."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ConvNet(nn.Module):
    """A stem, three stages of residual blocks, the mean over positions, and a linear layer.

    Shapes: (batch, channels, h, w) to (batch, classes).
    """

    def __init__(self, input_shape: Sequence[int], classes: int, *, width: int = 16, blocks: int = 1) -> None:
        super().__init__()
        self.stem = nn.Conv2d(input_shape[0], width, 3, 2, 1, bias=False)
        self.norm = nn.GroupNorm(4, width)
        stages: list[nn.Module] = []
        channels = width
        for stage in range(3):
            for block in range(blocks):
                outputs = width * 2**stage
                stages.append(ResidualBlock(channels, outputs, 2 if stage and not block else 1))
                channels = outputs
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, h, w) to logits (batch, classes)."""
        y = self.stages(F.relu(self.norm(self.stem(x))))
        logits: Tensor = self.head(y.mean(dim=(2, 3)))
        return logits
