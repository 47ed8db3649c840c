"""Write what the doctor says on hosts with GPUs into its guide: ``python tools/gpu_hosts.py``. A test compares them.

The hosts are those of the stand-in for NVML, ``tools/nvml``, some with a fault. The line ``cuda`` is left out, because
it needs real GPUs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import nvml
from pages import between

ROOT = Path(__file__).resolve().parent.parent
GUIDE = ROOT / "docs/guides/doctor.md"

ASK = """
import json, os, sys
from samebits.doctor import software, checks
from samebits.errors import HostError
from samebits.host import driver_facts, torch_build
software.cuda = lambda gpus: []
answers = []
for environ in json.load(sys.stdin):
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.environ.update(environ)
    try:
        driver = driver_facts(ask_cuda=True)
    except HostError as error:
        driver = error
    findings = checks.gpu_findings(torch_build(), driver)
    answers.append([line.plain for finding in findings for line in checks.as_lines(finding, 100)])
json.dump(answers, sys.stdout)
"""
"""Program that prints the doctor's lines for a list of environments. The stand-in reads its host for each."""


@dataclass(frozen=True)
class Case:
    """A host of the guide: its title, the stand-in's host, more lines about that, and CUDA_VISIBLE_DEVICES."""

    title: str
    host: str
    more: tuple[str, ...] = ()
    devices: str | None = None
    cuda: str | None = nvml.CUDA


DEAD = ("gpu 2", "fails all GPU_IS_LOST")
CASES = (
    Case("Four A100 with NVLink", "A"),
    Case("One RTX 4090", "B"),
    Case("Eight H100, of which `CUDA_VISIBLE_DEVICES=2,3` leaves two", "C", devices="2,3"),
    Case("Two T4 that do not reach each other", "D"),
    Case("Two H100 in MIG mode, without a choice", "E"),
    Case(
        "The same, as a scheduler gives one slice away: `CUDA_VISIBLE_DEVICES=MIG-...`",
        "E",
        devices="MIG-00000001-0000-5000-8000-000000000000",
    ),
    Case("Two L4 of four, which Slurm gave to this job", "F"),
    Case("A driver that is older than the GPU lock's CUDA", "B", ("driver 550.54.14", "cuda 12.4")),
    Case("One dead GPU of four", "A", DEAD),
    Case("The same, with others chosen: `CUDA_VISIBLE_DEVICES=0,1`", "A", DEAD, "0,1"),
    Case("A GPU that is too hot, and one that somebody else uses", "D",
         ("gpu 0", "reasons 0x40", "gpu 1", "used_mib 14000", "utilization 99")),
    Case("A clone that was installed on a login node without a GPU", "B", cuda=None),
)  # fmt: skip


def section() -> str:
    """The doctor's lines about GPUs on all hosts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        library = nvml.build(folder)
        settings = []
        for number, case in enumerate(CASES):
            file = folder / f"{number}.txt"
            file.write_text("\n".join([nvml.HOSTS[case.host].read_text(), *case.more, ""]))
            settings.append({"STAND_IN_NVML": str(file), "STAND_IN_CUDA": case.cuda or ""})
            if case.devices is not None:
                settings[-1]["CUDA_VISIBLE_DEVICES"] = case.devices
        environ = {**os.environ, **nvml.environ(library, nvml.HOSTS["A"]), "NCCL_P2P_DISABLE": "0"}
        command, asked = [sys.executable, "-c", ASK], json.dumps(settings)
        done = subprocess.run(command, env=environ, input=asked, stdout=subprocess.PIPE, text=True, check=True)
    hosts = zip(CASES, json.loads(done.stdout), strict=True)
    return "\n".join("\n".join([f"{case.title}:\n\n```text", *lines, "```\n"]) for case, lines in hosts)


def filled(text: str) -> str:
    """The guide with the current section."""
    return between("<!-- hosts -->\n", "<!-- /hosts -->\n", section(), text)


if __name__ == "__main__":
    GUIDE.write_text(filled(GUIDE.read_text(encoding="utf-8")), encoding="utf-8")
