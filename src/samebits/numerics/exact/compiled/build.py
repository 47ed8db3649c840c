"""Compiling ``kernels.c`` for this host's instruction set, once for each version of it."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from samebits.errors import HostError, first_line
from samebits.files import own_folder
from samebits.numerics.exact.compiled import HINT

if TYPE_CHECKING:
    from collections.abc import Sequence

SOURCE = Path(__file__).with_name("kernels.c")
PARTS = sorted(SOURCE.with_suffix("").glob("*.h"))
"""What it includes."""
FLAGS = ("-O3", "-std=c11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared",
         "-fvisibility=hidden")  # fmt: skip
"""Among them none that lets a compiler change a result; ``-ffp-contract=off`` forbids the one change that C allows."""
LEVELS = {"AVX512": "x86-64-v4", "AVX2": "x86-64-v3", "DEFAULT": "x86-64"}
ZIG = [sys.executable, "-P", "-m", "ziglang", "cc"]
"""Clang as a Python package. It writes instruction sets with underscores, and takes this host's where none is told."""
_SECONDS = 120


def compilers() -> list[list[str]]:
    """The C compilers of this host, the preferred one first."""
    packaged = [ZIG] if importlib.util.find_spec("ziglang") else []
    named = [os.environ["CC"].split()] if os.environ.get("CC") else []
    return [*named, *([name] for name in ("cc", "gcc", "clang") if shutil.which(name)), *packaged]


def instruction_set() -> str | None:
    """The level of x86-64 to compile for; None on other processors, where compilers take the oldest by themselves."""
    return LEVELS.get(torch.backends.cpu.get_cpu_capability()) if os.uname().machine == "x86_64" else None


@cache
def library(*, anew: bool = False) -> Path:
    """The compiled kernels, from this user's cache, or made ``anew``.

    Raises HostError: there is no compiler, or it fails.
    """
    level = instruction_set()
    source = b"".join(file.read_bytes() for file in (SOURCE, *PARTS))
    name = hashlib.sha256(source + " ".join(FLAGS).encode()).hexdigest()[:16]
    target = own_folder() / f"kernels-{name}-{level or os.uname().machine}.so"
    if anew or not target.exists():
        compile_to(target, level)
    return target


def compile_to(
    target: Path, level: str | None, compiler: Sequence[str] | None = None, flags: Sequence[str] = FLAGS
) -> None:
    """Compile the kernels to a file, which appears when it is complete. Raises HostError."""
    failed = HostError("there is no C compiler for the kernels of exact", hint=HINT)
    for command in [compiler] if compiler else compilers():
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            marked = [f"-march={level}"] if level else []
            if command == ZIG:
                marked = [f"-mcpu={level.replace('-', '_') if level else 'baseline'}"]
            try:
                subprocess.run(
                    [*command, *flags, *marked, "-o", str(made), str(SOURCE)],
                    check=True, capture_output=True, text=True, timeout=_SECONDS,
                    env={**os.environ, "ZIG_GLOBAL_CACHE_DIR": folder, "ZIG_LOCAL_CACHE_DIR": folder},
                )  # fmt: skip
            except (OSError, subprocess.SubprocessError) as error:
                said = first_line(getattr(error, "stderr", None) or str(error))
                failed = HostError(f"{' '.join(command)} cannot compile the kernels of exact: {said}", hint=HINT)
                continue
            made.replace(target)
            return
    raise failed
