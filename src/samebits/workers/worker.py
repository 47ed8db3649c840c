"""The work of one worker process: prepare, warm up, train, measure and, on rank 0, record."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from samebits.files import settle
from samebits.host import HostFacts, host_facts
from samebits.measuring.prolonging import notes_of
from samebits.measuring.references import WARM_UP_SECONDS, WARM_UP_STEPS, copy_of
from samebits.measuring.roofline import measure_roof
from samebits.measuring.slices import NOT_ENDED, why_no_speedup
from samebits.measuring.tracing import write_trace
from samebits.models.experiment import metrics_of
from samebits.records import log as events
from samebits.records.batches import BatchDigests
from samebits.records.card import read_card
from samebits.records.run import FILES, TRACE, WEIGHTS, Node, RunRecord, Timing, run_name, write_run
from samebits.records.statistics import spread
from samebits.remarks import Resumed
from samebits.strategies import any_has_ranks
from samebits.training.checkpoints import Checkpoints, PeriodicCheckpointer, StopRequest, identity
from samebits.training.loop import train, warm_up
from samebits.training.memory import measure_memory
from samebits.training.meters import peak_gib, reset_peak
from samebits.training.mixing import batch_norms_of
from samebits.training.placement import not_applied
from samebits.training.setup import Setup
from samebits.training.weights import save_weights, weights_digest
from samebits.training.worker import make_worker
from samebits.workers.measure import Measurements, has_twins, measure
from samebits.workers.progress import Progress
from samebits.workers.rank import run_rank
from samebits.workers.sampler import Sampler

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from samebits.batch_split import BatchSplit
    from samebits.measuring.slices import Slices
    from samebits.params import Params
    from samebits.params.schema import NumericsName
    from samebits.records.log import Event, RunLog
    from samebits.records.memory import Memory
    from samebits.records.run import Arithmetic
    from samebits.remarks import Note
    from samebits.strategies.placement import Placement
    from samebits.training.datasets import AnyData
    from samebits.training.loop import Trainable, TrainResult
    from samebits.workers.rank import Reporter


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """A training as the launcher hands it to its workers; ``key`` names the run in logs and in MLflow.

    ``checkpoints`` is the folder of checkpoints, None for no checkpoints; ``steps`` ends the training early. ``nodes``
    are the names of several machines and of their kernels.
    """

    params: Params
    numerics: NumericsName
    placement: Placement
    split: BatchSplit
    data_dir: Path
    out_dir: Path
    key: str
    nodes: tuple[tuple[str, str], ...] = ()
    log: RunLog | None = None
    checkpoints: Path | None
    steps: int | None = None
    trace: bool = False


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a rank trains. ``untrained`` is a copy of the model for the references on this rank, if there are any."""

    trainable: Trainable
    untrained: nn.Module | None
    data: AnyData
    host: HostFacts
    nodes: tuple[Node, ...]
    initial_sha256: str
    model_parameters: int
    checkpointer: PeriodicCheckpointer | None


@dataclass(frozen=True, kw_only=True)
class TrainOutcome:
    """A finished training, whose weights are saved. Times are of the slowest rank, ``peaks_gib`` of each device."""

    result: TrainResult
    peaks_gib: list[float]
    weights_sha256: str
    arithmetic: Arithmetic | None


class TrainingRank:
    """One rank of a training."""

    def __init__(self, request: TrainRequest, stop: StopRequest, reporter: Reporter) -> None:
        self._request, self._params, self._stop, self._at = request, request.params, stop, reporter.at
        self._at("preparing")
        self._card = read_card(request.data_dir / "card.json", request.params)
        self.worker = make_worker(request.placement, request.params.train)
        self._setup = Setup(request.params, request.numerics, self._card, split=request.split, worker=self.worker)
        self.model: nn.Module | None = None
        self._notes: list[Note] = list(request.placement.notes)
        self._sampler = Sampler(request.placement, on=self.worker.rank == 0)
        self._memory: Memory | None = None

    def run(self) -> None:
        """Train and measure; rank 0 writes ``model.safetensors``, ``losses.csv``, ``timing.json``, ``run.json``."""
        prepared = self._prepare()

        def note_memory() -> None:
            self._memory = measure_memory(prepared.trainable, self._request.split.samples)

        kind = self.worker.device.type
        step_seconds = warm_up(
            prepared.trainable, WARM_UP_STEPS[kind], seconds=WARM_UP_SECONDS[kind], before_reset=note_memory
        )
        outcome = self._train(prepared, step_seconds)
        first = self.worker.rank == 0
        if first:
            self._record(prepared, outcome, Measurements(NOT_ENDED))  # nothing that follows can lose it then
        self._at("measuring")
        measured = measure(
            prepared.trainable,
            outcome.result.losses,
            untrained=prepared.untrained,
            data=prepared.data,
            setup=self._setup,
            placement=self._request.placement,
            step_seconds=step_seconds,
            sampler=self._sampler,
        )
        self._sampler.roof = measure_roof(
            prepared.trainable, self._params.train, self._request.split.samples, step_seconds
        )
        self._at("recording")
        if first:
            timing = self._record(prepared, outcome, measured)
            settle(self._request.out_dir, FILES)  # before the checkpoint, which could give them again, is deleted
        if prepared.checkpointer:
            prepared.checkpointer.delete()
        if first:
            self._setup.watched.remember(self._params.model)
        try:
            if self._request.trace:  # after the record: nothing is lost if this fails
                write_trace(prepared.trainable, self._request.out_dir / TRACE, len(outcome.result.losses))
        finally:
            if first:  # after this event the sender takes the files that exist
                self._log_result(timing, outcome.weights_sha256)

    def _prepare(self) -> Prepared:
        request, setup = self._request, self._setup
        setup.enter_process()
        host = host_facts()  # in the worker, because it starts CUDA if there are GPUs
        nodes = self._nodes(host)
        self._log(events.SetupEvent(host=host, nodes=nodes, data=self._card, data_dir=str(request.data_dir.resolve())))
        self._at("building")
        self.model = model = setup.build()
        self._at("preparing")
        first = self.worker.rank == 0
        untrained = copy_of(model) if has_twins(self._setup, request.placement) else None
        initial_sha256 = weights_digest(model) if first else ""
        model_parameters = sum(p.numel() for p in model.parameters())
        setup.place(model)
        data = setup.load(request.data_dir)
        batches = setup.batches(data)
        if metrics_of(model):
            setup.try_metrics(model, setup.load(request.data_dir, "test"))
        wants_ranks = any_has_ranks(self._params.train.strategies)
        self._notes += setup.try_step(model, batches, request.placement, wants_ranks=wants_ranks)
        return Prepared(
            trainable=setup.trainable(model, batches),
            untrained=untrained,
            data=data,
            host=host,
            nodes=nodes,
            initial_sha256=initial_sha256,
            model_parameters=model_parameters,
            checkpointer=self._checkpointer(host),
        )

    def _nodes(self, host: HostFacts) -> tuple[Node, ...]:
        """The facts of every machine from its first rank, if there are several machines."""
        ranks_by_node = self._request.placement.ranks_by_node
        if not ranks_by_node:
            return ()
        everyone = self.worker.ranks.gather(host)
        return tuple(
            Node(name=name, machine=machine, host=everyone[ranks.start])
            for (name, machine), ranks in zip(self._request.nodes, ranks_by_node, strict=True)
        )

    def _checkpointer(self, host: HostFacts) -> PeriodicCheckpointer | None:
        request = self._request
        if request.checkpoints is None:
            return None
        sources = self._setup.sources()
        name = identity(
            self._params,
            request.numerics,
            request.placement,
            card=self._card,
            host=host.fingerprint,
            source=sources.digest if sources else None,
            folder=request.out_dir,
        )
        place = f"{request.placement.strategy}, {request.placement.devices_used} devices, {host.fingerprint}"
        kept = Checkpoints(name, self.worker.rank, request.checkpoints)
        return PeriodicCheckpointer(kept, self._params.train.checkpoint_every_steps, self._stop, place=place)

    def _train(self, prepared: Prepared, seconds_of_a_step: float) -> TrainOutcome:
        request, worker, numerics = self._request, self.worker, self._setup.numerics
        first, steps = worker.rank == 0, min(request.steps or self._params.total_steps, self._params.total_steps)
        checkpointer, model = prepared.checkpointer, prepared.trainable.model
        reset_peak(worker)
        name = run_name(request.placement.strategy, request.numerics)
        progress = Progress(name, steps, self._at, request.log if first else None, shown=first)
        with self._sampler.during("training"):
            training = train(
                prepared.trainable, steps, step_seconds=seconds_of_a_step, tracker=progress, checkpointer=checkpointer
            )
        progress.close()
        if training.resumed:
            self._notes.append(Resumed(steps=tuple(training.resumed), elsewhere=training.elsewhere))
        peaks = worker.ranks.all_gather(torch.tensor(peak_gib(worker), dtype=torch.float64, device=worker.device))
        weights_sha256 = worker.ranks.first_alone(
            lambda: save_weights(numerics.model_state_dict(model), request.out_dir / WEIGHTS)
        )
        if checkpointer:
            checkpointer.training_done()
        (seconds,) = worker.ranks.max_over_ranks([training.seconds])
        step_seconds = worker.ranks.max_over_ranks(training.step_seconds)
        return TrainOutcome(
            result=replace(training, step_seconds=step_seconds, seconds=seconds),
            peaks_gib=peaks.flatten().tolist(),
            weights_sha256=weights_sha256 or "",
            arithmetic=numerics.arithmetic(),
        )

    def _record(self, prepared: Prepared, outcome: TrainOutcome, measured: Measurements) -> Timing:
        slices, request, params, device = measured.slices, self._request, self._params, self.worker.device
        tf32 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        record = RunRecord(
            run=request.key,
            strategy=request.placement.strategy,
            numerics=request.numerics,
            placement=request.placement,
            notes=(*self._notes, *notes_of(slices.repeats)),
            not_applied=not_applied(params, request.placement, request.numerics, tf32=tf32),
            speedup_unavailable=why_no_speedup(request.placement, slices),
            first_unrepeated_step=slices.first_difference,
            rounding=measured.rounding,
            breakdown=measured.breakdown,
            arithmetic=outcome.arithmetic,
            draws=self._setup.draws,
            batch_norms=batch_norms_of(prepared.trainable.model),
            same_draws=measured.same_draws,
            own_loss=self._setup.numerics.own_loss is not None,
            batches=BatchDigests.of(outcome.result.digests, params.train.global_batch_size),
            initial_sha256=prepared.initial_sha256,
            weights_sha256=outcome.weights_sha256,
            model_parameters=prepared.model_parameters,
            host=prepared.host,
            nodes=prepared.nodes,
            data=self._card,
            params=params,
            measurement=slices.measurement(outcome.result.step_seconds),
            usage=self._sampler.usage(outcome.result, request.split.samples),
            memory=self._memory,
        )
        timing = timing_of(outcome, slices, samples=request.split.samples)
        write_run(request.out_dir, record, timing, outcome.result.losses)
        return timing

    def _log_result(self, timing: Timing, weights_sha256: str) -> None:
        request, out_dir = self._request, str(self._request.out_dir.resolve())
        self._log(events.ResultEvent(run=request.key, timing=timing, out_dir=out_dir, weights_sha256=weights_sha256))
        if request.log:
            request.log.close()  # this writes what the disk had refused before

    def _log(self, event: Event) -> None:
        if self._request.log and self.worker.rank == 0:
            self._request.log.append(event)


def timing_of(outcome: TrainOutcome, slices: Slices, *, samples: int) -> Timing:
    """The figures of timing.json; ``samples`` is the number of samples in a step."""
    steps, seconds = outcome.result.step_seconds, outcome.result.seconds
    fast, middle, slow = (1e3 * np.percentile(steps, [5, 50, 95])).tolist()
    whole = len(steps) * samples / seconds
    speeds = [slices.steps * samples / sum(chunks) for chunks in slices.seconds.get("strategy", [])]
    return Timing(
        training_seconds=seconds,
        samples_per_sec=whole,
        samples_per_sec_spread=spread(speeds if outcome.result.resumed and speeds else [whole, *speeds]),
        step_time_ms=middle,
        step_time_p5_ms=fast,
        step_time_p95_ms=slow,
        speedup=slices.speedup(),
        bound=slices.bound(),
        price=slices.price(),
        peak_memory_gib={
            f"device{i}": peak if math.isfinite(peak) else None for i, peak in enumerate(outcome.peaks_gib)
        },
    )


def train_as_rank(request: TrainRequest, reporter: Reporter) -> None:
    """Train as one rank in a forked worker; the ``reporter`` takes failures to the launcher."""
    stop = StopRequest()
    run_rank(lambda: TrainingRank(request, stop, reporter), request.placement, reporter)
