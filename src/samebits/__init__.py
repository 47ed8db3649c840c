"""samebits: what dp and ddp buy on this host, and the same bits on any.

A factory of your own returns an ``Experiment``. Scripts and notebooks call ``run``, ``compare`` and ``explain``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samebits.models.experiment import Experiment as Experiment
    from samebits.stages.library import compare as compare
    from samebits.stages.library import explain as explain
    from samebits.stages.library import run as run

__version__ = "0.1.0"

LIBRARY = {"Experiment": "models.experiment", **dict.fromkeys(("run", "compare", "explain"), "stages.library")}
"""What users import, and where it is."""


def __getattr__(name: str) -> object:
    """Import what users import when they do: commands that need none of it start sooner."""
    if name not in LIBRARY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"samebits.{LIBRARY[name]}"), name)
