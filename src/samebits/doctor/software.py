"""Checks of Python, of installed packages against the lock, and of torch against the driver."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from samebits.doctor.finding import Finding, check, failed, ok, skipped, warning
from samebits.errors import counted, few, first_line
from samebits.here import install_command, torch_command
from samebits.host import SILENT_HINT, installed
from samebits.host.software import OLDEST_GPU, OTHER_BUILD, major, rocm_unused
from samebits.numerics.exact.compiled import HINT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from samebits.host import DriverFacts, TorchBuild

SHOWN = 5  # packages that are listed by name; the rest is counted
CUDA_SECONDS = 120.0


@check("python")
def python() -> Finding:
    """Whether the locks are for this version of Python."""
    version = platform.python_version()
    try:
        accepts = metadata.metadata("samebits")["Requires-Python"]
    except metadata.PackageNotFoundError:
        return warning(f"{version}; samebits is not installed, and runs from its folder", install_command())
    if SpecifierSet(accepts).contains(version, prereleases=True):
        return ok(version)
    return failed(f"{version}, accepts {accepts}", f"`rm -r .venv; {install_command(PYTHON='python3.12')}`")


def read_lock(path: Path) -> list[Requirement]:
    """The pins of a lock for this platform. Raises InvalidRequirement: a line is not a pin."""
    lines = path.read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line.removesuffix("\\").strip()) for line in lines if line[:1].isalnum()]
    return [pin for pin in pins if pin.marker is None or pin.marker.evaluate()]


def which_lock(build: TorchBuild, folder: Path = Path()) -> str:
    """``cpu`` or ``gpu``, by the stamp of ``make``, else by the build of torch."""
    stamps = sorted(folder.glob(".venv/.installed-*"))
    if len(stamps) == 1:
        return stamps[0].name.removeprefix(".installed-")
    return "gpu" if build.cuda else "cpu"


@check("locks")
def locks(build: TorchBuild, folder: Path = Path()) -> Finding:
    """Whether the installed packages are those of the lock."""
    which = which_lock(build, folder)
    path = folder / f"requirements.{which}.lock"
    if not path.exists():
        return skipped(f"no {path.name} here")
    try:
        pins = read_lock(path)
    except (InvalidRequirement, UnicodeDecodeError) as error:
        return failed(f"{path.name} is damaged: {first_line(str(error))}", f"`git checkout {path.name}`")
    wrong = [text for pin in pins if (text := _difference(pin))]
    if not wrong:
        return ok(f"{len(pins)} packages are as {path.name} pins them")
    inside = Path(sys.prefix).resolve() == (folder / ".venv").resolve()
    # With a stamp newer than the lock, `make` would do nothing.
    again = f"rm -f .venv/.installed-*; make .venv TORCH={which}"
    return failed(
        f"not as {path.name} pins them: {few(wrong, SHOWN)}",
        again if inside else f"this is not .venv's Python: make .venv TORCH={which}, then .venv/bin/samebits doctor",
    )


def _difference(pin: Requirement) -> str | None:
    version = installed(pin.name)
    if version is None:
        return f"{pin.name} is missing"
    # A pin without a local version accepts any build: `torch==2.13.0` may install 2.13.0+cu130.
    return None if pin.specifier.contains(version, prereleases=True) else f"{pin.name} {version} for {pin.specifier}"


@check("torch")
def torch_against_driver(build: TorchBuild, driver: DriverFacts) -> Finding:
    """Whether this build of torch can use the driver's GPUs."""
    version, cuda, gpus = build.version, build.cuda, len(driver.gpus)
    if version is None:
        return failed("not installed", install_command())
    if unused := rocm_unused(build):
        text, hint = unused
        return warning(text.removeprefix("torch "), hint)
    if driver.silent:
        text = f"{version}, and the NVIDIA driver here does not answer: {driver.problem}"
        return failed(text, SILENT_HINT) if cuda else warning(f"{text}; a CPU build does not use it", SILENT_HINT)
    if cuda is None:
        if gpus:
            hint = f"{torch_command('gpu')}; or set CUDA_VISIBLE_DEVICES= to stay on the CPU"
            return failed(f"{version} is a CPU build, and the driver shows {counted(gpus, 'GPU')}", hint)
        return ok(f"{version}, a CPU build, and no GPU to use")
    if driver.problem:
        hint = f"install NVIDIA's driver, give a container its GPUs with --gpus all, or {torch_command('cpu')}"
        return warning(f"{version} is built for CUDA {cuda}, and no driver answers: {driver.problem}", hint)
    if driver.cuda and major(driver.cuda) < major(cuda):
        hint = f"{torch_command('cpu')}, or install a driver for CUDA {major(cuda)} or newer, or {OTHER_BUILD}"
        return failed(f"{version} needs CUDA {cuda}, driver {driver.driver} runs up to {driver.cuda}", hint)
    oldest = OLDEST_GPU.get(major(cuda), 0.0)
    if old := [gpu for gpu in driver.gpus if _number(gpu.compute_capability) < oldest]:
        name, number = old[0].name, old[0].compute_capability
        text = f"{version} has no kernels for {name}, of compute capability {number}; it needs {oldest} or newer"
        return failed(text, f"{torch_command('cpu')}, or {OTHER_BUILD}")
    return ok(f"{version} for CUDA {cuda}, driver {driver.driver} runs up to {driver.cuda or 'an unknown one'}")


def _number(capability: str) -> float:
    """A compute capability as a number; that of a GPU of the future if NVML does not tell it."""
    return float(capability) if capability.replace(".", "", 1).isdecimal() else math.inf


# Runs in another process, because it starts CUDA, and a broken driver may hang or kill the process.
PROBE = """
import itertools, json, torch
if torch.cuda.is_available():
    torch.cuda.init()  # before it, torch counts whole GPUs where CUDA has one slice (MIG)
answers = []
for index in range(torch.cuda.device_count()):
    try:
        ones = torch.ones(64, 64, device=f"cuda:{index}")
        total = float((ones @ ones).sum())
        answers.append(None if total == 64**3 else f"64 x 64 ones times themselves gave {total}")
    except Exception as error:
        answers.append(str(error).strip().split(chr(10))[0])
for source, target in itertools.permutations(range(len(answers)), 2):
    if not (answers[source] or answers[target]):
        counted = torch.arange(1, 2**16, device=f"cuda:{source}")
        if not torch.equal(counted.to(f"cuda:{target}").cpu(), counted.cpu()):
            answers[target] = f"a copy from GPU {source} brought other numbers"
print(json.dumps(answers))
"""


@check("cuda")
def cuda(gpus: int, *, timeout: float = CUDA_SECONDS, environ: Mapping[str, str] = os.environ) -> Finding:
    """Whether every visible GPU can multiply two matrices, and gets what each other sends."""
    if not gpus:
        return skipped("no GPU that this torch can use")
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", PROBE],
            env={**environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        hint = "look at nvidia-smi and dmesg; a GPU that hangs needs a reset or a reboot"
        return failed(f"a small product on each GPU took longer than {timeout:.0f} s", hint)
    last = done.stderr.strip().split("\n")[-1]
    if done.returncode:
        return failed(f"torch ended with {done.returncode}: {last or 'no message'}", "see the line of torch above")
    answers: list[str | None] = json.loads(done.stdout.strip().split("\n")[-1])
    wrong = [f"GPU {index}: {first_line(answer)}" for index, answer in enumerate(answers) if answer]
    if wrong:
        hint = f"leave it out with CUDA_VISIBLE_DEVICES, or install {OTHER_BUILD}"
        if "a copy from" in wrong[0]:
            hint = "turn the IOMMU and PCIe's ACS off, as with iommu=pt on the kernel's command line; or use one GPU"
        return failed("; ".join(wrong), hint)
    if len(answers) < gpus:
        hint = "compare nvidia-smi with the versions on the line of torch above; a container needs --gpus all"
        return failed(f"torch finds {len(answers)} of {counted(gpus, 'GPU')}{f': {last}' if last else ''}", hint)
    return ok(f"{counted(gpus, 'GPU')} multiplied matrices{' and copied to each other' if gpus > 1 else ''}")


@check("kernels")
def kernels(timeout: float = 150.0) -> Finding:
    """Whether exact has compiled kernels on this host, which this compiles if nobody has yet."""
    command = [sys.executable, "-P", "-m", "samebits.numerics.exact.compiled"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return warning(f"compiling the kernels of exact took longer than {timeout:.0f} s", HINT)
    if done.returncode:
        return warning(f"not tried: {first_line(done.stderr.strip()) or done.returncode}", HINT)
    answer = json.loads(done.stdout.strip().split("\n")[-1])
    if answer["failed"]:
        whys, hints = zip(*answer["failed"], strict=True)
        return warning("; ".join(whys), hints[0])
    return ok("exact has compiled kernels on a CPU" + (" and on GPUs" if "cuda" in answer["devices"] else ""))
