"""samebits: what dp and ddp buy on this host, and the same bits on any."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samebits.models.experiment import Experiment as Experiment

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Import what users import when they do: commands that need none of it start sooner."""
    if name != "Experiment":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from samebits.models import experiment

    return experiment.Experiment
