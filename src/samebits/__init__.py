"""samebits: what dp and ddp buy on this host, and the same bits on any.

A factory of your own returns an ``Experiment``. Scripts and notebooks call ``run``, ``compare`` and ``explain``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samebits.api import compare as compare
    from samebits.api import explain as explain
    from samebits.api import run as run
    from samebits.models.experiment import Experiment as Experiment

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Import what users import when they do: commands that need none of it start sooner."""
    if name == "Experiment":
        from samebits.models import experiment

        return experiment.Experiment
    if name in ("compare", "explain", "run"):
        from samebits import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
