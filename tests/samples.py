"""Records as stages write them, made of as little as a test wants to say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file

from samebits.host import HostFacts
from samebits.params import Params, parse_params
from samebits.records.card import Card, signed_card
from samebits.records.memory import DeviceMemory, Memory
from samebits.records.provenance import GitState
from samebits.records.run import Evaluation, Ratio, RunRecord, Timing, write_run
from samebits.records.usage import DeviceUsage
from samebits.results.comparison import Comparison, Row, RowVerdict
from samebits.results.explanation.explain import Explanation
from samebits.results.explanation.parts import Parts
from samebits.strategies.placement import Devices, Placement
from samebits.training.placement import place

if TYPE_CHECKING:
    from pathlib import Path

    from samebits.batch_split import BatchSplit
    from samebits.params.schema import NumericsName

PARAMS = parse_params({})
GPU = {"name": "GPU", "memory_gib": 80.0, "compute_capability": "9.0", "gpu_cores": 1}


def placed(
    strategy: str, params: Params = PARAMS, *, gpus: int, cores: int = 2, numerics: NumericsName = "fast"
) -> tuple[Placement, BatchSplit]:
    """``place`` with its usual arguments."""
    return place(strategy, params, numerics, Devices(gpus=gpus, cores=cores))


def ratio(median: float, low: float | None = None, high: float | None = None) -> Ratio:
    return Ratio(median=median, low=median if low is None else low, high=median if high is None else high)


def host(*, gpus: int = 0, **changes: Any) -> HostFacts:
    facts = {
        "cpu": {"model": "CPU", "machine": "x86_64", "cores": 8, "instruction_sets": []},
        "gpus": [GPU] * gpus,
        "driver": None,
        "gpus_unavailable": None,
        "python": "3.11.7",
        "torch": "2.13.0",
        "cuda": None,
        "nccl": None,
        "numpy": "2.4.0",
        "libc": None,
        "in_container": False,
        "image": None,
        "image_id": None,
        "image_digest": None,
        "image_base": None,
        "container_toolkit": None,
    }
    return HostFacts.model_validate({**facts, **changes})


def card(**changes: Any) -> Card:
    split = {"num_samples": 8, "sha256": "5a" * 32, "floor": 1.9, "teacher_loss": 1.9}
    facts = {
        "task": "vectors",
        "made_from": Params().data_identity,
        "loss": "cross_entropy",
        "input_shape": [128],
        "input_dtype": "float32",
        "input_scale": 1.0,
        "input_offset": 0.0,
        "target_shape": [],
        "target_dtype": "int64",
        "num_classes": 10,
        "floor": 1.9,
        "train": {"file": "train.safetensors", **split},
        "test": {"file": "test.safetensors", **split},
    }
    return signed_card(**{**facts, **changes})


def timing(**changes: Any) -> Timing:
    facts = {
        "training_seconds": 3.0,
        "samples_per_sec": 1000.0,
        "samples_per_sec_spread": ratio(1000.0, 990.0, 1010.0),
        "step_time_ms": 3.0,
        "step_time_p5_ms": 2.0,
        "step_time_p95_ms": 4.0,
        "speedup": None,
        "bound": None,
        "price": None,
        "peak_memory_gib": {"device0": 1.0},
    }
    return Timing.model_validate({**facts, **changes})


def memory(*devices: dict[str, int], source: str = "allocator", samples: int = 256) -> Memory:
    """What a step takes on some devices, of which only some parts are said."""
    nothing = {**dict.fromkeys(DeviceMemory.PARTS, 0), "capacity": 2**30}
    parts = [DeviceMemory.model_validate({**nothing, **device}) for device in devices or ({},)]
    return Memory.model_validate({"source": source, "samples": samples, "devices": parts})


def run_record(strategy: str = "single", numerics: str = "fast", **changes: Any) -> RunRecord:
    facts = {
        "run": f"key-{strategy}",
        "strategy": strategy,
        "numerics": numerics,
        "placement": placed(strategy, gpus=0, cores=1)[0],
        "notes": [],
        "not_applied": {},
        "speedup_unavailable": None,
        "first_unrepeated_step": None,
        "rounding": None,
        "arithmetic": None,
        "initial_sha256": "initial",
        "weights_sha256": "abc",
        "model_parameters": 4,
        "host": host(),
        "data": card(),
        "params": PARAMS,
        "measurement": {"step_ms": [400.0, 200.0], "slice_steps": 10, "chunk_steps": 5, "chunk_seconds": {}},
    }
    return RunRecord.model_validate({**facts, **changes})


def device_usage(index: int = 0, **changes: Any) -> DeviceUsage:
    facts = {"index": index, "readings": 20, "counters": {}, "unreadable": {}, "reasons": {}}
    return DeviceUsage.model_validate({**facts, **changes})


def evaluation(**changes: Any) -> Evaluation:
    facts = {"eval_loss": 2.0, "accuracy": 0.25, "floor": 1.9, "teacher_loss": 1.9, "above_floor": 0.05, "samples": 9}
    return Evaluation.model_validate({**facts, "weights_sha256": "abc", **changes})


def run_files(folder: Path, record: RunRecord, *, losses: tuple[float, ...] = (2.0, 1.5), weight: float = 1.0,
              **timings: Any) -> None:  # fmt: skip
    """What a training leaves."""
    folder.mkdir(parents=True, exist_ok=True)
    write_run(folder, record, timing(**timings), losses)
    save_file({"weight": np.full(4, weight, np.float32)}, folder / "model.safetensors")


def row(strategy: str = "single", *, devices: int = 1, **changes: Any) -> Row:
    facts = {
        "run": f"key-{strategy}",
        "strategy": strategy,
        "numerics": "fast",
        "num_devices": devices,
        "devices_used": devices,
        "device_type": "cuda",
        "has_ranks": strategy not in ("single", "dp"),
        **timing().model_dump(),
        "speedup_unavailable": None,
        "slice_step_ms": None,
        "scaling_efficiency": None,
        **evaluation().model_dump(),
        "final_loss": 2.0,
        "verdict": None,
        "weights_sha256": f"{strategy}-hash",
        "data_sha256": "data-hash",
        "labels": [],
        "notes": [],
        "not_applied": {},
        "curve": {"step": [10, 20, 30], "seconds": [0.1, 0.2, 0.3], "loss": [2.3, 2.1, 2.0]},
        "step_ms_percentiles": [1.0 + i / 100 for i in range(101)],
    }
    return Row.model_validate({**facts, **changes})


def verdict(
    grade: str,
    *,
    losses: float = 0.0,
    weights: float = 0.0,
    steps: int = 2,
    tensor: str = "weight",
    against: str = "single-fast",
) -> RowVerdict:
    """On a run whose losses and whose one tensor differ by so much, where 1% passes."""
    of_losses = {
        "grade": grade,
        "measured": True,
        "steps": steps,
        "first_difference": 1 if losses else None,
        "largest_relative": losses,
        "largest_at": 2 if losses else None,
        "tolerance": 0.01,
        "first_beyond": None,
        "values": None,
        "problem": None,
    }
    of_weights = {
        "grade": grade,
        "tolerance": 0.01,
        "tensors": 1,
        "different": 1 if weights else 0,
        "largest_relative": weights,
        "largest_in": tensor if weights else None,
    }
    facts = {"grade": grade, "against": against, "losses": of_losses, "weights": of_weights}
    return RowVerdict.model_validate(facts)


def explanation(**parts: float) -> Explanation:
    """Of a step with these parts, and no cause to name."""
    facts = {**dict.fromkeys(Parts.model_fields, 0.0), **parts}
    total = sum(facts.values())
    return Explanation.model_validate(
        {
            "step_ms": total,
            "plain_ms": total,
            "parts": facts,
            "losses": None,
            "findings": [],
            "bounds": {"copy_gb_per_s": 20.0, "optimizer_floor_ms": 0.1},
        }
    )


def comparison(*rows: Row, **changes: Any) -> Comparison:
    facts = {
        "created": "2026-01-02T03:04:05+00:00",
        "pipeline": "dvc.yaml",
        "task": "vectors",
        "model": "mlp",
        "global_batch_size": 256,
        "steps": 30,
        "params": PARAMS,
        "host": host(gpus=4),
        "host_fingerprint": "f00",
        "git": GitState(commit="c0ffee", dirty=True),
        "rows": rows or (row(),),
    }
    return Comparison.model_validate({**facts, **changes})
