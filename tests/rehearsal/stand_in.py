"""Build the stand-in for CUDA, ``no_gpu.c``, and run scripts on it, each in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from samebits.numerics.environment import ENVIRONMENT

HERE = Path(__file__).resolve().parent
NO_RESULTS = HERE / "no_results"
"""Folder for Python's path, by which a process takes the results of the self-test of exact for right."""
ROOT = HERE.parents[1]
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
SETTINGS = {
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # memory that is used again would not be zero
    "PYTHONHASHSEED": "0",
    "SAMEBITS_PRODUCTS": "float64",  # what is faster here says nothing about a GPU
}


def why_not() -> str | None:
    """Why there can be no rehearsal here, or None."""
    if torch.version.cuda is None:
        return "this PyTorch is built without CUDA"
    return None if COMPILER else "no C compiler"


def build(folder: Path) -> Path:
    """Compile the stand-in into a folder, with the headers that PyTorch's own packages bring."""
    library = folder / "libcuda.so.1"
    packages, major = Path(torch.__file__).parents[1], str(torch.version.cuda).partition(".")[0]
    headers = [
        packages / "nvidia" / f"cu{major}" / "include",
        packages / "triton" / "backends" / "nvidia" / "include",  # has what the others include
    ]
    includes = [f"-I{path}" for path in headers]
    name = f"-Wl,-soname,{library.name}"
    options = ["-Wall", "-shared", "-fPIC", *includes, name, "-o", str(library)]
    subprocess.run([str(COMPILER), *options, str(HERE / "no_gpu.c")], check=True)
    return library


def run(library: Path, script: str, *arguments: str) -> Any:
    """What a script of this folder prints as JSON, on the stand-in."""
    paths = [ROOT / "src", ROOT / "tests", ROOT / "tests" / "numerics", HERE]
    environ = {
        **os.environ,
        **{name: accepted[0] for name, accepted in ENVIRONMENT.items()},
        **SETTINGS,
        "LD_PRELOAD": str(library),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
    }
    environ.pop("CUDA_VISIBLE_DEVICES", None)
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments], env=environ, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)
