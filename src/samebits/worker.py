"""What one worker process does: build, train, time, and (rank 0) write the run's files."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from samebits import diagnosis
from samebits.checkpoint import save_weights, weights_digest
from samebits.data.batches import load_split, on_device
from samebits.data.card import read_card
from samebits.files import write_json, write_text
from samebits.host import fingerprint, host_facts
from samebits.keeper import CheckpointKeeper
from samebits.measurement import Slices, reference, references, time_slices
from samebits.memory import peak_gib, reset_peak
from samebits.metrics import percentile, spread
from samebits.models.build import build_model
from samebits.numerics.make import make_numerics
from samebits.placement import Placement, not_applied
from samebits.progress import Progress
from samebits.rank import batches_of, run_rank
from samebits.resume import FOLDER, Checkpoints, identity
from samebits.rounding import Rounding, measure_rounding
from samebits.stopping import StopRequest
from samebits.strategies import make_strategy
from samebits.trainer import Snapshot, Trainable, Training, train, warm_up

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from samebits.data.batches import Batch
    from samebits.data.card import Card
    from samebits.numerics.interface import Numerics
    from samebits.params import Params
    from samebits.params.schema import NumericsName
    from samebits.runlog import RunLog
    from samebits.strategies import Strategy

WARM_UP_STEPS = {"cpu": 3, "cuda": 10}


@dataclass(frozen=True)
class Job:
    """One training, as the launcher hands it to its workers; ``key`` names the run in logs and in MLflow.

    Checkpoints are under ``resume``, None for no checkpoints; ``steps`` ends the training early.
    """

    params: Params
    placement: Placement
    numerics: NumericsName
    data_dir: Path
    out_dir: Path
    key: str
    log: RunLog | None
    resume: Path | None = FOLDER
    steps: int | None = None

    @property
    def name(self) -> str:
        """Strategy and numerics, as in ``runs/NAME``."""
        return f"{self.placement.strategy}-{self.numerics}"


class Worker:
    """One rank of a job."""

    def __init__(self, job: Job, stop: StopRequest) -> None:
        self.job, self.params, self.stop = job, job.params, stop
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
        self.host = host_facts()  # here, because where there are GPUs it starts CUDA
        self._log("setup", host=self.host, data=card.model_dump(mode="json"), data_dir=str(self.job.data_dir.resolve()))
        numerics = make_numerics(self.job.numerics, params, strategy.device, card.loss, tuple(card.target_shape))
        numerics.configure()
        strategy.seed(params.seed)
        self.model = model = build_model(params.model, card, params.seed, numerics.building())
        self.initial = weights_digest(model) if strategy.rank == 0 else ""
        untrained = self._copy_for_references(model)
        numerics.adopt(model)
        data = on_device(load_split(self.job.data_dir, card, "train"), strategy.device)
        model.to(strategy.device)
        own = self._trainable(model, data, numerics)
        step_seconds = warm_up(own, WARM_UP_STEPS[strategy.device.type])
        reset_peak(strategy)
        progress = self._progress()
        keeper = self._keeper()
        steps = self.job.steps or params.total_steps
        training = train(own, steps, step_seconds=step_seconds, tracker=progress, keeper=keeper)
        progress.close()
        if training.resumed:
            after = ", ".join(map(str, training.resumed))
            self.notes.append(f"the training was stopped and continued after step {after}; its times are of all parts")
        peaks = strategy.gather(torch.tensor(peak_gib(strategy), dtype=torch.float64, device=strategy.device))
        weights = ""
        if strategy.rank == 0:
            weights = save_weights(numerics.weights(model), self.job.out_dir / "model.safetensors")
        if keeper:
            keeper.training_done()
        twin = params.train.repeats > 1 and self.job.numerics == "fast"
        final = Snapshot(model) if twin else None
        strategy.barrier()  # saving a large model must not count as waiting for what comes next
        facts = numerics.facts()
        slices = self._slices(own, untrained, data, training, step_seconds)
        rounding = None
        if final:
            rounding = measure_rounding(own, training.losses, final, seed=params.seed, step_seconds=step_seconds)
        slowest = strategy.maximum(training.step_seconds)
        (seconds,) = strategy.maximum([training.seconds])
        if strategy.rank == 0:
            timing = _timing(params, seconds, slowest, slices, peaks.flatten().tolist())
            self._write(training, timing, slowest, slices, rounding, facts, weights)
        if keeper:
            keeper.delete()

    def _log(self, event: str, **values: Any) -> None:
        if self.job.log and self.strategy.rank == 0:
            self.job.log.event(event, **values)

    def _copy_for_references(self, model: nn.Module) -> nn.Module | None:
        wanted = self._references() and self.params.train.repeats > 1 and self.strategy.rank == 0
        return copy.deepcopy(model) if wanted else None

    def _keeper(self) -> CheckpointKeeper | None:
        if self.job.resume is None:
            return None
        host, versions = fingerprint(self.host), {"torch": str(torch.__version__)}
        name = identity(self.params, self.job.numerics, self.job.placement, self.card, host, versions)
        every = self.params.train.checkpoint_every_steps
        return CheckpointKeeper(Checkpoints(name, self.strategy.rank, self.job.resume), every, self.stop)

    def _references(self) -> tuple[str, ...]:
        return references(self.job.placement, self.job.numerics)

    def _progress(self) -> Progress:
        first = self.strategy.rank == 0
        following = [self.job.log] if first and self.job.log else []
        return Progress(self.job.name, self.params.total_steps, following, shown=first)

    def _trainable(self, model: nn.Module, data: Batch, numerics: Numerics) -> Trainable:
        batches = batches_of(self.params, self.job.numerics, data, self.card, self.strategy)
        initial = Snapshot(model)
        batch, wants_ddp = batches.micro_batch(0, 0), "ddp" in self.params.train.strategies
        self.notes += diagnosis.trial_step(model, numerics, batch, self.card, self.job.placement, wants_ddp=wants_ddp)
        initial.restore()
        return Trainable(model, batches, self.strategy, numerics, self.params)

    def _slices(
        self,
        own: Trainable,
        untrained: nn.Module | None,
        data: Batch,
        training: Training,
        step_seconds: float,
    ) -> Slices:
        """Repeats and references; a reference that does not fit on the device is said, not fatal."""
        strategy, repeats = self.strategy, self.params.train.repeats - 1
        if not repeats:
            return Slices(problem="train.repeats is 1")
        others: dict[str, Trainable] = {}
        problem = None
        for name in self._references():
            made = self._reference(name, untrained, data) if untrained is not None else None
            if made is not None:
                others[name] = made
            # Every rank meets here after each reference, so that none waits for all of them at once.
            if not strategy.maximum([made is not None])[0]:
                problem = "the references do not fit on one device beside the training"
        names = [] if problem else list(self._references())
        if problem:
            others.clear()
        slices = time_slices(own, others, names, training.losses, step_seconds=step_seconds, repeats=repeats)
        return replace(slices, problem=problem)

    def _reference(self, name: str, model: nn.Module, data: Batch) -> Trainable | None:
        try:
            made = reference(name, model, data, self.card, self.params, self.job.numerics, self.strategy)
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
        slices: Slices,
        rounding: Rounding | None,
        facts: dict[str, Any],
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
            "not_applied": not_applied(self.params.train, job.placement, job.numerics, tf32=self._has_tf32()),
            "speedup_unavailable": _why_no_speedup(job.placement, slices),
            "first_unrepeated_step": slices.first_difference,
            "rounding": rounding,
            "arithmetic": facts,
            "initial_sha256": self.initial,
            "weights_sha256": weights,
            "data_sha256": self.card.sha256,
            "host": self.host,
            "data": self.card.model_dump(mode="json"),
            "model_parameters": sum(p.numel() for p in model.parameters()),
            "params": self.params.model_dump(mode="json"),
            "measurement": {
                "step_ms": [float(f"{seconds * 1e3:.4g}") for seconds in step_seconds],
                "slice_steps": slices.steps,
                "chunk_steps": slices.chunk_steps,
                "chunk_seconds": slices.seconds,
            },
        }
        write_json(out / "run.json", record)
        self._log("result", run=job.key, timing=timing, out_dir=str(out.resolve()), weights_sha256=weights)


def _timing(
    params: Params, seconds: float, step_seconds: list[float], slices: Slices, peaks: list[float]
) -> dict[str, Any]:
    """The figures of timing.json; times in ms per step are those of the slowest rank."""
    steps, batch = len(step_seconds), params.train.global_batch_size
    repeats = [slices.steps * batch / sum(chunks) for chunks in slices.seconds.get("own", [])]
    return {
        "training_seconds": seconds,
        "samples_per_sec": steps * batch / seconds,
        "samples_per_sec_spread": spread([steps * batch / seconds, *repeats]),
        "step_time_ms": percentile(step_seconds, 50) * 1e3,
        "step_time_p5_ms": percentile(step_seconds, 5) * 1e3,
        "step_time_p95_ms": percentile(step_seconds, 95) * 1e3,
        "speedup": slices.speedup(),
        "bound": slices.bound(),
        "price": slices.price(),
        "peak_memory_gib": {f"device{i}": peak for i, peak in enumerate(peaks)},
    }


def _why_no_speedup(placement: Placement, slices: Slices) -> str | None:
    if placement.strategy == "single" or slices.speedup():
        return None
    if placement.may_speed_up:
        return slices.problem or "it was not measured"
    return next((label.text for label in placement.labels if label.kind != "unused_devices"), "one device was used")


def work(job: Job, scratch: Path) -> None:
    """Train as one rank of a job."""
    stop = StopRequest()
    run_rank(lambda: Worker(job, stop), job.placement, scratch)
