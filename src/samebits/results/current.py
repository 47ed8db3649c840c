"""Checks that results belong to the current params."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from samebits.errors import UserError
from samebits.params import keys_affecting, values_affecting
from samebits.records.run import LOSSES, RECORD, require_made_with

if TYPE_CHECKING:
    from pathlib import Path

    from samebits.params import Params
    from samebits.records.run import Run

AGAIN = "train again with `dvc repro`"
AGAIN_OR_BACK = f"{AGAIN}, or take the params back"


def require_current(recorded: Params, made: Path, params: Params) -> None:
    """Raise UserError: the file or folder ``made`` records other params than the current ones."""
    hint = "run `dvc repro`, or name what to read"
    require_made_with(made, settings_of(recorded), settings_of(params), hint=hint)


def require_comparable(run: Run, params: Params, first: Run) -> None:
    """Raise UserError: a run has other params, another number of steps, or other data than the first run."""
    recorded, given = settings_of(run.record.params), settings_of(params)
    require_made_with(run.folder / RECORD, recorded, given, hint=AGAIN_OR_BACK)
    if len(run.losses) != params.total_steps:
        got = f"{len(run.losses)} steps, expected the {params.total_steps} of the params"
        raise UserError(f"{run.folder / LOSSES}: {got}", hint=AGAIN)
    data, expected = run.record.data.sha256, first.record.data.sha256
    if data != expected:
        got = f"SHA-256 {data[:12]}, {first.name} on {expected[:12]}"
        raise UserError(f"{run.folder / RECORD}: trained on other data: {got}", hint=AGAIN)


def settings_of(params: Params) -> dict[str, Any]:
    """The params that all runs of a comparison share, by their dotted names.

    Params that change no run are left out, and so are params in which the runs differ.
    """
    changes = values_affecting(params, "exact", "fast", "time", "devices")
    return {name: value for name, value in changes.items() if name not in keys_affecting("own_devices")}
