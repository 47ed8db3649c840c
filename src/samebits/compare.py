"""Put the runs of one pipeline beside each other: ``reports/comparison.json``, from files alone, without torch."""

from __future__ import annotations

import itertools
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from samebits.errors import UserError
from samebits.files import read_json
from samebits.host import fingerprint
from samebits.metrics import percentile
from samebits.records import Run, read_run
from samebits.verdict import compare_runs, sentences

if TYPE_CHECKING:
    from samebits.params import Params

NOISY_SPREAD = 0.15  # of samples per second between repeats
MAX_POINTS = 100  # of a curve: each is the mean of a group of steps, whose batches differ


def compare(params: Params, runs: Path = Path("runs"), host_file: Path = Path("host.json")) -> dict[str, Any]:
    """Collect every (strategy, numerics) of ``params.train`` into one record.

    Raises:
        UserError: a run's files are missing; the hint names the command that makes them.
    """
    train = params.train
    host = read_json(host_file, made_by="python pipeline/host.py")
    rows = []
    references: dict[str, Run] = {}
    for numerics in train.numerics:
        for strategy in train.strategies:
            command = f"python pipeline/train.py --strategy {strategy} --numerics {numerics}"
            run = read_run(runs / f"{strategy}-{numerics}", made_by=command)
            if len(run.losses) != params.total_steps:
                raise UserError(
                    f"{run.folder / 'losses.csv'}: {len(run.losses)} steps, expected the {params.total_steps} of the "
                    "params",
                    hint="train again with `dvc repro`",
                )
            evaluation = read_json(
                run.folder / "evaluation.json", made_by=command.replace("pipeline/train.py", "pipeline/evaluate.py")
            )
            rows.append(_row(run, evaluation, references.setdefault(numerics, run)))
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


def _verdict(reference: Run, run: Run) -> dict[str, Any] | None:
    """Whether a run is the same training as the first one in its numerics; None for that one."""
    if run is reference:
        return None
    found = compare_runs(reference, run)
    parts = {"grade": found["grade"], "losses": found["losses"], "weights": found["weights"]}
    return {"against": reference.name, **parts, "sentences": sentences(found)}


def curve(run: Run) -> dict[str, list[float]]:
    """Loss against step and against seconds; of at most ``MAX_POINTS`` points, each the mean of as many steps."""
    group = -(-len(run.losses) // MAX_POINTS)
    seconds = list(itertools.accumulate(milliseconds / 1e3 for milliseconds in run.record["measurement"]["step_ms"]))
    ends = list(range(group, len(run.losses) + 1, group))
    losses = [fmean(run.losses[end - group : end]) for end in ends]
    return {"step": ends, "seconds": [round(seconds[end - 1], 6) for end in ends], "loss": losses}


def slice_step_ms(record: dict[str, Any]) -> dict[str, float] | None:
    """Milliseconds of a step in the paired slices, medians over the repeats; None where nothing was paired.

    ``own`` is the strategy's; alone on one device, ``single`` does the whole batch and ``share`` one device's share.
    """
    measurement = record["measurement"]
    seconds = measurement["chunk_seconds"]
    if "share" not in seconds:
        return None
    return {
        name: 1e3 * median(sum(chunks) for chunks in seconds[name]) / measurement["slice_steps"]
        for name in ("own", "single", "share")
    }


def _row(run_files: Run, evaluation: dict[str, Any], reference: Run) -> dict[str, Any]:
    run, timing, strategy = run_files.record, run_files.timing, run_files.record["strategy"]
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
    if run.get("initial_sha256") != reference.record.get("initial_sha256"):
        text = f"its first weights are not those of {reference.name}: the factory draws numbers that are not seeded"
        labels.append({"kind": "different_start", "text": text})
    return {
        "run": run["run"],
        "strategy": strategy,
        "numerics": run["numerics"],
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
        "price": timing["price"],
        "slice_step_ms": slice_step_ms(run),
        "scaling_efficiency": speedup["median"] / placement["devices_used"] if speedup else None,
        **evaluation,
        "final_loss": run_files.losses[-1],
        "verdict": _verdict(reference, run_files),
        "weights_sha256": run["weights_sha256"],
        "data_sha256": run["data_sha256"],
        "labels": labels,
        "notes": run["notes"],
        "not_applied": run["not_applied"],
        "curve": curve(run_files),
        "step_ms_percentiles": [percentile(run["measurement"]["step_ms"], percent) for percent in range(101)],
    }
