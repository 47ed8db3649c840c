"""Versions of installed packages, without importing them."""

from __future__ import annotations

import importlib.util
import runpy
from importlib import metadata
from pathlib import Path


def torch_build() -> dict[str, str | None]:
    """Version and CUDA release of the installed torch, read from its version file (importing it takes seconds)."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {"version": None, "cuda": None}
    facts = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return {"version": str(facts["__version__"]), "cuda": facts["cuda"]}


def installed(*names: str) -> str | None:
    """Version of the first of these packages that there is."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
