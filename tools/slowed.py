"""A model whose steps can be slowed down, so that its training is still running when a fault comes."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SOURCE = """
import time
from pathlib import Path
from torch import nn

class Net(nn.Sequential):
    def forward(self, x):
        for flag, seconds in (("slow", 0.05), ("slower", 0.5)):
            if Path(flag).exists():
                time.sleep(seconds)
        return super().forward(x)

def make(features):
    return Net(nn.Linear(features, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))
"""


def slow_model(folder: Path, features: int = 128) -> dict[str, Any]:
    """Write the model for task ``vectors`` with so many features. Returns the params that name it."""
    (folder / "mine.py").write_text(SOURCE, encoding="utf-8")
    return {"name": "mine:make", "source": "mine.py", "kwargs": {"features": features}}


@contextmanager
def slowed(folder: Path, how: Literal["slow", "slower"] = "slow") -> Iterator[None]:
    """Slow each forward pass of trainings in this folder down, by a twentieth or half of a second."""
    flag = folder / how
    flag.touch()
    try:
        yield
    finally:
        flag.unlink()
