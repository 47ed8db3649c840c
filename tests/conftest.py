"""Shared fixtures: small parameters, prepared data, and trainings run as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ruamel.yaml import YAML

from samebits import host
from samebits.data.prepare import prepare
from samebits.params import Params, parse_params
from samebits.provenance import versions

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parent.parent
MODEL_OF_TASK = {"vectors": "mlp", "regression": "mlp", "images": "convnet", "tokens": "gpt"}


def pytest_report_header() -> list[str]:
    known = ", ".join(f"{name} {version}" for name, version in versions().items())
    return [known, f"host: {host.count_gpus()} GPUs, {host.count_cores()} cores"]


def small(task: str = "vectors", *, model: dict[str, Any] | None = None, **train: Any) -> dict[str, Any]:
    """Parameters of a training of 8 steps, as read from YAML."""
    return {
        "data": {"task": task, "num_samples": 512, "test_samples": 200},
        "model": model or {"name": MODEL_OF_TASK[task]},
        "train": {"global_batch_size": 64, "epochs": 1, "repeats": 1, **train},
    }


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Params], Path]:
    """Prepare each data set once."""
    made: dict[str, Path] = {}

    def get(params: Params) -> Path:
        key = params.data.model_dump_json()
        if key not in made:
            made[key] = tmp_path_factory.mktemp(params.data.task)
            prepare(params, made[key])
        return made[key]

    return get


@dataclass
class Stage:
    """A stage script in a folder of its own."""

    folder: Path

    def __call__(self, name: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(ROOT / "pipeline" / f"{name}.py"), *arguments],
            cwd=self.folder,
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            timeout=240,
        )

    def write_params(self, raw: dict[str, Any]) -> Params:
        YAML().dump(raw, self.folder / "params.yaml")
        return parse_params(raw)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)
