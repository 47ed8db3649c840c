"""Machines, and trainings over them."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from machines import machines, why_none
from ruamel.yaml import YAML

from conftest import copy_sources, small

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from machines import Machine, Process


_LACKING = why_none("iptables")

needs_machines = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(_LACKING) and not os.environ.get("SAMEBITS_NEEDS_NODES"), reason=f"needs machines: {_LACKING}"
    ),
]
"""Marks of every test here. With SAMEBITS_NEEDS_NODES, tests without machines fail and are not skipped."""


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Callable[[int], list[Machine]]]:
    """Make a number of machines."""
    with ExitStack() as stack:
        yield lambda count: stack.enter_context(machines(count, tmp_path / "machines"))


def git(folder: Path, *command: str) -> None:
    """Run git there, as an author."""
    subprocess.run(["git", "-c", "user.name=A", "-c", "user.email=a@b", *command], cwd=folder, check=True)


@dataclass
class Checkout:
    """A copy of the kit's sources with its own params, to train in."""

    folder: Path

    def write_params(self, raw: dict[str, Any]) -> None:
        """Write params.yaml."""
        with (self.folder / "params.yaml").open("w") as stream:
            YAML().dump(raw, stream)

    def change_params(self, changes: dict[str, Any]) -> None:
        """Write params.yaml with every key, which DVC wants, some of them changed."""
        raw = YAML(typ="safe").load(self.folder / "params.yaml")
        self.write_params(raw | {key: raw[key] | value for key, value in changes.items()})

    def run_here(self, stage: str, *arguments: str) -> None:
        """Run a stage on this host."""
        command = [sys.executable, f"pipeline/{stage}.py", *arguments]
        environ = {**os.environ, "PYTHONPATH": str(self.folder / "src")}
        subprocess.run(command, cwd=self.folder, env=environ, check=True)

    def prepare(self, raw: dict[str, Any]) -> None:
        """Write params.yaml, and prepare the data on this host."""
        self.write_params(raw)
        self.run_here("prepare")

    def weights(self, out: str) -> bytes:
        """The weights of a run, by its folder."""
        return (self.folder / out / "model.safetensors").read_bytes()

    def checkpoints(self) -> list[Path]:
        """Checkpoints of trainings that have not ended."""
        return sorted((self.folder / ".samebits/resume").glob("*/*.safetensors"))

    def train_alone(self, out: str = "alone") -> bytes:
        """Train in one process on this host, and give the weights: the bits of every exact training."""
        options = ["--strategy", "single", "--numerics", "exact", "--no-tracking", "--out-dir", out]
        self.run_here("train", *options)
        return self.weights(out)

    def commit(self) -> None:
        """Make it a repository of its own, with all of it committed."""
        for command in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "-m", "all"]):
            git(self.folder, *command)

    def train(
        self,
        machine: Machine,
        *arguments: object,
        numerics: str = "exact",
        strategy: str = "ddp",
        environ: dict[str, str] | None = None,
    ) -> Process:
        """Start stage train there, untracked unless ``arguments`` say otherwise."""
        script = self.folder / "pipeline/train.py"
        command = [sys.executable, script, "--strategy", strategy, "--numerics", numerics, *arguments]
        # Not train.timeout_s, which is short where a test waits for it.
        mine = {"PYTHONPATH": str(self.folder / "src"), "SAMEBITS_START_SECONDS": "300", **(environ or {})}
        return machine.start(*command, cwd=self.folder, environ=mine)

    def train_on(
        self, nodes: Sequence[Machine], *arguments: object, environs: Sequence[dict[str, str]] = (), **options: Any
    ) -> list[Process]:
        """Start it on all of them, the first of which is node 0."""
        given = [*environs, *({} for _ in nodes)]
        return [
            self.train(
                node, "--nodes", len(nodes), "--node-rank", rank, "--master", nodes[0].name, *arguments,
                environ=given[rank], **options,
            )
            for rank, node in enumerate(nodes)
        ]  # fmt: skip


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """A checkout of its own."""
    folder = tmp_path / "kit"
    copy_sources(folder)
    return Checkout(folder)


def all_end(processes: Sequence[Process], code: int = 0) -> list[tuple[int, str, str]]:
    """Wait for all processes and check their exit codes; the code, stdout and stderr of each."""
    ended = [process.wait() for process in processes]
    assert [one for one, *_ in ended] == [code] * len(processes), ended
    return ended


RUNS = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(sys.argv[1])
ids = [experiment.experiment_id for experiment in client.search_experiments()]
print(json.dumps([{"status": run.info.status, **run.data.tags} for run in client.search_runs(ids)]))
"""
"""Prints the runs of a store of MLflow's, each with its status and tags."""

USERS = """
from torch import nn

def make(features, classes):
    return nn.Sequential(nn.Linear(features, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, classes))
"""
MODELS = {
    "mlp": ("vectors", None),
    "gpt": ("tokens", {"name": "gpt", "kwargs": {"width": 32, "layers": 1}}),
    "users": ("vectors", {"name": "users:make", "source": "users.py", "kwargs": {"features": 128, "classes": 10}}),
}


def params_of(model, folder, **train):
    """Parameters of a training of one of the models; the file of the user's own is written to ``folder``."""
    task, spec = MODELS[model]
    (folder / "users.py").write_text(USERS)
    return small(task, model=spec, **train)
