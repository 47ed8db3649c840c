"""A finished training in one line. Apart from the report, so that editing the report retrains nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from samebits.files import read_json

if TYPE_CHECKING:
    from pathlib import Path

    from samebits.metrics import Spread


def times(value: Spread | None) -> str:
    """A ratio with its range, for people."""
    if value is None:
        return "–"
    if value["low"] == value["high"]:
        return f"{value['median']:.2f}x"
    return f"{value['median']:.2f}x ({value['low']:.2f}–{value['high']:.2f})"


def notes_of(folder: Path) -> list[str]:
    """What a reader must know of that training: labels, notes and settings that were not applied."""
    run = read_json(folder / "run.json", made_by="python pipeline/train.py")
    found = [f"{label['kind'].replace('_', ' ')}: {label['text']}" for label in run["placement"]["labels"]]
    found += [f"note: {note}" for note in run["notes"]]
    return found + [f"note: {key} was not applied: {why}" for key, why in run["not_applied"].items()]


def describe_run(folder: Path) -> str:
    """One line about the training that left its files in ``folder``."""
    run, timing = (read_json(folder / name, made_by="python pipeline/train.py") for name in ("run.json", "timing.json"))
    parts = [
        f"{run['strategy']}-{run['numerics']}: {timing['training_seconds']:.2f} s",
        f"median step {timing['step_time_ms']:.3g} ms",
        f"{timing['samples_per_sec']:,.0f} samples/s",
    ]
    if timing["speedup"]:
        parts.append(f"{times(timing['speedup'])} single, bound {times(timing['bound'])}")
    elif run["speedup_unavailable"]:
        parts.append(f"no speed-up: {run['speedup_unavailable']}")
    return ", ".join(parts) + f", weights {run['weights_sha256'][:12]}"


def devices_of(placed: dict[str, Any]) -> str:
    """Devices of a placement or of a row of a comparison, for people: ``2 GPUs``."""
    kind = "GPU" if placed["device_type"] == "cuda" else "CPU device"
    return f"{placed['devices_used']} {kind}{'s' if placed['devices_used'] > 1 else ''}"


def where(placement: dict[str, Any]) -> str:
    """Strategy and devices of a placement, for people: ``ddp on 2 GPUs``."""
    return f"{placement['strategy']} on {devices_of(placement)}"
