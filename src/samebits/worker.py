"""What one worker process does: build, train, time, and (rank 0) write the run's files."""

from __future__ import annotations

import copy
import gc
import json
import os
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from samebits import diagnosis
from samebits.checkpoint import save_weights, weights_digest
from samebits.data.batches import Batches, load_split, on_device
from samebits.data.card import read_card
from samebits.errors import SamebitsError, WorkerError
from samebits.files import write_json, write_text
from samebits.host import host_facts
from samebits.measurement import REFERENCES, Slices, reference, time_slices
from samebits.memory import peak_gib, reset_peak
from samebits.metrics import percentile, spread
from samebits.models.build import build_model
from samebits.numerics.fast import FastNumerics
from samebits.placement import Placement, not_applied
from samebits.progress import Progress
from samebits.rounding import Rounding, measure_rounding
from samebits.strategies import make_strategy
from samebits.trainer import Snapshot, Trainable, Training, train, warm_up

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

    from samebits.data.batches import Batch
    from samebits.data.card import Card
    from samebits.params import Params
    from samebits.params.schema import NumericsName
    from samebits.runlog import RunLog
    from samebits.strategies import Strategy

WARM_UP_STEPS = {"cpu": 3, "cuda": 10}


@dataclass(frozen=True)
class Job:
    """One training, as the launcher hands it to its workers; ``key`` names the run in logs and in MLflow."""

    params: Params
    placement: Placement
    numerics: NumericsName
    data_dir: Path
    out_dir: Path
    key: str
    log: RunLog | None

    @property
    def name(self) -> str:
        """Strategy and numerics, as in ``runs/NAME``."""
        return f"{self.placement.strategy}-{self.numerics}"


class Worker:
    """One rank of a job."""

    def __init__(self, job: Job) -> None:
        self.job, self.params = job, job.params
        self.card: Card = read_card(job.data_dir / "card.json")
        self.strategy: Strategy = make_strategy(job.placement, job.params.train)
        self.model: nn.Module | None = None
        self.notes = list(job.placement.notes)
        self.host: dict[str, object] = {}
        self.initial = ""

    def run(self) -> None:
        """Train and measure; rank 0 writes ``model.safetensors``, ``losses.csv``, ``timing.json``, ``run.json``."""
        strategy, params, card = self.strategy, self.params, self.card
        strategy.setup()
        if strategy.rank == 0:
            self.host = host_facts()  # here, because where there are GPUs it starts CUDA
            self._log(
                "setup", host=self.host, data=card.model_dump(mode="json"), data_dir=str(self.job.data_dir.resolve())
            )
        numerics = FastNumerics(params.train, strategy.device, card.loss)
        numerics.configure()
        strategy.seed(params.seed)
        self.model = model = build_model(params.model, card, params.seed)
        self.initial = weights_digest(model) if strategy.rank == 0 else ""
        untrained = self._copy_for_references(model)
        data = on_device(load_split(self.job.data_dir, card, "train"), strategy.device)
        model.to(strategy.device)
        own = self._trainable(model, data, numerics)
        step_seconds = warm_up(own, WARM_UP_STEPS[strategy.device.type])
        reset_peak(strategy)
        progress = self._progress()
        training = train(own, params.total_steps, step_seconds=step_seconds, tracker=progress)
        progress.close()
        peaks = strategy.gather(torch.tensor(peak_gib(strategy), dtype=torch.float64, device=strategy.device))
        weights = save_weights(model, self.job.out_dir / "model.safetensors") if strategy.rank == 0 else ""
        final = Snapshot(model)
        strategy.barrier()  # saving a large model must not count as waiting for what comes next
        slices, slices_problem = self._slices(own, untrained, data, numerics, training, step_seconds)
        rounding = None
        if params.train.repeats > 1:
            rounding = measure_rounding(own, training.losses, final, seed=params.seed, step_seconds=step_seconds)
        times = torch.tensor(training.step_seconds, dtype=torch.float64, device=strategy.device)
        slowest = strategy.gather(times).amax(dim=0).tolist()
        total = torch.tensor([training.seconds], dtype=torch.float64, device=strategy.device)
        seconds = float(strategy.gather(total).max())
        if strategy.rank == 0:
            timing = _timing(params, seconds, slowest, slices, peaks.flatten().tolist())
            self._write(training, timing, slowest, slices, slices_problem, rounding, weights)

    def _log(self, event: str, **values: Any) -> None:
        if self.job.log:
            self.job.log.event(event, **values)

    def _copy_for_references(self, model: nn.Module) -> nn.Module | None:
        wanted = self.job.placement.may_speed_up and self.params.train.repeats > 1 and self.strategy.rank == 0
        return copy.deepcopy(model) if wanted else None

    def _progress(self) -> Progress:
        first = self.strategy.rank == 0
        following = [self.job.log] if first and self.job.log else []
        return Progress(self.job.name, self.params.total_steps, following, shown=first)

    def _trainable(self, model: nn.Module, data: Batch, numerics: FastNumerics) -> Trainable:
        train, strategy, placement = self.params.train, self.strategy, self.job.placement
        batches = Batches(
            data,
            self.card,
            seed=self.params.seed,
            global_batch_size=train.global_batch_size,
            accum=train.grad_accum_steps,
            shard=strategy.rank,
            shards=strategy.world_size,
            device=strategy.device,
        )
        initial = Snapshot(model)
        batch, wants_ddp = batches.micro_batch(0, 0), "ddp" in train.strategies
        self.notes += diagnosis.trial_step(model, numerics, batch, self.card, placement, wants_ddp=wants_ddp)
        initial.restore()
        return Trainable(model, batches, strategy, numerics, self.params)

    def _slices(
        self,
        own: Trainable,
        untrained: nn.Module | None,
        data: Batch,
        numerics: FastNumerics,
        training: Training,
        step_seconds: float,
    ) -> tuple[Slices | None, str | None]:
        """Repeats and references; a reference that does not fit on the device is said, not fatal."""
        strategy, repeats = self.strategy, self.params.train.repeats - 1
        if not repeats:
            return None, "train.repeats is 1"
        others: dict[str, Trainable] = {}
        problem = None
        if self.job.placement.may_speed_up:
            for name in REFERENCES:
                made = self._reference(name, untrained, data, numerics) if untrained is not None else None
                if made is not None:
                    others[name] = made
                # Every rank meets here after each reference, so that none waits for all of them at once.
                fits = torch.tensor([float(made is not None)], dtype=torch.float64, device=strategy.device)
                if not strategy.gather(fits)[0].item():
                    problem = "the references do not fit on one device beside the training"
        names = [] if problem or not self.job.placement.may_speed_up else list(REFERENCES)
        if problem:
            others.clear()
        slices = time_slices(own, others, names, training.losses, step_seconds=step_seconds, repeats=repeats)
        return slices, problem

    def _reference(self, name: str, model: nn.Module, data: Batch, numerics: FastNumerics) -> Trainable | None:
        try:
            made = reference(name, model, data, self.card, self.params, numerics, self.strategy)
            warm_up(made, WARM_UP_STEPS[self.strategy.device.type])
        except torch.OutOfMemoryError:
            return None
        return made

    def _has_tf32(self) -> bool:
        device = self.strategy.device
        return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)

    def _write(
        self,
        training: Training,
        timing: dict[str, Any],
        step_seconds: list[float],
        slices: Slices | None,
        slices_problem: str | None,
        rounding: Rounding | None,
        weights: str,
    ) -> None:
        job, model, out = self.job, self.model, self.job.out_dir
        assert model is not None
        losses = [np.float32(loss) for loss in training.losses]
        rows = "".join(f"{step},{loss!s}\n" for step, loss in enumerate(losses, start=1))
        write_text(out / "losses.csv", "step,loss\n" + rows)
        write_json(out / "timing.json", timing)
        record = {
            "run": job.key,
            "strategy": job.placement.strategy,
            "numerics": job.numerics,
            "placement": job.placement.as_dict(),
            "notes": self.notes,
            "not_applied": not_applied(self.params.train, job.placement, tf32=self._has_tf32()),
            "speedup_unavailable": _why_no_speedup(job.placement, slices, slices_problem),
            "first_unrepeated_step": slices.first_difference if slices else None,
            "rounding": rounding,
            "initial_sha256": self.initial,
            "weights_sha256": weights,
            "data_sha256": self.card.sha256,
            "host": self.host,
            "data": self.card.model_dump(mode="json"),
            "model_parameters": sum(p.numel() for p in model.parameters()),
            "params": self.params.model_dump(mode="json"),
            "measurement": {
                "step_ms": [float(f"{seconds * 1e3:.4g}") for seconds in step_seconds],
                "slice_steps": slices.steps if slices else 0,
                "chunk_steps": slices.chunk_steps if slices else 0,
                "chunk_seconds": slices.seconds if slices else {},
            },
        }
        write_json(out / "run.json", record)
        self._log("result", run=job.key, timing=timing, out_dir=str(out.resolve()), weights_sha256=weights)


def _timing(
    params: Params, seconds: float, step_seconds: list[float], slices: Slices | None, peaks: list[float]
) -> dict[str, Any]:
    """The figures of timing.json; times in ms per step are those of the slowest rank."""
    steps, batch = len(step_seconds), params.train.global_batch_size
    speeds = [steps * batch / seconds]
    if slices:
        speeds += [slices.steps * batch / sum(chunks) for chunks in slices.seconds["own"]]
    return {
        "training_seconds": seconds,
        "samples_per_sec": steps * batch / seconds,
        "samples_per_sec_spread": spread(speeds),
        "step_time_ms": percentile(step_seconds, 50) * 1e3,
        "step_time_p5_ms": percentile(step_seconds, 5) * 1e3,
        "step_time_p95_ms": percentile(step_seconds, 95) * 1e3,
        "speedup": slices.speedup() if slices else None,
        "bound": slices.bound() if slices else None,
        "peak_memory_gib": {f"device{i}": peak for i, peak in enumerate(peaks)},
    }


def _why_no_speedup(placement: Placement, slices: Slices | None, problem: str | None) -> str | None:
    if placement.strategy == "single" or (slices and slices.speedup()):
        return None
    if placement.may_speed_up:
        return problem or "it was not measured"
    return next((label.text for label in placement.labels if label.kind != "unused_devices"), "one device was used")


def work(job: Job, scratch: Path) -> None:
    """Train as one rank of a job."""
    run_rank(lambda: Worker(job), job.placement, scratch)


class Rank(Protocol):
    """What one worker process does; ``model`` is None until it is built."""

    strategy: Strategy
    model: nn.Module | None

    def run(self) -> None:
        """Do it."""
        ...


def run_rank(make: Callable[[], Rank], placement: Placement, scratch: Path) -> None:
    """Run one rank; a failure is left in ``scratch`` as plain data, and the process ends with its exit code."""
    rank: Rank | None = None
    try:
        rank = make()
        rank.run()
        # The wrapper must be gone before the process group: freed by the wrapper's destructor, which keeps
        # Python's lock, the group would wait for ever for threads of its own that need the lock.
        gc.collect()
        rank.strategy.close()
    except Exception as error:  # noqa: BLE001 - whatever it is, the launcher must learn of it
        found = diagnosis.explain(error, placement=placement, model=rank.model if rank else None)
        report_failure(found, scratch)
        if isinstance(found, WorkerError):
            time.sleep(1)  # a rank that failed for want of another lets the launcher see that one first
        raise SystemExit(found.exit_code) from None


def report_failure(error: SamebitsError, scratch: Path) -> None:
    """Leave an error for the launcher."""
    rank = os.environ.get("RANK", "0")
    report = {
        "time": time.time(),
        "rank": int(rank),
        "message": error.message,
        "hint": error.hint,
        "exit_code": error.exit_code,
        "traceback": traceback.format_exc(),
    }
    (scratch / f"rank{rank}.json").write_text(json.dumps(report), encoding="utf-8")
