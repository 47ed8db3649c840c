"""Gather the wheels that tools/gpu_check.py --here needs beside PyTorch, for a host without a network.

    python tools/gpu_wheels.py [FOLDER] [--python 3.12]

Versions and hashes are those of requirements.gpu.lock. On the host, install them beside its PyTorch:

\b
    python -m pip install --no-index --no-deps --target site FOLDER/*.whl
    PYTHONPATH=src:site python tools/gpu_check.py --here --only host --only repro --minutes 8
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import click
from packaging.requirements import Requirement

from samebits.errors import HostError, exit_on_error

ROOT = Path(__file__).resolve().parent.parent
NEEDED = (
    "click", "expecttest", "hypothesis", "jinja2", "matplotlib", "numpy", "nvidia-ml-py", "psutil", "pydantic",
    "pytest", "pytest-timeout", "rich", "ruamel.yaml", "safetensors", "tqdm",
)  # fmt: skip
"""Packages that the stages and tests/gpu import, but for PyTorch, DVC and MLflow."""

PYTHONS = ("3.11", "3.12", "3.13")
"""Those of the lock."""

MOST_MIB = 64
"""The most that all wheels may have together."""

_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17, 12, 5)] + ["manylinux2014_x86_64"]


def closure(names: tuple[str, ...] = NEEDED) -> list[str]:
    """These packages and all that they need, as installed here."""
    todo, found = [*names], set[str]()
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in found:
            continue
        found.add(name)
        for text in metadata.requires(name) or ():
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                todo.append(need.name)
    return sorted(found)


def pins(names: list[str], lock: str, python: str) -> str:
    """The entries of a lock for these packages and this Python, with their hashes.

    Markers are left out, because pip holds them against its own Python. Raises HostError: the lock lacks a package.
    """
    about = {"python_version": python, "python_full_version": f"{python}.0"}
    found = {}
    for entry in re.split(r"\n(?=\S)", lock.strip()):
        first, _, hashes = entry.partition("\\\n")
        need = Requirement(first)
        if need.name in names and (need.marker is None or need.marker.evaluate(about)):
            found[need.name] = f"{need.name}{need.specifier} \\\n{hashes}\n"
    if missing := [name for name in names if name not in found]:
        raise HostError(f"requirements.gpu.lock has no {', '.join(missing)} for Python {python}", hint="make lock")
    return "".join(found.values())


def with_pip() -> list[str]:
    """A Python's pip: an environment that uv has made has none. Raises HostError: there is none."""
    for python in (sys.executable, sys._base_executable, "python3"):  # type: ignore[attr-defined]
        command = [str(python), "-m", "pip"]
        if subprocess.run([*command, "--version"], capture_output=True, check=False).returncode == 0:
            return command
    raise HostError("no pip", hint="apt install python3-pip")


@click.command(help=__doc__)
@click.argument("folder", default="wheels", type=click.Path(path_type=Path))
@click.option(
    "--python", default="3.12", show_default=True, type=click.Choice(PYTHONS), help="Version of Python on the host."
)
def main(folder: Path, python: str) -> None:  # noqa: D103 - click
    with exit_on_error(), tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        names = closure()
        file.write(pins(names, (ROOT / "requirements.gpu.lock").read_text(encoding="utf-8"), python))
        file.flush()
        options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--implementation", "cp", "--quiet"]
        platforms = [word for platform in _PLATFORMS for word in ("--platform", platform)]
        command = [*with_pip(), "download", *options, *platforms, "--python-version", python, "-d", str(folder)]
        if subprocess.run([*command, "-r", file.name], check=False).returncode:
            raise HostError("pip could not get all wheels", hint=f"its last line says why; is {folder} writable?")
        mib = sum(wheel.stat().st_size for wheel in folder.glob("*.whl")) / 2**20
        if mib > MOST_MIB:
            raise HostError(f"{folder} has {mib:.0f} MiB, expected at most {MOST_MIB}", hint="empty the folder first")
        click.echo(f"{folder}: {len(names)} packages for Python {python}, {mib:.1f} MiB")


if __name__ == "__main__":
    main()
