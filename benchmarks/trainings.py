"""Trainings as people have them, in ``benchmarks/experiments``: whether every strategy trains the same model.

In fast, ddp on two devices beside single. In exact, the hashes of the weights under single and ddp, with other numbers
of devices and of loading processes, with PyTorch's and MKL's kernels for other instruction sets, and after a stop.

python benchmarks/trainings.py
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from ruamel.yaml import YAML

from common import ROOT, save, some, wait_for, with_out_dir
from samebits.host import host_facts
from samebits.records.run import read_refusal, read_run
from samebits.results.verdict import compare_runs
from samebits.results.verdict_text import say_apart

if TYPE_CHECKING:
    from collections.abc import Mapping

EXPERIMENTS = {file.stem: file for file in sorted((ROOT / "benchmarks/experiments").glob("*.py"))}
TRAIN: dict[str, Any] = {
    "strategies": ["single", "ddp"], "numerics": ["fast", "exact"], "num_devices": 2, "oversubscribe": True,
    "global_batch_size": 24, "epochs": 8, "repeats": 1, "checkpoint_every_steps": 1,
    "optimizer": {"name": "adamw", "lr": 0.003},
}  # fmt: skip
DATA = {"task": "dataset", "num_samples": 120, "test_samples": 40}
RESUMED = "after a stop"


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to make the exact training: a strategy, its devices, processes that load samples, and kernels."""

    strategy: str = "single"
    devices: int = 1
    loading: int = 2
    environ: Mapping[str, str] = field(default_factory=dict)
    needs: str = ""  # of the CPU


SSE = {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
WAYS = {
    "1 device": Way(),
    "2 devices": Way(strategy="ddp", devices=2),
    "3 devices": Way(strategy="ddp", devices=3),
    "no loading process": Way(loading=0),
    "1 loading process": Way(loading=1),
    "4 loading processes": Way(loading=4),
    "SSE": Way(environ=SSE),
    "AVX2": Way(environ={"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2"}, needs="avx2"),
    "AVX-512": Way(environ={"ATEN_CPU_CAPABILITY": "avx512"}, needs="avx512f"),
    RESUMED: Way(),
}


class Training:
    """One of the experiments in a folder of its own."""

    def __init__(self, folder: Path, file: Path) -> None:
        self._folder = folder
        shutil.copy(file, folder / "experiment.py")
        self._write_params(2)
        self._first: Path | None = None
        self.error = self._run("prepare")

    def fast(self, strategy: str) -> Path | None:
        """Train in fast numerics; return the run's folder, or None with an ``error``."""
        return self._train("fast", Way(strategy=strategy, devices=2))

    def exact(self, name: str, way: Way) -> str:
        """The hash of the weights of the exact training, or what it was refused for.

        If the samples are not those of the first way, the hash comes with the first that differs.
        """
        self._write_params(way.loading)
        if name == RESUMED:
            self._stop_early(way)
        folder = self._train("exact", way)
        if folder is None:
            return self.error
        if refusal := read_refusal(folder):
            return f"refused: {refusal.what}"
        run = read_run(folder)
        resumed = any(note.kind == "resumed" for note in run.record.notes)
        assert resumed == (name == RESUMED), run.record.notes
        first = self._first = self._first or Path(shutil.copytree(folder, self._folder / "first"))
        data = compare_runs(read_run(first), run).data
        differ = data is not None and "differ" in data
        return f"{data} ({run.record.weights_sha256[:12]})" if differ else run.record.weights_sha256

    def _write_params(self, loading: int) -> None:
        loader = {"num_workers": loading, "prefetch_factor": 2}
        params = {"data": DATA, "model": {"name": "experiment:make"}, "train": {**TRAIN, "loader": loader}}
        YAML().dump(params, self._folder / "params.yaml")

    def _train(self, numerics: str, way: Way) -> Path | None:
        self.error = self._run(*self._command(numerics, way), environ=way.environ)
        return None if self.error else self._folder / f"runs/{way.strategy}-{numerics}"

    def _command(self, numerics: str, way: Way) -> list[str]:
        devices = ["--num-devices", str(way.devices)] if way.strategy != "single" else []
        return ["train", "--strategy", way.strategy, "--numerics", numerics, "--no-tracking", *devices]

    def _run(self, name: str, *arguments: str, environ: Mapping[str, str] | None = None) -> str:
        """Run a stage, and return its error; empty if it has none."""
        with self._start(name, *arguments, environ=environ) as process:
            _, said = process.communicate()
        if not process.returncode:
            return ""
        lines = [line for line in said.splitlines() if line.startswith("error: ")]
        return lines[-1] if lines else f"ended with {process.returncode}"

    def _start(self, name: str, *arguments: str, environ: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", str(ROOT / f"pipeline/{name}.py"), *arguments]
        return subprocess.Popen(
            command, cwd=self._folder, env={**os.environ, **(environ or {})}, text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip

    def _stop_early(self, way: Way) -> None:
        """Start the exact training, and end it once it has left a checkpoint."""
        resume = self._folder / ".samebits/resume"
        with self._start(*self._command("exact", way)) as process:
            wait_for(
                lambda: [*resume.rglob("*.safetensors")] or process.poll() is not None, 300, lambda: "no checkpoint"
            )
            process.send_signal(signal.SIGTERM)
            process.communicate()


def in_fast(training: Training) -> str:
    """The verdict on ddp against single, or why there is none."""
    runs = []
    for strategy in ("single", "ddp"):
        if (folder := training.fast(strategy)) is None:
            return training.error
        runs.append(read_run(folder))
    verdict = compare_runs(*runs)
    return "; ".join([verdict.grade, *say_apart(verdict)])


def lines_of(file: Path) -> int:
    """Lines that somebody wrote, without blank ones and the docstring."""
    return sum(bool(line.strip()) for line in file.read_text(encoding="utf-8").splitlines()) - 1


def measure(file: Path) -> dict[str, Any]:
    """The verdict in fast numerics, and the ways by what the exact training gave."""
    available = host_facts().cpu.instruction_sets
    with tempfile.TemporaryDirectory() as folder:
        training = Training(Path(folder), file)
        fast = training.error or in_fast(training)
        exact: dict[str, list[str]] = {}
        for name, way in some(WAYS).items() if not training.error else ():
            if not way.needs or way.needs in available:
                exact.setdefault(training.exact(name, way), []).append(name)
    return {"lines": lines_of(file), "fast": fast, "exact": exact}


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@with_out_dir
def main(names: tuple[str, ...], out_dir: Path) -> None:
    found = {}
    for name in names or [*some(EXPERIMENTS)]:
        found[name] = one = measure(EXPERIMENTS[name])
        print(f"{name} ({one['lines']} lines): fast {one['fast']}; exact:", flush=True)
        for result, ways in one["exact"].items():
            print(f"    {result[:100]}: {len(ways)} ways: {', '.join(ways)}", flush=True)
    record = {"trainings": found, "steps": TRAIN["epochs"] * DATA["num_samples"] // TRAIN["global_batch_size"]}
    print(save(out_dir, "trainings", {"question": "are people's trainings the same model", **record}))


if __name__ == "__main__":
    main()
