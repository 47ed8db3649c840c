"""A model whose steps are slow while a test wants them to be: its training is under way when a signal comes."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SOURCE = """
import time
from pathlib import Path
from torch import nn

class Net(nn.Sequential):
    def forward(self, x):
        if Path("slow").exists():
            time.sleep(0.05)
        return super().forward(x)

def make():
    return Net(nn.Linear(128, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))
"""


def slow_model(folder: Path) -> dict[str, str]:
    """Write the model for task ``vectors`` with 128 features, and give the params that name it."""
    (folder / "mine.py").write_text(SOURCE)
    return {"name": "mine:make", "source": "mine.py"}


@contextmanager
def slowed(folder: Path) -> Iterator[None]:
    """Each forward pass of trainings in this folder takes a twentieth of a second."""
    flag = folder / "slow"
    flag.touch()
    try:
        yield
    finally:
        flag.unlink()
