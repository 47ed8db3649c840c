"""A model of many modules, as users have them: a residual network with GroupNorm, for ``exact.py``."""

from __future__ import annotations

from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in range(2))
        self.acts = nn.ModuleList(nn.ReLU() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """The output has the input's shape."""
        y = self.acts[0](self.norms[0](self.first(x)))
        out: Tensor = self.acts[1](x + self.norms[1](self.second(y)))
        return out


class Net(nn.Module):
    """A convolution, residual blocks, and a layer for the classes."""

    def __init__(self, blocks: int = 28, width: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images to one output per class."""
        out: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return out
