"""Put the runs of one pipeline beside each other: ``reports/comparison.json``, from files alone, without torch."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samebits.errors import UserError
from samebits.files import read_json
from samebits.host import fingerprint
from samebits.metrics import relative_difference

if TYPE_CHECKING:
    from samebits.params import Params

NOISY_SPREAD = 0.15  # of samples per second between repeats


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


def compare_losses(reference: list[float], losses: list[float]) -> dict[str, Any]:
    """First step, from 1, whose losses differ, the largest relative difference, and where it is."""
    differences = [relative_difference(a, b) for a, b in zip(reference, losses, strict=True)]
    largest = max(differences, default=0.0)
    first = next((step for step, value in enumerate(differences, start=1) if value), None)
    return {
        "first_difference": first,
        "largest_relative": largest,
        "largest_at": differences.index(largest) + 1 if first else None,
    }


def compare(params: Params, runs: Path = Path("runs"), host_file: Path = Path("host.json")) -> dict[str, Any]:
    """Collect every (strategy, numerics) of ``params.train`` into one record.

    Raises:
        UserError: a run's files are missing; the hint names the command that makes them.
    """
    train = params.train
    host = read_json(host_file, made_by="python pipeline/host.py")
    rows = []
    references: dict[str, tuple[str, list[float]]] = {}
    for numerics in train.numerics:
        for strategy in train.strategies:
            folder = runs / f"{strategy}-{numerics}"
            losses = read_losses(folder / "losses.csv")
            if len(losses) != params.total_steps:
                raise UserError(
                    f"{folder / 'losses.csv'}: {len(losses)} steps, expected the {params.total_steps} of the params",
                    hint="train again with `dvc repro`",
                )
            references.setdefault(numerics, (strategy, losses))
            rows.append(_row(folder, strategy, numerics, losses, references[numerics]))
    return {
        "task": params.data.task,
        "model": params.model.name,
        "global_batch_size": train.global_batch_size,
        "steps": params.total_steps,
        "params": params.model_dump(mode="json"),
        "host": host,
        "host_fingerprint": fingerprint(host),
        "rows": rows,
    }


def _row(
    folder: Path, strategy: str, numerics: str, losses: list[float], reference: tuple[str, list[float]]
) -> dict[str, Any]:
    train_command = f"python pipeline/train.py --strategy {strategy} --numerics {numerics}"
    run = read_json(folder / "run.json", made_by=train_command)
    timing = read_json(folder / "timing.json", made_by=train_command)
    evaluation = read_json(folder / "evaluation.json", made_by=train_command.replace("train.py", "evaluate.py"))
    placement = run["placement"]
    speedup = timing["speedup"]
    if strategy == "single":
        speedup = {"median": 1.0, "low": 1.0, "high": 1.0}
    labels = list(placement["labels"])
    speeds = timing["samples_per_sec_spread"]
    if speeds["high"] > speeds["low"] * (1 + NOISY_SPREAD):
        percent = 100 * (speeds["high"] / speeds["low"] - 1)
        labels.append({"kind": "noisy", "text": f"samples per second differed by {percent:.0f}% between repeats"})
    if step := run["first_unrepeated_step"]:
        text = f"a repeat on this host gave another loss at step {step}"
        labels.append({"kind": "not_repeatable", "text": text})
    return {
        "run": run["run"],
        "strategy": strategy,
        "numerics": numerics,
        "num_devices": placement["num_devices"],
        "devices_used": placement["devices_used"],
        "device_type": placement["device_type"],
        "training_seconds": timing["training_seconds"],
        "samples_per_sec": timing["samples_per_sec"],
        "samples_per_sec_spread": speeds,
        "step_time_ms": timing["step_time_ms"],
        "step_time_p5_ms": timing["step_time_p5_ms"],
        "step_time_p95_ms": timing["step_time_p95_ms"],
        "peak_memory_gib": timing["peak_memory_gib"],
        "speedup": speedup,
        "speedup_unavailable": run["speedup_unavailable"],
        "bound": timing["bound"],
        "scaling_efficiency": speedup["median"] / placement["devices_used"] if speedup else None,
        **evaluation,
        "final_loss": losses[-1],
        "loss_difference": {"against": reference[0], **compare_losses(reference[1], losses)},
        "weights_sha256": run["weights_sha256"],
        "data_sha256": run["data_sha256"],
        "labels": labels,
        "notes": run["notes"],
        "not_applied": run["not_applied"],
    }
