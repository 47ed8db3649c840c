"""What a run left in its folder, read back without torch."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from samebits.errors import UserError
from samebits.files import read_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FILES = ("model.safetensors", "losses.csv", "timing.json", "run.json")
"""What a training writes, and what is kept of it as artifacts."""


@dataclass(frozen=True)
class Run:
    """A finished training: ``record`` is its run.json, ``timing`` its timing.json, ``losses`` by step from 1."""

    folder: Path
    record: dict[str, Any]
    timing: dict[str, Any]
    losses: list[float]

    @property
    def name(self) -> str:
        """Strategy and numerics, as in ``runs/NAME``."""
        return f"{self.record['strategy']}-{self.record['numerics']}"


def read_losses(path: Path) -> list[float]:
    """The losses of a ``losses.csv``, by step.

    Raises:
        UserError: the file is missing or is not such a file.
    """
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            return [float(row["loss"]) for row in csv.DictReader(stream)]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}", hint="train again with `dvc repro`") from None


def read_run(folder: Path, *, made_by: str = "python pipeline/train.py") -> Run:
    """Read a run's files, the weights aside.

    Raises:
        UserError: a file is missing or damaged; the hint names ``made_by``.
    """
    record, timing = (read_json(folder / name, made_by=made_by) for name in ("run.json", "timing.json"))
    return Run(folder, record, timing, read_losses(folder / "losses.csv"))


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one level with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
