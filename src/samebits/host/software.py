"""Versions of installed packages, without importing them."""

from __future__ import annotations

import importlib.util
import runpy
from importlib import metadata
from pathlib import Path
from typing import NamedTuple


class TorchBuild(NamedTuple):
    """The installed torch: its version, None if there is none, and the CUDA it was built for, None for the CPU."""

    version: str | None
    cuda: str | None


def torch_build() -> TorchBuild:
    """The installed torch, read from its version file (importing it takes seconds)."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return TorchBuild(version=None, cuda=None)
    facts = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return TorchBuild(version=str(facts["__version__"]), cuda=facts["cuda"])


def installed(*names: str) -> str | None:
    """Version of the first of these packages that there is."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
